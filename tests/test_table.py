"""`bayestrain table`: its lines, its errors, and that the committed one is not stale."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from table_kit import POSTERIOR, RESULTS, SEED, SVG, all_kinds, group, plain, rows
from typer.testing import CliRunner

from bayestrain.cli.app import app
from bayestrain.errors import ReportError
from bayestrain.report import groups, write_table
from bayestrain.train import config as config_module


@pytest.fixture
def full(tmp_path: Path) -> Path:
    return all_kinds(tmp_path / "results")


# --- the table --------------------------------------------------------------------------------------------------------


def test_lines_are_sorted_by_kind_then_inference_then_size_with_the_papers_first(full: Path) -> None:
    found = rows(plain(write_table(full)))
    names = [(row["model"], row["run"].split("]")[0].strip("[*")) for row in found]
    assert names == [
        ("BNN", "the paper"), ("BNN", "plain"),
        ("BTNN", "the paper"), ("BTNN", "tt"),
        ("LR-BTNN", "the paper"), ("LR-BTNN", "aimed"), ("LR-BTNN", "zeta"), ("LR-BTNN", "their-way"),
        ("LR-BTNN", "alpha"), ("LR-BTNN", "cloud"),
    ]  # fmt: skip


def test_a_line_has_mean_and_sample_deviation_over_its_seeds(full: Path) -> None:
    text = plain(write_table(full))
    found = {row["run"].split("]")[0].strip("[*"): row for row in rows(text)}
    zeta = found["zeta"]
    assert zeta["parameters"] == "5,200 ± 200"
    each = [496_885 / params for params in (5000, 5200, 5400)]
    assert zeta["ratio"] == f"{statistics.fmean(each):.1f} ± {statistics.stdev(each):.1f}×"
    like = json.loads((SEED / "result.json").read_text())
    assert zeta["accuracy"] == f"{100 * like['accuracy']:.2f} %"  # the same for all seeds
    assert (zeta["inferred by"], zeta["preset"], zeta["prior weight"], zeta["target"]) == ("MAP", "default", "1", "–")
    assert (zeta["training"], zeta["epochs"], zeta["seeds"]) == (
        f"{like['seconds']:.0f} s, {like['device']}",
        "95",
        "3",
    )
    assert zeta["particles' mean"] == "–"
    assert found["alpha"]["prior weight"] == "2"
    assert found["aimed"]["target"] == "50×"
    assert found["their-way"]["preset"] == "paper"
    assert (found["tt"]["calibrated"], zeta["calibrated"], found["cloud"]["calibrated"]) == ("−0.0300", "–", "–")
    cloud = found["cloud"]
    assert cloud["inferred by"] == "SVGD, 20 particles"
    assert cloud["particles' mean"] == "−0.0600 ± 0.0141"
    assert cloud["epochs"] == f"95 ({95 * 446:,} iterations)"  # 57,000 images in batches of 128
    assert "[zeta](mnist/zeta)" in text


def test_particles_around_a_map_point_are_said_to_be(tmp_path: Path) -> None:
    about = {"posterior": {**POSTERIOR, "start": "jitter", "mean_log_likelihood": -0.05}}
    settings = {"particles = 0": "particles = 20", 'start = "independent"': 'start = "jitter"'}
    group(tmp_path, "near", [about], settings=settings)
    (line,) = [row for row in rows(plain(write_table(tmp_path))) if "near" in row["run"]]
    assert line["inferred by"] == "SVGD, 20 particles around MAP"
    assert line["epochs"] == f"12 ({12 * 446:,} iterations)"


def test_it_says_which_runs_were_evaluated_again(tmp_path: Path) -> None:
    again = {"evaluated_again": {"command": "", "device": "cpu", "commit": "", "dirty": False, "torch": ""}}
    group(tmp_path, "all", [again, again])
    group(tmp_path, "none", [{}])
    group(tmp_path, "some", [{}, again, {}])
    text = " ".join(write_table(tmp_path).read_text().split())
    assert "by `bayestrain evaluate`: `all` on cpu, `some` (seed 1) on cpu. The commands" in text


@pytest.mark.parametrize(
    ("name", "dense", "tensorized", "found"),
    [
        ("mnist", ("496,885", "1.0×", "92.1 %"), ("27,235", "18.2×", "–"), ("3,625", "137×", "97.8 %", "−0.106")),
        ("cifar10-cnn", ("1,569,418", "1.0×", "89.0 %"), ("686,868", "2.3×", "–"),
         ("99,376", "15.8×", "87.4 %", "−0.471")),
        ("cifar10-resnet110", ("1,742,762", "1.0×", "92.6 %"), ("644,790", "2.7×", "–"),
         ("236,651", "7.4×", "90.4 %", "−0.515")),
    ],
)  # fmt: skip
def test_the_papers_lines_have_what_is_known_and_dashes(
    name: str, dense: tuple[str, ...], tensorized: tuple[str, ...], found: tuple[str, ...], tmp_path: Path
) -> None:
    group(tmp_path, "default", [{}], experiment=name)
    theirs = [row for row in rows(plain(write_table(tmp_path)), name) if row["run"] == "**the paper**"]
    wanted = zip(("BNN", "BTNN", "LR-BTNN"), (dense, tensorized, found), strict=True)
    for row, (model, cells) in zip(theirs, wanted, strict=True):
        shown = [row[key] for key in ("model", "parameters", "ratio", "accuracy", "particles' mean")]
        assert shown == [model, *cells, "–"][:5]
        others = ("inferred by", "preset", "prior weight", "log likelihood", "training", "epochs", "seeds")
        assert {row[key] for key in others} == {"–"}


def test_failed_seeds_and_absent_experiments_are_said(full: Path) -> None:
    text = plain(write_table(full))
    assert "Failed seeds, which no line counts: 2 of `cloud`; 0, 1 of `lost`." in text
    assert "There are no results of `cifar10-cnn` yet." in text
    assert "There are no results of `cifar10-resnet110` yet." in text
    assert "`mnist` yet" not in text
    assert "benchmarks" not in text
    assert "No seed failed." in plain(RESULTS / "TABLE.md")


def test_what_a_cut_of_ranks_cost_is_said_where_it_is_much(tmp_path: Path) -> None:
    def accuracies(before: float, after: float) -> dict[str, Any]:
        return {"searched_accuracy": {"mean": before}, "validation_accuracy": {"mean": after}}

    group(tmp_path, "far", [{}], summarised=accuracies(0.75, 0.1))
    group(tmp_path, "fine", [{}], summarised=accuracies(0.98, 0.97))
    group(tmp_path, "unknown", [{}])
    text = plain(write_table(tmp_path))
    assert "Lost when the ranks were cut, in accuracy on held-out images: `far` from 75.0 % to 10.0 %.\n" in text
    group(tmp_path / "other", "fine", [{}], summarised=accuracies(0.98, 0.97))
    assert "Lost when" not in plain(write_table(tmp_path / "other"))


def test_a_run_shorter_than_its_preset_is_told(tmp_path: Path) -> None:
    """The committed seed has 95 epochs, as our own preset has; that of the paper has 100."""
    cut = {"searched_accuracy": {"mean": 0.9}, "validation_accuracy": {"mean": 0.4}}
    group(tmp_path, "short", [{"preset": "paper"}], summarised=cut)
    group(tmp_path, "long", [{"preset": "paper"}], settings={"\nepochs = 80": "\nepochs = 85"})
    group(tmp_path, "ours", [{}])
    group(tmp_path, "half", [{}], settings={"\nepochs = 80": "\nepochs = 30"})
    near = {"posterior": {**POSTERIOR, "start": "jitter", "mean_log_likelihood": -0.05}}
    settings = {"particles = 0": "particles = 20", 'start = "independent"': 'start = "jitter"'}
    group(tmp_path, "near", [near], settings=settings)
    several = {"posterior": {**POSTERIOR, "mean_log_likelihood": -0.05}}
    group(tmp_path, "cloud", [several], settings={"particles = 0": "particles = 20", "\nepochs = 80": "\nepochs = 70"})
    text = plain(write_table(tmp_path))
    found = {row["run"].split("]")[0].strip("["): row["epochs"] for row in rows(text)}
    assert {name: found[name].split(" (")[0] for name in ("short", "long", "ours", "half", "near", "cloud")} == {
        "short": "95 of 100", "long": "100", "ours": "95", "half": "45 of 95", "near": "12", "cloud": "85 of 95",
    }  # fmt: skip
    assert "`short` (after 95 of 100 epochs) from 90.0 % to 40.0 %" in text
    listed = "`half` (45 of 95), `short` (95 of 100), `cloud` (85 of 95)"
    assert f"Fewer epochs than their preset has, single networks as squares: {listed}.*" in text
    assert "Ranks that `ours`, seed 0, kept" in text  # and not those of a run that was cut short


def test_another_experiment_of_the_same_shape_has_a_table_without_the_paper(tmp_path: Path) -> None:
    group(tmp_path, "default", [{}], experiment="fashion-mnist")
    found = rows(plain(write_table(tmp_path)), "fashion-mnist")
    assert [row["run"] for row in found] == ["[default](fashion-mnist/default)"]
    assert "particles' mean" not in found[0]  # nobody has one
    assert "target" not in found[0]


def test_commands_are_listed_without_scratch_options(tmp_path: Path) -> None:
    command = (
        "python tools/run_seeds.py mnist --seeds 0 1 --jobs 3 --results=res --label a --runs 'my runs' "
        "--set fit.lr=2e-2 --set data.folder=/mnt/data --particles 20"
    )
    group(tmp_path, "a", [{}], command=command)
    wanted = "python tools/run_seeds.py mnist --seeds 0 1 --label a --set fit.lr=2e-2 --particles 20"
    assert f"- `a`: `{wanted}`\n" in plain(write_table(tmp_path))


def test_the_file_says_what_writes_it_and_what_it_holds(full: Path) -> None:
    text = plain(write_table(full))
    assert text.startswith("`bayestrain table` writes this file")
    for words in ("batch norm's four vectors", "those of the test set", "validation split", "biases"):
        assert words in text


def test_elsewhere_labels_are_no_links(full: Path, tmp_path: Path) -> None:
    text = plain(write_table(full, tmp_path / "other"))
    assert str(tmp_path) not in text
    assert "| zeta |" in text
    assert not (full / "TABLE.md").exists()


# --- always the same, never stale -------------------------------------------------------------------------------------


def test_the_same_results_give_the_same_bytes(full: Path, tmp_path: Path) -> None:
    first, second = (write_table(full, tmp_path / name).parent for name in ("one", "two"))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 4
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    assert sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file()) == files


def test_the_committed_table_is_that_of_the_committed_results(tmp_path: Path) -> None:
    """Figures may differ in the last digit of a coordinate where another matplotlib drew them, not in what they say."""
    committed = shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("TABLE.md", "figures"))
    table = write_table(committed)
    assert table.read_text() == (RESULTS / "TABLE.md").read_text(), "results/TABLE.md is stale: run `make table`"
    ours, theirs = ({p.name: p for p in (folder / "figures").iterdir()} for folder in (committed, RESULTS))
    assert set(ours) == set(theirs)
    for name, path in ours.items():
        assert said(path) == said(theirs[name]), f"results/figures/{name} is stale: run `make table`"
        assert theirs[name].stat().st_size < 300_000


def said(path: Path) -> list[str]:
    """What a figure says: its description and its hover texts."""
    root = ElementTree.fromstring(path.read_text())
    return [root.get("aria-label", ""), *(title.text or "" for title in root.iter(f"{SVG}title"))]


# --- errors -----------------------------------------------------------------------------------------------------------


def without(*names: str) -> Any:
    return lambda folder: [(folder / name).unlink() for name in names]


def result_with(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "seed-1" / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def text_in(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


FAULTS = [
    (without("seed-1/result.json"), "seed-1 has no result.json"),
    (without("seed-1/config.toml"), "seed-1 has no config.toml"),
    (without("summary.json"), "has no summary.json"),
    (text_in("seed-1/result.json", "{"), "Gather it again"),
    (text_in("summary.json", "{"), "Gather it again"),
    (text_in("seed-1/config.toml", "["), "config.toml cannot be read"),
    (text_in("seed-1/config.toml", '[prior]\nweight = "much"'), "'prior.weight' must be a number"),
    (text_in("summary.json", "[]"), "summary.json must hold a JSON object"),
    (text_in("summary.json", '{"command": "x", "seeds": [0, 1], "failed": null}'), 'its lists "seeds" and "failed"'),
    (text_in("summary.json", '{"command": "x", "seeds": [0], "failed": []}'), "has seeds 0, 1, but its summary.json"),
    (text_in("summary.json", '{"command": "x", "seeds": [0, 1], "failed": [1]}'), "tells of 0"),
    (
        text_in("summary.json", '{"command": "x", "seeds": [0, 1], "failed": [], "searched_accuracy": {"mean": "x"}}'),
        "'searched_accuracy.mean' must be a number",
    ),
    (text_in("seed-1/evaluation.safetensors", "x"), "evaluation.safetensors is damaged"),
    (result_with(accuracy=None), 'has no "accuracy"'),
    (result_with(accuracy=float("nan")), 'has no "accuracy"'),
    (result_with(status="running"), "has not finished"),
    (result_with(seed=7), "is of mnist, seed 7"),
    (result_with(experiment="cifar10-cnn"), "is of cifar10-cnn"),
    (result_with(kind="sparse"), "has the kind 'sparse', which is none of dense, tensorized, low-rank"),
    (result_with(kind="dense"), "differ in kind"),
    (result_with(posterior={**POSTERIOR, "mean_log_likelihood": -0.1}), "differ in iterations, method, particles"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_a_fault_is_one_clear_sentence_and_nothing_is_written(fault: Any, words: str, tmp_path: Path) -> None:
    folder = group(tmp_path, "a", [{}, {}])
    fault(folder)
    with pytest.raises(ReportError, match=re.escape(words)) as caught:
        write_table(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "TABLE.md").exists()
    assert not (tmp_path / "figures").exists()


def test_seeds_may_differ_in_what_does_not_matter(tmp_path: Path) -> None:
    assert groups.IMMATERIAL == config_module.IMMATERIAL
    folder = group(tmp_path, "pair", [{}, {}])
    config = folder / "seed-1" / "config.toml"
    before = config.read_text()
    config.write_text(re.sub(r"checkpoint_every = \d+", "checkpoint_every = 7", before))
    assert config.read_text() != before
    (line,) = [row for row in rows(plain(write_table(tmp_path))) if row["run"].startswith("[pair]")]
    assert line["seeds"] == "2"
    config.write_text(re.sub(r"compact_every = \d+", "compact_every = 7", before))
    with pytest.raises(ReportError, match=r"differ in fit\.compact_every"):
        write_table(tmp_path)


def test_a_place_without_results_or_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="There is no folder"):
        write_table(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="holds no results"):
        write_table(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot be written to: .*--out"):
        write_table(group(tmp_path / "results", "a", [{}]).parents[1], tmp_path / "file")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_beside_the_results_or_elsewhere(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["table"]).stdout == "results/TABLE.md\n"  # the folder is called so by default
    done = CliRunner().invoke(app, ["table", str(full), "--out", "docs"])
    assert (done.exit_code, done.stdout) == (0, "docs/TABLE.md\n")
    assert rows(plain(tmp_path / "docs" / "TABLE.md"))[0] == rows(plain(full / "TABLE.md"))[0]
    done = CliRunner().invoke(app, ["table", "nowhere"])
    assert done.exit_code == 2
    assert "There is no folder nowhere" in done.stderr
    assert "Traceback" not in done.output
