"""The figures of `bayestrain table`, and those of a posterior that is trained here and gathered with its answers."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from table_kit import ROOT, SEED, SVG, all_kinds, group, plain, rows
from typer.testing import CliRunner

from bayestrain import models
from bayestrain.cli.app import app
from bayestrain.report import write_table
from bayestrain.report.figures.front import front_plot, lines_through
from bayestrain.report.figures.labels import Box, Label, place_labels
from bayestrain.report.groups import gather
from bayestrain.report.paper import PAPER
from bayestrain.report.write_table import evaluated, typical
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.train import toml
from bayestrain.train.experiment import tensorize


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return all_kinds(tmp_path / "results")


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_whole_files_that_the_table_shows(full: Path) -> None:
    table = write_table(full)
    shown = re.findall(r"!\[[^]]+\]\(figures/([\w-]+\.svg)\)\n\n\*[^\n]+\.\*\n", table.read_text())
    assert shown == ["front-mnist.svg", "ranks-mnist.svg", "layers-mnist.svg"]
    assert sorted(path.name for path in (full / "figures").iterdir()) == sorted(shown)
    for name in shown:
        text = (full / "figures" / name).read_text()
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg"
        assert root.find(f"{SVG}rect").get("fill") == "#ffffff"  # readable on a dark page
        assert "var(--" not in text
        names = re.findall(r'\bid="([^"]+)"', text)
        assert len(names) == len(set(names))
        assert set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text)) <= set(names)


def test_the_front_has_every_group_and_the_papers_two_networks(full: Path) -> None:
    (experiment,) = gather(full)
    plot = front_plot("mnist", experiment.groups, PAPER["mnist"])
    root = ElementTree.fromstring(plot.svg)
    hovers = [title.text or "" for title in root.iter("title")]
    for label in ("zeta", "alpha", "aimed", "tt", "plain", "cloud", "their-way"):
        assert sum(hover.startswith(f"{label} (") for hover in hovers) == 1
    assert any("zeta (LR-BTNN, MAP): 5,200 ± 200 parameters" in hover for hover in hovers)
    texts = [text.text or "" for text in root.iter("text")]
    ratio = json.loads((SEED / "result.json").read_text())["ratio"]
    assert {"paper, 137×", "paper, BNN: 92.1 %, below this axis", f"20 particles, {ratio:.0f}×", "18.2×"} <= set(texts)
    assert {"LR-BTNN, MAP, preset paper, 95 of 100 epochs", "LR-BTNN, posterior", "BTNN, MAP"} <= set(texts)
    assert sum(text.startswith("weight ") for text in texts) == 2
    assert {"weight 1", "weight 2"} <= set(
        texts
    )  # zeta's and alpha's; aimed had a target, their-way the paper's preset


def test_lines_join_weights_of_the_prior_and_targets_apart(full: Path) -> None:
    def joined() -> dict[str, set[str]]:
        (experiment,) = gather(full)
        lines = lines_through("mnist", experiment.groups)
        return {style: {group.label for group in members} for style, members in lines.items()}

    assert joined() == {"-": {"zeta", "alpha"}}  # one target alone is no line
    assert "Lines join weights of the prior (solid). " in plain(write_table(full))
    group(full, "further", [{"params": 8000}], settings={"target_ratio = 0.0": "target_ratio = 60.0"})
    assert joined() == {"-": {"zeta", "alpha"}, ":": {"aimed", "further"}}
    assert "Lines join weights of the prior (solid), targets (dotted). " in plain(write_table(full))


def test_short_runs_of_our_preset_are_squares_with_a_line_of_their_own(full: Path) -> None:
    def drawn() -> tuple[int, str]:
        (experiment,) = gather(full)
        svg = front_plot("mnist", experiment.groups, PAPER["mnist"]).svg
        return svg.count("stroke-dasharray"), svg

    before, _ = drawn()
    for label, params in (("brief", 6000), ("briefer", 2500)):
        group(full, label, [{"params": params}], settings={"\nepochs = 80": "\nepochs = 30"})
    after, svg = drawn()
    assert after == before + 1
    assert "LR-BTNN, MAP, 45 of 95 epochs" in svg
    assert "brief (LR-BTNN, MAP, 45 of 95 epochs): 6,000 parameters, " in svg  # one seed has no spread


def test_labels_cover_neither_marks_nor_each_other() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    labels = [Label(4 + 0.25 * k, 5 + 0.1 * (k % 3), f"label {k}", "#000000") for k in range(12)]
    place_labels(figure, axes, labels)
    figure.draw_without_rendering()
    boxes = [Box(*Text.get_window_extent(text).extents.tolist()) for text in axes.texts]  # without the leading lines
    frame = Box(*axes.get_window_extent().extents.tolist())
    marks = [axes.transData.transform((label.x, label.y)).tolist() for label in labels]
    assert [text.get_text() for text in axes.texts] == [label.text for label in labels]
    for k, box in enumerate(boxes):
        assert all(box.shared(other) == 0 for other in boxes[:k])
        assert box.outside(frame) == 0
        assert not any(box.left < x < box.right and box.bottom < y < box.top for x, y in marks)


def test_labels_with_few_free_places_choose_first() -> None:
    figure = Figure(figsize=(7.4, 4.4))
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    labels = [
        Label(7.1, 1.4, "weight 0.4, 30.9×", "#000000"),
        Label(9.2, 0, "104×: 10.0 %, below this axis", "#000000"),
    ]
    place_labels(figure, axes, labels, [[(4, 4), (7.1, 1.4)]])
    figure.draw_without_rendering()
    one, other = (Box(*Text.get_window_extent(text).extents.tolist()) for text in axes.texts)
    x, y = axes.transData.transform((7.1, 1.4)).tolist()
    assert one.shared(other) == 0
    assert not (other.left < x < other.right and other.bottom < y < other.top)


def test_labels_leave_the_line_between_marks_free() -> None:
    figure = Figure(figsize=(5, 3))
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    place_labels(figure, axes, [Label(5, 5, "a label", "#000000")], [[(5, 5), (5, 10)]])
    figure.draw_without_rendering()
    (text,) = axes.texts
    box, (x, y) = Text.get_window_extent(text), axes.transData.transform((5, 5)).tolist()
    assert not (box.x0 < x < box.x1 and box.y0 > y)  # above, its first choice, it would be crossed


def test_the_ranks_shown_are_those_of_the_median_seed_of_the_default(full: Path) -> None:
    (experiment,) = gather(full)
    smallest = typical(experiment)
    assert smallest is not None
    assert smallest.label == "alpha"
    assert smallest.median.scores.params == 3000  # the lower one of two
    group(full, "gone-on", [{"params": 20, "from_run": {"run": "r", "params": 9, "epochs": 3, "seconds": 1.0}}])
    group(full, "cut-too-far", [{"preset": "paper", "params": 20}], settings={'preset = "default"': 'preset = "paper"'})
    (experiment,) = gather(full)
    ours = typical(experiment)
    assert ours is not None
    assert ours.label == "alpha"
    each = [{"params": 9000}, {"params": 7000}, {"params": 8000}]
    group(full, "default", each)
    (experiment,) = gather(full)
    default = typical(experiment)
    assert default is not None
    assert (default.label, default.median.seed) == ("default", 2)
    assert "Ranks that `default`, seed 2, kept" in plain(write_table(full))
    (given,) = gather(group(full.parent / "given", "tt", [{"kind": "tensorized"}]).parents[1])
    assert typical(given) is None


def test_a_deep_network_stays_readable(tmp_path: Path) -> None:
    """ResNet-110 as it starts: 109 layers in five columns of equal length, and small files."""
    config = toml.named("cifar10-resnet110")
    model = models.BUILDERS[config.experiment.model](num_classes=10)
    dense = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv2d")
    }
    tensorize(model, config.tensorize)
    now = {name: layer.parameters_left for name, layer in tt_layers(model).items()}
    chains = {name: list(chain) for name, chain in ranks(model).items()}
    counts = {name: {"dense": n, "start": now.get(name, n), "now": now.get(name, n)} for name, n in dense.items()}
    figures = {"params": count_parameters(model), "dense_params": 1_742_762, "ranks": chains, "max_ranks": chains}
    group(tmp_path, "default", [{**figures, "layer_params": counts}], experiment="cifar10-resnet110")
    assert len(chains) == 109
    write_table(tmp_path)
    for path in (tmp_path / "figures").iterdir():
        assert path.stat().st_size < 300_000
        root = ElementTree.fromstring(path.read_text())
        assert float(root.get("width", 0)) < 1200
    text = (tmp_path / "figures" / "ranks-cifar10-resnet110.svg").read_text()
    assert all(f">{name}<" in text for name in chains)
    assert re.findall(r">Inferred ranks \((\d of \d)\)<", text) == [f"{k} of 5" for k in range(1, 6)]


# --- a posterior that was trained, gathered and tabled ----------------------------------------------------------------


SETTINGS = ["fit.epochs=1", "fit.finetune_epochs=0", "fit.batch_size=500", "tensorize.max_rank=4",
            "posterior.compare_map=false", "posterior.outside=patches", "posterior.particles=2"]  # fmt: skip
SET = [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of two particles, trained for an epoch."""
    folder = tmp_path_factory.mktemp("runs") / "mnist-mini-two-seed0"
    done = CliRunner().invoke(app, ["train", "mnist-mini", *SET, "--quiet", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def run_seeds(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run_seeds.py", *arguments])
    runpy.run_path(str(ROOT / "tools" / "run_seeds.py"), run_name="__main__")


def test_seeds_that_fail_are_counted_and_end_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    words = ("mnist-mini", "--label", "bad", "--seeds", "0", *scratch, "--set")
    with pytest.raises(SystemExit, match="1"):
        run_seeds(monkeypatch, *words, "fit.lrr=1")
    assert "seed 0 failed with exit code 2" in capsys.readouterr().out
    summary = tmp_path / "results" / "mnist-mini" / "bad" / "summary.json"
    assert json.loads(summary.read_text())["failed"] == [0]
    run = tmp_path / "runs" / "mnist-mini-bad-seed0"
    run.mkdir(parents=True)
    toml.save(toml.named("mnist-mini", overrides=["fit.lr=1e-2"]), run / "config.toml")
    (run / "result.json").write_text('{"params": 1')
    with pytest.raises(SystemExit, match="1"):
        run_seeds(monkeypatch, *words, "fit.lr=1e-2")
    assert "mnist-mini-bad-seed0 is damaged" in capsys.readouterr().out
    assert not list(summary.parent.glob("seed-*"))


def test_a_posterior_keeps_the_answers_of_one_seed_and_shows_its_uncertainty(
    posterior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    for seed in range(2):  # finished runs are only gathered
        copy = runs / f"mnist-mini-two-seed{seed}"
        shutil.copytree(posterior, copy)
        result = json.loads((copy / "result.json").read_text())
        (copy / "result.json").write_text(json.dumps({**result, "seed": seed}))
    scratch = ["--jobs", "1", "--runs", str(runs), "--results", str(results)]
    options = ["--label", "two", "--seeds", "1", "0", *scratch, *SET, "--set", 'data.name="mnist-mini"']
    kept = results / "mnist-mini" / "two"
    (kept / "seed-0").mkdir(parents=True)
    (kept / "seed-0" / "evaluation.safetensors").write_bytes(b"of an earlier gathering")
    part = json.loads((copy / "environment.json").read_text())  # as of a run that was stopped, then went on
    earlier = [{**part, "commit": "5" * 40}]
    (copy / "environment.json").write_text(json.dumps({**part, "commit": "6" * 40, "earlier": earlier}))
    run_seeds(monkeypatch, "mnist-mini", *options)
    commits = sorted([str(part["commit"]), "5" * 40, "6" * 40])
    assert json.loads((kept / "summary.json").read_text())["commits"] == commits
    answers = "evaluation.safetensors"
    assert sorted(path.parent.name for path in kept.rglob(answers)) == ["seed-1"]  # the first one asked for
    assert (kept / "seed-1" / answers).read_bytes() == (posterior / answers).read_bytes()
    (experiment,) = gather(results)
    found = evaluated(experiment.groups)
    assert found is not None
    assert (found[0].label, found[1].seed) == ("two", 1)
    text = plain(write_table(results))
    (row,) = rows(text, "mnist-mini")
    assert (row["inferred by"], row["epochs"]) == ("SVGD, 2 particles", "1 (18 iterations)")  # 9,000 images
    assert "*Uncertainty of `two`, seed 1, on the test images and on shuffled patches.*" in text
    said = "python tools/run_seeds.py mnist-mini --label two --seeds 1 0"
    wanted = f"{said} {shlex.join(SET)} --set 'data.name=\"mnist-mini\"'"
    assert f"- `two`: `{wanted}`\n" in text
    svg = (results / "figures" / "uncertainty-mnist-mini.svg").read_text()
    ElementTree.fromstring(svg)
    assert ">Total uncertainty<" in svg
    assert ">Epistemic uncertainty<" in svg
    assert "shuffled patches" in svg


def test_the_uncertainty_shown_is_that_of_tensor_trains_where_there_are_such(
    posterior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("dense", "tensorized", "low-rank"):  # each one more than those before
        copy = shutil.copytree(posterior, tmp_path / "runs" / f"mnist-mini-{kind}-seed0")
        result = json.loads((copy / "result.json").read_text())
        (copy / "result.json").write_text(json.dumps({**result, "kind": kind}))
        run_seeds(monkeypatch, "mnist-mini", "--label", kind, "--seeds", "0", "--runs", str(tmp_path / "runs"),
                  "--results", str(tmp_path / "results"), *SET)  # fmt: skip
        (experiment,) = gather(tmp_path / "results")
        found = evaluated(experiment.groups)
        assert found is not None
        assert found[0].label == kind


def test_a_map_run_keeps_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that was tested on outside images and so has a part "posterior" with one particle."""
    run = tmp_path / "runs" / "mnist-one-seed0"
    shutil.copytree(SEED, run)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "posterior": {"method": "map", "particles": 1}}))
    (run / "evaluation.safetensors").write_bytes(b"answers")
    run_seeds(monkeypatch, "mnist", "--label", "one", "--seeds", "0", "--runs", str(tmp_path / "runs"),
              "--results", str(tmp_path / "results"))  # fmt: skip
    assert not list((tmp_path / "results").rglob("evaluation.safetensors"))
    assert rows(plain(write_table(tmp_path / "results")))[-1]["inferred by"] == "MAP"
