"""The report as a file: complete, valid, escaped; the mathematics behind its figures."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from test_report_runs import copy_of, deep_run, train_run

from bayestrain import TTConv2d, TTLinear, tt
from bayestrain.errors import ReportError
from bayestrain.report import write_report
from bayestrain.report.compare import seed_groups
from bayestrain.report.figures.certainty import BINS, reliability_bins
from bayestrain.report.headline import headline
from bayestrain.report.load import load_run
from bayestrain.report.palette import DARK, LIGHT
from bayestrain.report.run import Evaluation, Spectra
from bayestrain.report.table import spread
from bayestrain.report.tolerance import core_parameters, kept_rank, parameters_at, plateau, ranks_at, tolerances
from bayestrain.report.words import count, duration, percent, power, ratio, short_count, short_name, signed

EXPECTED = {
    "ranks", "parameters-1", "accuracy", "size", "trade", "rank-path-1", "rank-path-2", "lambda-1", "lambda-2",
    "spectrum-1", "spectrum-2", "tolerance", "tolerance-1", "tolerance-2", "reliability", "rejection",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("runs") / "mini", images=1500)


class Page(HTMLParser):
    """Ids, references and tags of a page; complains about tags that do not close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.plots: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key == "data-plot":
                self.plots.append(value or "")
            if key in ("href", "src", "srcset", "action") or "url(" in (value or ""):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "an id is used twice"
    assert "script" not in page.tags
    for reference in page.references:
        inside = re.fullmatch(r"#(.+)|url\(#(.+)\)", reference)
        if inside:
            assert (inside[1] or inside[2]) in page.ids
        else:
            assert reference.startswith("data:") or reference.endswith("report.html"), reference
    return page


def test_a_report_is_one_complete_file(trained: Path) -> None:
    path = write_report(trained)
    assert path == trained / "report.html"
    assert set(parsed(path).plots) == EXPECTED
    html = path.read_text(encoding="utf-8")
    assert html.count('class="picture"') == 24
    assert not re.search(r"https?://|@import|<link(?! rel=\"icon\" href=\"data:,\")", html)
    svgs = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert not re.search(r":\s*#[0-9a-f]{6}", svgs), "a colour that the dark page cannot change"
    assert write_report([trained], trained / "again.html").read_text(encoding="utf-8") == html


def test_a_deep_network_has_maps_instead_of_hundreds_of_lines(tmp_path: Path) -> None:
    path = write_report(deep_run(tmp_path / "deep", epochs=12))
    plots = parsed(path).plots
    assert {"ranks-1", "ranks-2", "ranks-3", "parameters-3", "rank-path-map", "tolerance-map", "spectrum-all"} <= set(
        plots
    )
    assert len(plots) < 25
    assert path.stat().st_size < 1_000_000
    assert "38 left dense" in path.read_text(encoding="utf-8")


def test_a_run_in_parts_says_when_it_went_on_and_at_which_commits(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path / "run")
    record = json.loads((folder / "environment.json").read_text())
    parts = {"resumed": "2026-11-16T10:20:30+00:00", "earlier": [{"commit": "1" * 40, "dirty": False}]}
    (folder / "environment.json").write_text(json.dumps({**record, **parts}))
    html = write_report(folder).read_text(encoding="utf-8")
    assert "<li>resumed <b>2026-11-16 10:20</b></li>" in html
    assert "<li>commit <b>111111111, then 95708fb00</b></li>" in html
    assert "<li>resumed" not in write_report(trained).read_text(encoding="utf-8")


def test_an_interrupted_run_has_a_page_that_says_so(trained: Path, tmp_path: Path) -> None:
    late = ("result.json", "spectra.json", "evaluation.safetensors", "model.json")
    path = write_report(copy_of(trained, tmp_path / "run", without=late))
    assert set(parsed(path).plots) >= {"ranks", "accuracy", "size", "trade", "rank-path-1", "lambda-1"}
    html = path.read_text(encoding="utf-8")
    assert f"Go on with: bayestrain train --resume --out {tmp_path / 'run'}" in html
    assert "Up to epoch 3 of 3 the network has shrunk to" in html


@pytest.mark.parametrize(
    ("name", "gone", "notice"),
    [
        ("history.jsonl", {"accuracy", "size", "trade", "lambda-1"}, "the training curves (no history.jsonl)"),
        ("spectra.json", {"spectrum-1", "tolerance"}, "the spectra (no spectra.json)"),
        ("evaluation.safetensors", {"reliability"}, "reliability and test images (no evaluation.safetensors)"),
        ("model.json", {"tolerance"}, "class names and the size at other tolerances (no model.json)"),
    ],
)
def test_what_is_missing_is_left_out_and_named(
    trained: Path, tmp_path: Path, name: str, gone: set[str], notice: str
) -> None:
    path = write_report(copy_of(trained, tmp_path / "run", without=(name,)))
    plots = set(parsed(path).plots)
    assert plots.isdisjoint(gone)
    assert len(plots) > 5
    assert notice in path.read_text(encoding="utf-8")


def test_runs_without_validation_lambda_or_tensor_layers_have_a_page(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    bare = [{**line, "validation": None, "lambdas": {}, "ranks": {}, "phase": "search"} for line in lines]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in bare))
    plots = set(parsed(write_report(folder)).plots)
    assert {"accuracy", "trade"} <= plots
    assert not any(name.startswith(("lambda", "rank-path")) for name in plots)
    result = json.loads((folder / "result.json").read_text())
    dense = {**result, "kind": "dense", "ranks": {}, "max_ranks": {}}
    (folder / "result.json").write_text(json.dumps(dense))
    (folder / "spectra.json").unlink()
    assert "parameters-1" in parsed(write_report(folder)).plots


def test_names_cannot_break_the_page(trained: Path, tmp_path: Path) -> None:
    folder = copy_of(trained, tmp_path / "run")
    evil = "<script>alert(1)</script>$x_{ & 深い層 " + "long" * 20
    for name in ("result.json", "spectra.json", "model.json", "history.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace('"1":', json.dumps(evil) + ":").replace('"mnist-mini"', json.dumps(evil))
        )
    path = write_report(folder)
    assert set(parsed(path).plots) == EXPECTED
    assert "<script" not in path.read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"is a folder\. Name the HTML file to write"):
        write_report(trained, tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ReportError, match=r"cannot be written: .*Choose another place with --out"):
        write_report(trained, tmp_path / "file" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ReportError, match="Give at least one run folder"):
        write_report([])


def test_headline_against_the_paper(tmp_path: Path) -> None:
    cards = headline(load_run(deep_run(tmp_path / "deep", epochs=2, layers=8)))
    assert [(card.label, card.paper, card.verdict) for card in cards[:4]] == [
        ("Parameters", "236,651", "better"),
        ("Compression", "7.4×", "better"),
        ("Test accuracy", "90.4 %", "worse"),
        ("Log likelihood", "−0.515", "better"),
    ]


def test_seeds_of_one_experiment_have_a_mean(trained: Path, tmp_path: Path) -> None:
    folders = [trained]
    for seed in (1, 2):
        folders.append(copy_of(trained, tmp_path / f"run{seed}"))
        result = json.loads((folders[-1] / "result.json").read_text())
        changed = {**result, "seed": seed, "accuracy": result["accuracy"] + 0.01 * seed}
        (folders[-1] / "result.json").write_text(json.dumps(changed))
        config = (folders[-1] / "config.toml").read_text()
        (folders[-1] / "config.toml").write_text(config.replace("seed = 0", f"seed = {seed}"))
    first = json.loads((trained / "result.json").read_text())["accuracy"]
    assert len(seed_groups([load_run(folder) for folder in folders])) == 1
    assert spread([first, first + 0.01, first + 0.02]) == pytest.approx((first + 0.01, 0.01))
    path = write_report(folders, tmp_path / "seeds.html")
    assert set(parsed(path).plots) == {"scatter", "paths-size", "paths-accuracy", "rank-dots-1"}
    html = path.read_text(encoding="utf-8")
    assert "The 3 seeds agree on the ranks: on 4 of 4 bonds" in html
    assert "mean ± sd of 3 seeds" in html
    assert f"{100 * first + 1:.2f} ± 1.00 %" in html

    config = (folders[2] / "config.toml").read_text()
    (folders[2] / "config.toml").write_text(config.replace("round_tol = 0.01", "round_tol = 0.02"))
    assert [len(group) for group in seed_groups([load_run(folder) for folder in folders])] == [2, 1]


def test_different_experiments_are_compared(trained: Path, tmp_path: Path) -> None:
    deep = deep_run(tmp_path / "deep", epochs=3)
    write_report(trained)
    path = write_report([trained, deep, trained])
    assert path == trained.parent / "comparison.html"
    assert {"scatter", "rank-dots-1", "rank-map-2-1"} <= set(parsed(path).plots)
    html = path.read_text(encoding="utf-8")
    assert f'<a href="{trained.name}/report.html">' in html
    assert "paper, cifar10-resnet110" in html


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out(colours: dict[str, str]) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(a: str, b: str) -> float:
        light, dark = sorted((luminance(a), luminance(b)), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    text = ("ink", "muted", "kept", "paper", "warn", "map", "ood", *(f"c{k}" for k in range(1, 7)))
    assert min(contrast(colours[name], colours["card"]) for name in text) >= 4.5
    assert min(contrast(colours[name], colours["page"]) for name in ("ink", "muted")) >= 4.5
    assert contrast(colours["cut"], colours["card"]) >= 3


def test_each_colour_has_one_name() -> None:
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert LIGHT.keys() == DARK.keys()


def _random(ranks: tuple[int, ...]) -> list[torch.Tensor]:
    ends = (1, *ranks, 1)
    return [torch.randn(ends[k], 4, 5, ends[k + 1], dtype=torch.float64) for k in range(len(ends) - 1)]


@pytest.mark.parametrize("tol", [1e-3, 1e-2, 0.1, 0.3])
def test_ranks_at_a_tolerance_are_those_of_rounding(tol: float) -> None:
    torch.manual_seed(0)
    signal = _random((3, 2, 4))
    noise = [core * 0.2 for core in _random((6, 6, 6))]
    cores = tt.subtract(signal, noise)
    spectra = Spectra(
        tol, {"a": [s.tolist() for s in tt.bond_spectra(cores)]}, {"a": ()}, {"a": [[] for _ in cores[1:]]}
    )
    assert ranks_at(spectra, "a", tol) == tt.ranks(tt.round_cores(cores, tol))[1:-1]


def test_a_rank_is_never_below_one() -> None:
    assert kept_rank([0.0, 0.0], 0.5, 1) == 1
    assert kept_rank([1.0, 1e-9], 0.1, 1) == 1


def test_parameters_are_counted_as_the_layers_count(trained: Path, tmp_path: Path) -> None:
    linear = TTLinear(784, 625, max_rank=5)
    sizes = [i * o for i, o in zip(linear.in_modes, linear.out_modes, strict=True)]
    assert core_parameters(sizes, linear.ranks[1:-1]) + 625 == linear.parameters_left
    conv = TTConv2d(32, 64, 3, max_rank=5)
    assert core_parameters([9, *conv.in_modes, *conv.out_modes], conv.ranks[1:-1]) + 64 == conv.parameters_left

    run = load_run(trained)
    assert run.spectra is not None
    totals = parameters_at(run.spectra, run.layers, run.scores.params or 0)
    assert totals is not None
    assert (np.diff(totals) <= 0).all()
    at = float(np.interp(np.log(run.spectra.tol), np.log(tolerances(run.spectra)), totals))
    assert at == pytest.approx(run.scores.params, rel=0.25)
    deep = load_run(deep_run(tmp_path / "deep", epochs=2, layers=8))
    assert deep.tensor_layers[0].sizes == (9, 4, 8, 4, 8)


def test_a_spectral_gap_is_a_plateau() -> None:
    spectra = Spectra(0.01, {"a": [[1.0, 0.9, 1e-3]]}, {"a": (2,)}, {"a": [[]]})
    low, high = plateau(spectra) or (0.0, 0.0)
    assert low < 2e-3
    assert high > 0.4
    assert plateau(Spectra(0.01, {"a": [list(np.geomspace(1, 1e-5, 200))]}, {"a": (80,)}, {"a": [[]]})) is None


def test_reliability_bins_against_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet([0.3] * 5, 300)
    labels = rng.integers(0, 5, 300)
    bins, error = reliability_bins(Evaluation(p, labels, np.zeros(0, int), np.zeros((0, 1, 1, 1), np.uint8)))
    expected = 0.0
    for k in range(BINS):
        inside = [i for i in range(300) if k / BINS <= p[i].max() and (p[i].max() < (k + 1) / BINS or k == BINS - 1)]
        assert bins[k][2] == len(inside)
        if inside:
            confidence = sum(p[i].max() for i in inside) / len(inside)
            right = sum(p[i].argmax() == labels[i] for i in inside) / len(inside)
            expected += len(inside) / 300 * abs(confidence - right)
    assert error == pytest.approx(expected)


def test_numbers_read_well() -> None:
    assert (count(3625), count(None), short_count(27235), short_count(1.7e6)) == ("3,625", "–", "27.2k", "1.7M")
    assert (ratio(137.07), ratio(7.36), percent(0.98564), signed(-0.0458)) == ("137×", "7.4×", "98.56 %", "−0.046")
    assert [duration(s) for s in (4.26, 48, 112, 2548, 3595, 5020)] == [
        "4.3 s", "48 s", "1 min 52 s", "42 min", "1 h 0 min", "1 h 24 min",
    ]  # fmt: skip
    assert (power(1e-3), power(1.0), power(100)) == ("10⁻³", "1", "10²")
    assert short_name("encoder.layers.11.attention.output") == "encoder.l…ion.output"
    assert len(short_name("x" * 50)) == 20


def test_importing_bayestrain_stays_light() -> None:
    code = "import sys, bayestrain; print([m for m in ('matplotlib', 'jinja2', 'safetensors') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
