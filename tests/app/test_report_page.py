"""The report of a run: complete, escaped, true to the files, for every task and format."""

import base64
import contextlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from run_folders import LAYERS, deep_layers, dump, edit, load, unfinished, write_run
from safetensors.numpy import load_file, save_file

from bayestrain.app.report import write_report
from bayestrain.app.report.facts import covered, number, percent, plural, tiles
from bayestrain.app.report.figures import STYLE
from bayestrain.app.report.read import read_run
from bayestrain.errors import DataError

RANKS = {"Ranks over the epochs"}
TRAINING = {"Size", "Log likelihood", "Prior"}
CERTAINTY = {"Calibration", "Accuracy if it may abstain"}
INTERVALS = {"Calibration", "Predicted and true values"}
EXPECTED = {
    "classification": RANKS | TRAINING | CERTAINTY | {"Accuracy"},
    "posterior": RANKS | TRAINING | CERTAINTY | {"Accuracy"},
    "regression": RANKS | TRAINING | INTERVALS | {"RMSE"},
    "regression-posterior": RANKS | TRAINING | INTERVALS | {"RMSE"},
    "other": RANKS | TRAINING,
    "dense": TRAINING | CERTAINTY | {"Accuracy"},
}


class Page(HTMLParser):
    """Tags, titles, pictures and text of a page; fails on a tag that is not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.figures: dict[str, str] = {}
        self.references: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []
        assert all(reference.startswith("data:") for reference in self.references)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        found = dict(attrs)
        self.references += [value or "" for key, value in attrs if key in ("href", "src", "srcset", "action")]
        if tag == "img":
            assert found["alt"]
            svg = base64.b64decode((found["src"] or "").removeprefix("data:image/svg+xml;base64,")).decode()
            self.figures[self.titles[-1]] = svg
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h3" and "figure" in self.open:
            self.titles.append(data)
        if "style" not in self.open:
            self.text += data


def report(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path)


def change_tensors(folder: Path, **tensors: np.ndarray | None) -> None:
    path = folder / "predictions.safetensors"
    found = {**load_file(path), **tensors}
    save_file({name: np.ascontiguousarray(x) for name, x in found.items() if x is not None}, path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classification run and its report, for tests that leave its files alone."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    write_report(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_of_run_has_its_figures(tmp_path: Path, kind: str) -> None:
    page = report(write_run(tmp_path / "run", kind))
    assert set(page.figures) == EXPECTED[kind]
    assert len(page.titles) == len(page.figures)
    assert re.search(r"What to do next\s*Nothing here calls for another run", page.text)
    assert "bayestrain train run.toml" in page.text
    assert "max_rank = 20" in page.text
    assert "ec317859a1b6" in page.text


def test_the_page_is_the_same_every_time_and_true_to_the_files(shared: Path) -> None:
    first = Page(shared / "report.html")
    assert not re.search(r"@import|url\(|https?://", first.source)
    assert report(shared).source == first.source
    page = Page(shared / "report.html")
    rows = {cells[0]: cells for row in re.findall(r"<tr>(.*?)</tr>", page.source)
            if (cells := [html.unescape(cell) for cell in re.findall(r">([^<]*)</t[hd]>", row)])}  # fmt: skip
    for name, (form, layout, shape, starts, ends) in LAYERS.items():
        size = f"{60 * sum(ends):,}"
        dense = f"{np.prod(shape):,}"
        wanted = [name, form, layout, "×".join(map(str, shape)), str(starts)[1:-1], str(ends)[1:-1], dense, size]
        assert rows[name][:8] == wanted
    assert rows["head"][:8] == ["head", "dense", "", "10×64", "", "", "650", "650"]


def test_tiles_state_their_own_value_and_pass_no_verdict(tmp_path: Path) -> None:
    posterior = write_run(tmp_path / "posterior", "posterior")
    result = load(posterior / "result.json")
    metrics, size = result["metrics"], result["parameters"]
    aleatoric, epistemic = (load_file(posterior / "predictions.safetensors")[key] for key in ("aleatoric", "epistemic"))
    share = percent(epistemic.sum() / (aleatoric + epistemic).sum(), 1)
    assert [(label, value, notes) for label, value, notes in tiles(read_run(posterior))] == [
        ("Parameters", f"{size:,}", [f"{113_482 / size:.1f}× fewer than dense (113,482)", "in each of 8 particles"]),
        ("Rank indices", "50", ["of 147 at the start", "features.conv: 6, 9, 3", "fc1: 7", "fc2: 4, 11, 8, 2"]),
        ("Accuracy (test)", percent(metrics["accuracy"]), [f"validation {percent(result['validation']['accuracy'])}"]),
        ("Log likelihood (test)", number(metrics["log_likelihood"]),
         [f"a particle alone has {number(result['posterior']['mean_log_likelihood'])} on average"]),
        ("Calibration error", percent(metrics["ece"]), ["0.80% at temperature 1.00"]),
        ("Epistemic share", share, ["of the uncertainty, which more data would reduce"]),
        ("Training time", "0:04:20", ["on cpu", "575 MiB of memory"]),
    ]  # fmt: skip
    tile_text = report(posterior).source.partition("<dl")[2].partition("</dl>")[0]
    assert not re.search("better|worse", tile_text)


def test_coverage_and_numbers_as_people_read_them(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "run", "regression")).predictions
    assert covered(found, 0.9) == pytest.approx(0.9, abs=0.03)
    assert covered(found, 0.5) == pytest.approx(0.5, abs=0.04)
    assert (percent(0.98561), percent(0.5, 0)) == ("98.56%", "50%")
    assert (number(-0.04583), number(1108.2), number(0), number(2.0)) == ("-0.0458", "1,108", "0.00", "2.00")
    assert (plural(1, "layer"), plural(2, "layer")) == ("1 layer", "2 layers")


def test_several_outputs_and_deep_networks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "regression")
    tensors = load_file(folder / "predictions.safetensors")
    change_tensors(folder, **{name: np.stack([x, 2 * x, 3 * x, 4 * x], 1) for name, x in tensors.items()})
    assert "true value of output 3" in report(folder).figures["Predicted and true values"]  # the last one of this title
    page = report(write_run(tmp_path / "deep", layers=deep_layers()))
    assert set(page.figures) == EXPECTED["classification"]
    assert "Layers (91)" in page.text
    assert "<details><summary>Layers" in page.source
    assert len(page.source) < 1_000_000


def test_no_name_can_break_the_page(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_{ & 深い ' + "long" * 20
    layers = {evil: LAYERS["fc2"], f"{evil}2": LAYERS["fc1"]}
    folder = write_run(tmp_path / "run", "posterior", name=evil, layers=layers)
    edit(folder, classes=[evil] * 10, command=evil, device=evil, from_run={"run": evil})
    dump(folder / "environment.json", {evil: evil})
    posterior = load(folder / "result.json")["posterior"]
    edit(folder, posterior={**posterior, "warnings": [evil], "ood": {"name": evil, "auroc": 0.9}, "method": evil})
    page = report(folder)
    assert set(page.figures) == EXPECTED["posterior"]
    assert evil in page.text
    assert all("<script" not in svg for svg in page.figures.values())
    assert STYLE["text.parse_math"] is False


@pytest.mark.parametrize("name", ["history.jsonl", "config.toml", "environment.json", "predictions.safetensors"])
def test_a_missing_file_only_leaves_out_what_it_holds(run: Path, name: str) -> None:
    (run / name).unlink()
    assert len(report(run).figures) >= 2


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("result.json", "{", "Expecting"),
    ("result.json", "[1]", "it holds a list instead of an object"),
    ("result.json", '{"name": "x"}', "it has no 'parameters'"),
    ("result.json", '{"parameters": 1, "dense_parameters": 2, "layers": {"a": 3}}', "not subscriptable"),
    ("result.json", '{"parameters": 1, "dense_parameters": 2, "ranks": {"fc1": [2, 3]}}', "do not fit each other"),
    ("result.json", '{"a": ' * 100_000, "recursion"),
    ("result.json", '{"parameters": ' + "9" * 5_000 + "}", "digits"),
    ("environment.json", "{", "Expecting"),
    ("config.toml", "[fit", "Expected"),
    ("history.jsonl", '{"epoch": 1}\n{"epo\n{"epoch": 2}\n', "Unterminated"),
    ("predictions.safetensors", "no tensors", "header"),
], ids=str)  # fmt: skip
def test_a_damaged_file_is_named(run: Path, name: str, content: str, reason: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(reason)) as error:
        write_report(run)
    assert str(error.value).startswith(str(run / name))
    assert "is damaged" in str(error.value)


@pytest.mark.parametrize("value", ["x", {"a": None}, 10**400], ids=["text", "object", "huge"])
def test_wrong_entries_of_a_result_are_a_data_error_or_a_page(run: Path, value: object) -> None:
    result = load(run / "result.json")
    for name in ("parameters", "dense_parameters", "ranks", "layers", "metrics", "posterior", "seconds", "classes"):
        edit(run, **{**result, name: value})
        with contextlib.suppress(DataError):
            write_report(run)


@pytest.mark.parametrize(("tensor", "value"), [
    ("labels", np.zeros(5, np.int64)), ("total", np.zeros(3)), ("probabilities", None),
])  # fmt: skip
def test_predictions_that_do_not_fit_are_refused(run: Path, tensor: str, value: np.ndarray | None) -> None:
    change_tensors(run, **{tensor: value})
    with pytest.raises(DataError, match=f"{run}.* is damaged"):
        write_report(run)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=f"{folder} is not a run folder: it has neither result.json nor"):
            write_report(folder)


def test_resumed_and_unfinished_runs(run: Path) -> None:
    lines = (run / "history.jsonl").read_text().splitlines()
    again = {**json.loads(lines[7]), "train_loss": 99.0}
    (run / "history.jsonl").write_text("\n".join([*lines, json.dumps(again), ""]))
    history = read_run(run).history
    assert [record["epoch"] for record in history] == list(range(21))
    assert history[7]["train_loss"] == 99.0
    page = report(unfinished(run))
    assert "This run is unfinished" in page.text
    assert set(page.figures) == TRAINING | {"Ranks over the epochs", "Accuracy"}
    assert "Epochs so far" in page.text
    assert "still at epoch 5 of 20. To resume it, add --resume" in page.text
    assert tiles(read_run(run))[2][0] == "Accuracy (validation)"
