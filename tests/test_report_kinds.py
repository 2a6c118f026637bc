"""The report of dense and tensorized runs, of runs cut to a ratio and by lambda: real ones, trained here in seconds."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report_page import parsed
from test_report_posterior import OF_PARTICLES, change, copy, densities, plain
from test_report_runs import deep_run
from typer.testing import CliRunner

from bayestrain.cli.app import app
from bayestrain.report import write_report
from bayestrain.report.headline import headline
from bayestrain.report.load import load_run
from bayestrain.report.paper import PAPER
from bayestrain.report.run import Run, Spectra
from bayestrain.report.tolerance import tolerances
from bayestrain.report.words import count, percent, ratio, signed, tolerance
from bayestrain.train import toml
from bayestrain.train.experiment import run_experiment
from bayestrain.train.progress import Silent

TINY = (
    "fit.epochs=2", "fit.finetune_epochs=1", "fit.batch_size=500", "fit.lr=0.02", "prior.warmup_epochs=1",
    "tensorize.max_rank=8", "data.validation_fraction=0.6", "posterior.outside=patches",
    "posterior.particles=3",
)  # fmt: skip
WAYS = {
    "dense": ("experiment.kind=dense",),
    "tensorized": ("experiment.kind=tensorized",),
    "ratio": ("fit.target_ratio=150",),
    "lambda": ("fit.rule=lambda", "prior.update=gradient", "fit.round_tol=0.29", "fit.finetune_epochs=0"),
}
CERTAINTY = {"reliability", "rejection", "uncertainty-total"}
OF_SEARCH = {"What is left", "How it got there", "Where the cut fell", "λ"}


def ask(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A posterior of each kind, and the MAP run in its folder."""
    base, found = tmp_path_factory.mktemp("kinds"), {}
    for name, way in WAYS.items():
        config, folder = toml.named("mnist-mini", "default", [*TINY, *way]), base / f"{name}-3"
        run_experiment(config, folder, device="cpu", resume=False, progress=Silent(), command="bayestrain train")
        found |= {name: folder / "map", f"{name}-3": folder}
    return found


def said(path: Path) -> str:
    """What the page says above the record, without its figures."""
    html = plain(path).partition('<section id="details">')[0]
    html = re.sub(r"<(svg|style|title).*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", html))


def plots_of(path: Path) -> set[str]:
    plots = parsed(path).plots
    return set(plots) - densities(plots)


def test_a_dense_run_is_not_said_to_have_shrunk(runs: dict[str, Path]) -> None:
    path = write_report(runs["dense"])
    assert plots_of(path) == {"parameters-1", "accuracy", *CERTAINTY}
    text = said(path)
    assert "The network is an ordinary dense one of 496,885 parameters and classifies" in text
    assert not [words for words in (*OF_SEARCH, "smaller", "Compression", "kept") if words in text]
    assert [card.label for card in headline(load_run(runs["dense"]))] == [
        "Parameters", "Test accuracy", "Log likelihood", "Calibration error", "Brier score", "Time",
    ]  # fmt: skip
    record = plain(path).partition('<section id="details">')[2].partition("<summary>Config")[0]
    assert '<th scope="row">1</th><td>490,625</td></tr>' in record
    assert "left dense" not in record


def test_a_single_network_has_its_figures_at_a_temperature_beside(runs: dict[str, Path]) -> None:
    result = json.loads((runs["dense"] / "result.json").read_text())["calibrated"]
    notes = {card.label: card.note for card in headline(load_run(runs["dense"]))}
    at = f" at temperature {result['temperature']:.2f}"
    assert notes["Log likelihood"] == signed(result["log_likelihood"]) + at
    assert notes["Calibration error"] == percent(result["ece"]) + at
    assert not [card for card in headline(load_run(runs["dense-3"])) if "at temperature" in card.note]


def test_a_tensorized_run_is_not_said_to_have_sought_ranks(runs: dict[str, Path]) -> None:
    path = write_report(runs["tensorized"])
    run = load_run(runs["tensorized"])
    assert plots_of(path) == {"ranks", "parameters-1", "accuracy", *CERTAINTY}
    text = said(path)
    sizes = f"{count(run.scores.params)} instead of 496,885 parameters ({ratio(run.scores.ratio)} smaller)"
    assert f"The network keeps all ranks of its tensor trains, {sizes}, and classifies" in text
    assert "Every bond has its maximal rank and keeps it." in text
    assert not [words for words in (*OF_SEARCH, "Inferred", "with all ranks", "with all its ranks") if words in text]


@pytest.mark.parametrize("kind", ["dense", "tensorized"])
def test_a_posterior_of_such_networks(runs: dict[str, Path], kind: str) -> None:
    path = write_report(runs[f"{kind}-3"])
    ranks = {"ranks"} if kind == "tensorized" else set()
    assert plots_of(path) == {"parameters-1", "accuracy", *ranks, *CERTAINTY, *OF_PARTICLES} - {"own-ranks"}
    text = said(path)
    assert "A posterior of 3 particles by SVGD. Each particle" in text
    assert "; together they classify" in text
    assert ("all have the same ranks" in text) == (kind == "tensorized")
    assert "agree on the ranks" not in text
    assert not [words for words in OF_SEARCH if words in text]
    cards = headline(load_run(runs[f"{kind}-3"]))
    assert len(cards) == 8
    assert cards[0].map == cards[0].value
    assert ("Compression" in [card.label for card in cards]) == (kind == "tensorized")


def test_the_mean_of_the_particles_own_accuracies(runs: dict[str, Path]) -> None:
    own = json.loads((runs["dense-3"] / "result.json").read_text())["posterior"]["particle_accuracy"]
    card = headline(load_run(runs["dense-3"]))[2]
    assert (card.label, card.value) == ("Particles’ accuracy", f"{100 * sum(own) / 3:.2f} %")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("dense", "The training has reached epoch 3 of 3; the network is dense and has 496,885 parameters."),
        ("tensorized", "The training has reached epoch 3 of 3; the network keeps all its ranks and has"),
    ],
)
def test_such_a_run_before_its_end(runs: dict[str, Path], tmp_path: Path, kind: str, sentence: str) -> None:
    late = ("result.json", "spectra.json", "evaluation.safetensors", "model.json")
    path = write_report(copy(runs[kind], tmp_path / "run", *late))
    assert sentence in said(path)
    assert "accuracy" in parsed(path).plots
    assert "size" not in parsed(path).plots


def test_what_a_dense_run_cannot_have_is_not_missed(runs: dict[str, Path], tmp_path: Path) -> None:
    path = write_report(copy(runs["dense"], tmp_path / "run", "spectra.json", "model.json"))
    assert "Left out: class names (no model.json)." in said(path)


@pytest.mark.parametrize("name", ["ratio", "ratio-3"])
def test_a_cut_to_a_size_is_told(runs: dict[str, Path], name: str) -> None:
    run = load_run(runs[name])
    assert run.spectra is not None
    assert run.sized is not None
    assert 0 < run.sized < 1
    assert (run.scores.ratio or 0) >= 150
    path = write_report(runs[name])
    text = said(path)
    assert "The network was to be at least 150× smaller. That decided, not a gap in the spectrum" in text
    mean = " (root mean square over particles)" if name == "ratio-3" else ""
    assert f"no cut for the size changed a weight by more than {tolerance(run.sized)}{mean}." in text
    lines = [json.loads(line) for line in (runs[name] / "history.jsonl").read_text().splitlines()]
    sizes = {line["params"] for line in lines if line["phase"] == "search"}
    when = "at the end" if len(sizes) == 1 else "little by little"
    assert f"in the spectrum: {when}, ranks went" in text
    assert f"The search ended after {run.finetune_start} epochs" in text
    assert f"({ratio(run.scores.ratio)} smaller; 150× was asked for)" in text
    assert f"cuts went on until the network was {ratio(run.scores.ratio)} smaller." in text
    assert f"Dashed: what the cut to a size left, {count(run.scores.params or 0)}." in text
    assert "tolerance used" not in text
    assert {"tolerance", "tolerance-1"} <= plots_of(path)


def test_a_size_that_the_search_itself_reached_is_described(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(runs["ratio"], tmp_path / "run")
    spectra = json.loads((folder / "spectra.json").read_text())
    (folder / "spectra.json").write_text(json.dumps({**spectra, "change": 2e-3}))
    run = load_run(folder)
    assert run.reached
    assert run.sized is None
    text = said(write_report(folder))
    assert f"what the prior had emptied by epoch {run.finetune_start} was enough for that. The last cut was for" in text
    assert f"until the network was {ratio(run.scores.ratio)} smaller." in text
    assert "no cut for the size" not in text


def test_a_rounding_without_a_size_is_not_called_one(runs: dict[str, Path]) -> None:
    run = load_run(runs["lambda"])
    assert run.spectra is not None
    assert run.sized is None
    assert "cuts went on" not in said(write_report(runs["lambda"]))


@pytest.mark.parametrize("tol", [1e-5, 0.01, 0.4, 0.9])
def test_the_tolerance_used_is_always_among_those_looked_at(tol: float) -> None:
    looked_at = tolerances(Spectra(tol, {"a": [[1.0, 0.5]]}, {"a": (1,)}, {"a": [[]]}))
    assert looked_at[0] < tol < looked_at[-1] <= 1.0


@pytest.mark.parametrize("name", ["lambda", "lambda-3"])
def test_the_papers_threshold_is_no_rounding(runs: dict[str, Path], name: str) -> None:
    path = write_report(runs[name])
    plots = plots_of(path)
    assert {"threshold-1", "threshold-2", "spectrum-1", "tolerance"} <= plots
    assert plots.isdisjoint({"tolerance-1", "tolerance-2", "own-ranks"})
    text = said(path)
    assert "was above the threshold of 0.29. Nothing was rounded." in text
    assert "Size if it had been rounded" in text
    assert not [w for w in ("The final rounding", "at a tolerance of", "tolerance used", "agree on") if w in text]


def test_lambda_is_drawn_as_it_was_cut(runs: dict[str, Path]) -> None:
    """As many rank indices as are above the threshold after the last epoch, and at least one, are left."""
    for name in ("lambda", "lambda-3"):
        run = load_run(runs[name])
        last = run.history[-1].lambdas
        assert last
        for layer in run.tensor_layers:
            above = [sum(value > 0.29 for value in bond) for bond in last[layer.name]]
            assert layer.ranks == tuple(max(number, 1) for number in above)


def test_a_search_without_fine_tuning_shows_what_its_cut_left(runs: dict[str, Path]) -> None:
    run = load_run(runs["lambda"])
    last, end = run.path[-2:]
    assert (last.epoch, end.epoch) == (2, 2)
    assert (end.params, end.ranks["1"]) == (run.scores.params, run.tensor_layers[0].ranks)
    assert last.params != end.params
    html = plain(write_report(runs["lambda"]))
    assert f"from {count(last.params)} to {count(end.params)}." in html
    assert "No rank was cut before the end of the search." in html
    assert load_run(runs["ratio"]).path == load_run(runs["ratio"]).history


def test_kinds_are_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    names = ("dense", "tensorized-3", "ratio", "lambda")  # the folders of MAP runs have all the same name
    path = write_report([copy(runs[name], tmp_path / name) for name in names], tmp_path / "page.html")
    page = parsed(path)
    assert set(page.plots) == {"scatter", "paths-size", "paths-accuracy", "rank-dots-1"}
    html = plain(path)
    for name, kind in (("dense", "dense"), ("tensorized-3", "tensorized"), ("ratio", "low-rank")):
        assert re.search(rf"{name}(</a>)?</th><td>{kind}</td>", html)
    assert '<th scope="col">kind</th>' in html
    ranks = re.search(r'<figure id="plot-rank-dots-1".*?</figure>', html, re.DOTALL)
    assert ranks is not None
    assert "ratio, layer 1, bond 1" in ranks[0]
    assert "tensorized" not in ranks[0]


def test_networks_that_cannot_shrink_are_compared_without_their_way(runs: dict[str, Path], tmp_path: Path) -> None:
    folders = [runs["dense"], copy(runs["dense"], tmp_path / "other")]
    change(folders[1], lambda result: result.update(seed=1, accuracy=result["accuracy"] - 0.01))
    config = (folders[1] / "config.toml").read_text()
    (folders[1] / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    path = write_report(folders, tmp_path / "page.html")
    assert set(parsed(path).plots) == {"scatter", "paths-accuracy"}
    text = said(path)
    assert "2 seeds of one experiment (dense): " in text
    assert " test accuracy at 496,885 parameters." in text
    again = write_report([runs["tensorized"], runs["tensorized-3"]], tmp_path / "again.html")
    assert "Smallest" not in said(again)
    assert "agree" not in said(again)


def _as_mnist(folder: Path) -> Run:
    change(folder, lambda result: result.update(experiment="mnist"))
    return load_run(folder)


def test_the_papers_network_of_the_same_kind_stands_beside(runs: dict[str, Path], tmp_path: Path) -> None:
    dense, full = (_as_mnist(copy(runs[kind], tmp_path / kind)) for kind in ("dense", "tensorized"))
    papers = {card.label: card.paper for card in headline(dense)}
    assert (papers["Parameters"], papers["Test accuracy"], papers["Log likelihood"]) == ("496,885", "92.1 %", "")
    papers = {card.label: card.paper for card in headline(full)}
    assert (papers["Parameters"], papers["Compression"], papers["Test accuracy"]) == ("27,235", "18.2×", "")
    row = PAPER["mnist"]
    found = row.of("low-rank")
    assert found is not None
    assert (found.params, found.ratio, found.log_likelihood) == (3625, row.ratio, -0.106)
    path = write_report([tmp_path / "dense", tmp_path / "tensorized"], tmp_path / "page.html")
    rows = re.findall(r'<tr class="paper">.*?</tr>', plain(path))
    assert [re.findall("<td>(.*?)</td>", row)[:5] for row in rows] == [
        ["dense", "–", "496,885", "1.0×", "92.10 %"],
        ["tensorized", "–", "27,235", "18.2×", "–"],
    ]


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("dense", {"parameters-1", "parameters-5", "accuracy"}),
        ("tensorized", {"ranks-1", "ranks-3", "parameters-3", "accuracy"}),
        ("low-rank", {"ranks-1", "threshold-all", "threshold-1", "threshold-2", "spectrum-all", "tolerance"}),
    ],
)
def test_deep_networks_of_other_kinds(tmp_path: Path, kind: str, some: set[str]) -> None:
    folder = deep_run(tmp_path / "deep", epochs=3)
    (folder / "config.toml").write_text((folder / "config.toml").read_text() + 'rule = "lambda"\n')
    gone = {"ranks": {}, "max_ranks": {}} if kind == "dense" else {}
    change(folder, lambda result: result.update(kind=kind, **gone))
    path = write_report(folder)
    plots = set(parsed(path).plots)
    assert some <= plots
    assert ("size" in plots) == (kind == "low-rank")
    assert ("38 left dense" in plain(path)) == (kind != "dense")


@pytest.mark.parametrize("name", ["dense", "dense-3", "tensorized", "tensorized-3"])
def test_the_other_commands_take_such_runs(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder = copy(runs[name], tmp_path / "run")
    shown, planned = ask("inspect", str(folder)), ask("inspect", str(folder), "--plan")
    if name.startswith("dense"):
        several = ", in each of 3 particles: 1,490,655 together" if name == "dense-3" else ""
        assert shown == f"No tensor-train layers: 496,885 parameters, all dense{several}.\n"
        assert planned.splitlines()[1:] == ["No tensor-train layer was used."]
    else:
        assert "8 8 8" in shown
        assert len(planned.splitlines()) == 6
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "black.png")
    (answer,) = json.loads(ask("predict", str(folder), str(tmp_path / "black.png"), "--json"))
    assert sum(answer["probabilities"].values()) == pytest.approx(1)
    assert ("epistemic" in answer) == name.endswith("-3")
    before = json.loads((folder / "result.json").read_text())
    text = ask("evaluate", str(folder))
    after = json.loads((folder / "result.json").read_text())
    assert after["accuracy"] == before["accuracy"]
    assert ("all dense" in text) == name.startswith("dense")
    assert (folder / "report.html").is_file()
