"""The report of a posterior, on a run folder that `bayestrain train --particles` has just written."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_report_page import EXPECTED, parsed
from test_report_runs import deep_run
from typer.testing import CliRunner

from bayestrain.cli.app import app
from bayestrain.report import write_report
from bayestrain.report.agreement import agreement_sentence, within_one
from bayestrain.report.figures.certainty import at_share, rejection_curve
from bayestrain.report.figures.density import mass_levels
from bayestrain.report.figures.uncertainty import bin_edges, uncertainty_groups
from bayestrain.report.findings import certainty_findings
from bayestrain.report.headline import headline, verdict
from bayestrain.report.load import load_run
from bayestrain.report.pictures import doubts
from bayestrain.report.run import Evaluation, no_images
from bayestrain.report.words import area, method, percent, short, signed

TINY = (
    "fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=500", "fit.lr=0.02", "fit.round_tol=0.1",
    "tensorize.max_rank=8", "prior.warmup_epochs=1", "posterior.outside=patches",
)  # fmt: skip
OF_PARTICLES = {
    "uncertainty-total", "uncertainty-epistemic", "particle-scores", "own-ranks", "mixture-gain", "particle-number",
    "particle-distance",
}  # fmt: skip


def posterior_run(base: Path) -> Path:
    """A posterior of three particles and its MAP run, trained once for all tests of a session."""
    folder = base / "posterior-run"
    if not (folder / "result.json").exists():
        settings = [word for setting in TINY for word in ("--set", setting)]
        result = CliRunner().invoke(
            app, ["train", "mnist-mini", "--particles", "3", *settings, "--quiet", "--out", str(folder)]
        )
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="session")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return posterior_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def page(posterior: Path) -> Path:
    return write_report(posterior)


def copy(run: Path, into: Path, *without: str) -> Path:
    """The whole run folder, except some of it."""
    return Path(shutil.copytree(run, into, ignore=shutil.ignore_patterns("*.pt", "report.html", *without)))


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Edit a run's ``result.json``."""
    result = json.loads((folder / "result.json").read_text())
    edit(result)
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def change_tensors(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    edit(tensors)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def plain(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("\u00a0", " ")


def densities(plots: list[str]) -> set[str]:
    return {name for name in plots if name.startswith("density-")}


def test_a_posterior_has_its_own_sections(posterior: Path, page: Path) -> None:
    plots = parsed(page).plots
    assert set(plots) - densities(plots) == EXPECTED | OF_PARTICLES
    assert len(densities(plots)) == 9
    html = plain(page)
    run = load_run(posterior)
    assert run.posterior is not None
    assert "A posterior of 3 particles by SVGD. Each particle kept" in html
    assert "<li>particles <b>3</b></li>" in html
    assert "How sure it is, and why" in html
    assert len(re.findall('class="picture( doubt)?"', html)) == 24 + 10
    assert "15 more of the most uncertain test images" in html
    plain_mean = run.posterior.plain_log_likelihood or 0
    gain = plain_mean - (run.posterior.mean_log_likelihood or 0)
    assert gain >= 0
    rest = (run.scores.log_likelihood or 0) - plain_mean
    assert f"answering together gains {gain:.3f}, the temperature {rest:.3f}." in html
    assert not re.search(r":\s*#[0-9a-f]{6}", "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL)))
    assert "log of the particles’ mean probability" in html
    assert "in each of 3 particles" in html
    assert page.stat().st_size < 1_000_000


def test_auroc_is_the_share_of_pairs_in_order(posterior: Path, page: Path) -> None:
    run = load_run(posterior)
    assert run.evaluation is not None
    assert run.evaluation.uncertainty is not None
    assert run.ood is not None
    html = plain(page)

    def pairs(inside: Any, outside: Any) -> float:
        above = outside[:, None] > inside[None]
        return float(above.mean() + 0.5 * (outside[:, None] == inside[None]).mean())

    right, doubt = run.evaluation.right, run.evaluation.uncertainty
    by_total, by_epistemic = (pairs(kind[right], kind[~right]) for kind in (doubt.total, doubt.epistemic))
    wrong = int((~right).sum())
    assert f"its {wrong} errors from the rest: {area(by_total)} by total uncertainty, {area(by_epistemic)} by" in html
    assert f"telling shuffled patches from the test images: {area(run.ood.auroc)} by total" in html


def test_histograms_have_the_right_the_wrong_and_the_strange(posterior: Path) -> None:
    run = load_run(posterior)
    assert run.evaluation is not None
    for kind in ("total", "epistemic"):
        groups = uncertainty_groups(run, kind)
        assert [name for name, _, _ in groups] == ["right", "wrong", "shuffled patches"]
        numbers = [len(values) for _, _, values in groups]
        assert numbers[:2] == [run.evaluation.right.sum(), (~run.evaluation.right).sum()]
        edges = bin_edges([values for _, _, values in groups])
        for _, _, values in groups:
            assert np.histogram(np.maximum(values, edges[0]), edges)[0].sum() == len(values)


def test_bins_of_zeros_are_bins_all_the_same() -> None:
    edges = bin_edges([np.zeros(5), np.zeros(1)])
    assert (np.diff(edges) > 0).all()


def test_a_posterior_of_perfect_answers_has_no_errors_to_find(posterior: Path, tmp_path: Path) -> None:
    folder = copy(posterior, tmp_path / "run", "map")

    def perfect(tensors: dict[str, Any]) -> None:
        tensors["labels"] = tensors["probabilities"].argmax(1).astype(np.int64)

    change_tensors(folder / "evaluation.safetensors", perfect)
    run = load_run(folder)
    assert [name for name, _, _ in uncertainty_groups(run, "total")] == ["right", "shuffled patches"]
    assert [sentence.split(":")[0] for sentence in certainty_findings(run) if "AUROC" in sentence] == [
        "AUROC for telling shuffled patches from the test images"
    ]


def test_the_headline_compares_with_map_and_the_paper(posterior: Path, tmp_path: Path) -> None:
    folder = change(copy(posterior, tmp_path / "run"), lambda result: result.update(experiment="mnist"))
    run = load_run(folder)
    assert run.posterior is not None
    assert run.map is not None
    cards = {card.label: card for card in headline(run)}
    assert len(cards) == 8
    together, alone = cards["Log likelihood"], cards["Particles’ log likelihood"]
    assert (together.value, together.paper) == (signed(run.scores.log_likelihood), "")
    assert run.posterior.temperature != 1.0
    assert together.map == signed(run.map.scores.calibrated_log_likelihood) != signed(run.map.scores.log_likelihood)
    assert (alone.value, alone.paper, alone.verdict) == (signed(run.posterior.mean_log_likelihood), "−0.106", "worse")
    assert cards["Test accuracy"].map == percent(run.map.scores.accuracy)
    assert cards["Out-of-distribution AUROC"].map == area(run.map.ood_auroc)
    assert verdict(1.0, 2.0, smaller_is_better=True) == "better"
    assert verdict(1.0, 2.0) == "worse"
    assert verdict(1.0, None) == verdict(1.0, 1.0) == ""


def test_the_map_run_is_a_run_of_its_own(posterior: Path, tmp_path: Path) -> None:
    run = load_run(posterior / "map")
    assert (run.posterior, run.map) == (None, None)
    path = write_report(posterior / "map", tmp_path / "map.html")
    assert set(parsed(path).plots) == EXPECTED | {"uncertainty-total"}
    html = plain(path)
    assert "telling shuffled patches from the test images" in html
    assert "posterior" not in html.partition("For the record")[0].lower().partition("<body>")[2]


def test_the_images_shown_are_those_the_particles_disagree_on(posterior: Path) -> None:
    run = load_run(posterior)
    assert run.evaluation is not None
    assert run.evaluation.uncertainty is not None
    shown = doubts(run)
    by_file = run.evaluation.uncertainty.epistemic[run.evaluation.hardest]
    expected = run.evaluation.hardest[np.argsort(-by_file)][:9]
    assert [doubt.picture.index for doubt in shown] == expected.tolist()
    assert [doubt.epistemic for doubt in shown] == pytest.approx(np.sort(by_file)[::-1][:9], abs=1e-4)


def test_shades_hold_their_share_of_the_density() -> None:
    axis = np.linspace(-6, 6, 301)
    gauss = np.exp(-0.5 * (axis[:, None] ** 2 + axis**2))
    assert mass_levels(gauss, (0.95, 0.5)) == pytest.approx([0.05, 0.5], rel=0.02)  # a circle of mass s: height 1 - s


def test_rejection_against_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet([0.3] * 4, 50), rng.integers(0, 4, 50)
    curve = rejection_curve(Evaluation(p, labels, np.zeros(0, np.int64), no_images()))
    surest = sorted(range(50), key=lambda i: -sum(x * np.log(x) for x in p[i]))
    for number in (1, 7, 45, 50):
        right = [p[i].argmax() == labels[i] for i in surest[:number]]
        assert at_share(curve, number / 50) == pytest.approx(sum(right) / number)


@pytest.mark.parametrize(
    ("within", "bonds", "start"),
    [
        (4, 5, "They agree on the ranks: on 4 of 5 bonds (80 %) their ranks lie within one of each other."),
        (43, 54, "They do not agree on the ranks: on only 43 of 54 bonds (79 %) do their ranks lie within one"),
        (1, 4, "They do not agree on the ranks: on only 1 of 4 bonds (25 %) do their ranks lie within one"),
        (0, 4, "They do not agree on the ranks: on none of 4 bonds do their ranks lie within one"),
        (1, 1, "They agree on the ranks: on 1 of 1 bond (100 %) their ranks"),
    ],
)
def test_agreement_takes_four_fifths_of_the_bonds(within: int, bonds: int, start: str) -> None:
    assert agreement_sentence(within, bonds, "They", "their ranks").replace("\u00a0", " ").startswith(start)


def test_agreement_on_ranks_that_nobody_cut_is_no_merit() -> None:
    assert agreement_sentence(4, 4, "They", "their ranks", 3).endswith("on 3 of them simply because none cut anything.")
    assert within_one([(3, 4, 4), (2, 4), (5,)]) == (2, 3)


def test_particles_that_do_not_agree_are_told_plainly_and_warnings_stand_at_the_top(
    posterior: Path, tmp_path: Path
) -> None:
    folder = copy(posterior, tmp_path / "run")
    wide = {"1": [[2, 5, 8], [3, 3, 4], [1, 4, 4]], "3": [[6, 6, 6]]}
    warning = "All <b>are</b> one. Start them apart."
    change(folder, lambda result: result["posterior"].update(own_ranks=wide, warnings=[warning]))
    html = plain(write_report(folder))
    assert '<p class="notice">All &lt;b&gt;are&lt;/b&gt; one. Start them apart.</p>' in html
    assert "The particles do not agree on the ranks: on only 2 of 4 bonds (50 %) do their own ranks lie within" in html
    assert "layer 1, bond 1: 1 particle of rank 8" in html


def test_a_deep_network_has_one_figure_of_all_spreads(tmp_path: Path) -> None:
    folder = deep_run(tmp_path / "deep", epochs=2, layers=8)
    ranks = json.loads((folder / "result.json").read_text())["ranks"]
    own = {name: [[rank, rank + 3 * (k == 0)] for k, rank in enumerate(chain[1:-1])] for name, chain in ranks.items()}
    about = {"method": "ensemble", "particles": 2, "own_ranks": own, "particle_accuracy": [0.8, 0.9]}
    change(folder, lambda result: result.update(posterior=about))
    path = write_report(folder)
    assert {"own-ranks", "particle-scores"} <= set(parsed(path).plots)
    html = plain(path)
    assert "A posterior of 2 particles by deep ensemble." in html
    assert "24 of 32 bonds (75 %)" in html
    assert "8 bonds on which the own ranks differ by 3" in html


def test_posteriors_and_networks_are_compared(posterior: Path, tmp_path: Path) -> None:
    folders = [posterior, copy(posterior, tmp_path / "second"), posterior / "map"]
    change(
        folders[1],
        lambda result: (result.update(seed=1, experiment="mnist-mini"), result["ranks"]["1"].__setitem__(1, 1)),
    )
    config = (folders[1] / "config.toml").read_text()
    (folders[1] / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    path = write_report(folders, tmp_path / "compared.html")
    parsed(path)
    html = plain(path)
    header = re.findall(r'<th scope="col">([^<]*)</th>', html)
    assert header[:3] == ["run", "posterior", "seed"]
    assert {"particle mean", "OOD AUROC"} <= set(header)
    assert html.count("<td>3 × SVGD</td>") == 2
    assert html.count("<td>MAP</td>") == 1
    run = load_run(posterior)
    assert run.posterior is not None
    assert f"<td>{signed(run.posterior.mean_log_likelihood, 4)}</td>" in html
    assert "The 2 seeds of mnist-mini (3 particles) do not agree on the ranks: on only 3 of 4 bonds (75 %)" in html


def test_the_papers_likelihood_stands_beside_the_particles_mean(posterior: Path, tmp_path: Path) -> None:
    folders = [copy(posterior, tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        change(folder, lambda result: result.update(experiment="mnist"))
    html = plain(write_report(folders, tmp_path / "compared.html"))
    header = re.findall(r'<th scope="col">([^<]*)</th>', html)
    row = re.search(r'<tr class="paper">.*?</tr>', html)
    assert row is not None
    cells = dict(zip(header[1:], re.findall(r"<td>([^<]*)</td>", row[0]), strict=True))
    assert (cells["log likelihood"], cells["particle mean"]) == ("–", "−0.1060")
    assert "agree on the ranks" not in html, "the same seed twice is no evidence"


def test_words_for_posteriors() -> None:
    assert [short(value) for value in (1108.2, -0.17564, 3)] == ["1,108", "−0.176", "3"]
    assert [method(name) for name in ("svgd", "sgld", "ensemble", "own")] == ["SVGD", "SGLD", "deep ensemble", "own"]
    assert [area(value) for value in (0.5, 0.98251, 0.99951, 1.0, None)] == ["0.500", "0.983", "0.99951", "1.000", "–"]
