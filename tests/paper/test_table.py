"""TABLE.md and its figures: every cell follows from the seeds' results, and the committed files are not stale."""

import json
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from table_kit import POSTERIOR, RESULTS, ROOT, figures, group, rows

from paper import fronts, table
from paper.published import PAPER
from paper.records import gather
from paper.table import write_table

COLUMNS = {
    "parameters": ("params", ",.0f", 1, ""),
    "ratio": ("ratio", ".1f", 1, "×"),
    "accuracy": ("accuracy", ".2f", 100, " %"),
    "log likelihood": ("log_likelihood", ".4f", 1, ""),
    "calibrated": ("calibrated_log_likelihood", ".4f", 1, ""),
    "particles' mean": ("mean_log_likelihood", ".4f", 1, ""),
}
"""Per column with a mean over seeds: its figure, and how it is written."""


def wrong_cells(text: str, results: Path) -> list[str]:
    """The cells of a table that do not follow from each seed's `result.json`, read without `paper.records`."""
    found, lines = [], 0
    for experiment in (path.name for path in results.iterdir() if path.name != "figures" and path.is_dir()):
        for row in rows(text, experiment):
            if row["run"] == "the paper":
                continue
            lines += 1
            files = sorted((results / experiment / row["run"]).glob("seed-*/result.json"))
            each = [read_figures(json.loads(file.read_text())) for file in files]
            for column, (key, style, scale, unit) in COLUMNS.items():
                values = [own[key] for own in each if key in own]
                if len(values) < len(each):
                    wanted = "–"
                else:
                    mean = scale * statistics.fmean(values)
                    spread = scale * statistics.stdev(values) if len(values) > 1 else 0.0
                    wanted = f"{mean:{style}} ± {spread:{style}}{unit}" if spread else f"{mean:{style}}{unit}"
                if row[column] != wanted:
                    found.append(f"{row['run']}, {column}: {row[column]} and not {wanted}")
            if row["seeds"] != str(len(files)):
                found.append(f"{row['run']}, seeds: {row['seeds']} and not {len(files)}")
    assert lines == len(list(results.glob("*/*/summary.json")))
    return found


def read_figures(result: dict[str, Any]) -> dict[str, float]:
    """The figures of either schema of `result.json`."""
    if "params" in result:
        return figures(result)
    calibrated, posterior = result["calibrated"] or {}, result["posterior"]
    suited = {f"calibrated_{key}": value for key, value in calibrated.items()} if not posterior else calibrated
    alone = {"mean_log_likelihood": posterior["mean_log_likelihood"]} if posterior else {}
    return {
        "params": result["parameters"],
        "ratio": result["dense_parameters"] / result["parameters"],
        **result["metrics"],
        **suited,
        **alone,
    }


def test_every_cell_of_the_committed_table_follows_from_the_seeds() -> None:
    text = (RESULTS / "TABLE.md").read_text()
    assert wrong_cells(text, RESULTS) == []


def test_a_forged_mean_in_the_table_is_found() -> None:
    text = (RESULTS / "TABLE.md").read_text()
    assert "98.70\u00a0±\u00a00.07" in text
    (found,) = wrong_cells(text.replace("98.70\u00a0±\u00a00.07", "98.71\u00a0±\u00a00.07"), RESULTS)
    assert found.startswith("default, accuracy: 98.71")


def said(path: Path) -> list[str]:
    """What a figure says: its texts, and the numbers of its description. Coordinates may differ between versions."""
    return [
        text for element in ElementTree.fromstring(path.read_text()).iter() if (text := (element.text or "").strip())
    ]


def test_committed_table_and_figures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    write_table(RESULTS, tmp_path)
    committed, again = (re.sub(r"\[([^]]*)\]\((?!\.\.)[^)]*\)", r"\1", path.read_text())  # links only beside results
                        for path in (RESULTS / "TABLE.md", tmp_path / "TABLE.md"))  # fmt: skip
    assert again == committed, "paper/results/TABLE.md is stale: run `make paper-table`"
    ours, theirs = ({path.name: path for path in (folder / "figures").iterdir()} for folder in (tmp_path, RESULTS))
    assert set(ours) == set(theirs)
    for name, path in ours.items():
        assert said(path) == said(theirs[name]), f"paper/results/figures/{name} is stale: run `make paper-table`"
        assert path.stat().st_size < 400_000


def test_the_tables_of_the_documents_are_up_to_date(tmp_path: Path) -> None:
    experiments, copy = gather(RESULTS), tmp_path / "README.md"
    assert {path.relative_to(ROOT).as_posix() for path in table.DOCUMENTS} == {
        "README.md", "paper/README.md", "docs/results.md",
    }  # fmt: skip
    for path, tables in table.DOCUMENTS.items():
        copy.write_text(path.read_text())
        table.refresh(copy, tables(experiments))
        assert copy.read_text() == path.read_text(), f"{path} is stale: run `make paper-table`"
    copy.write_text(f"a\n{table.MARKERS[0]} old {table.MARKERS[1]}\nb\n")
    table.refresh(copy, "new")
    assert copy.read_text() == f"a\n{table.MARKERS[0]}\n\nnew\n\n{table.MARKERS[1]}\nb\n"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Groups of every kind, in an order that is not the table's."""
    group(tmp_path, "zeta", [{"params": 5000}, {"params": 5200}, {"params": 5400}])
    group(tmp_path, "alpha", [{"params": 3000}, {"params": 3100}], settings={"weight = 1.0": "weight = 2.0"})
    group(tmp_path, "aimed", [{"params": 10_000}], settings={"target_ratio = 0.0": "target_ratio = 50.0"})
    suited = {"temperature": 2.0, "log_likelihood": -0.03, "ece": 0.001}
    group(tmp_path, "tt", [{"kind": "tensorized", "params": 27_235, "calibrated": suited}])
    group(tmp_path, "plain", [{"kind": "dense", "params": 496_885, "ranks": {}, "max_ranks": {}}] * 2)
    several = [{"posterior": {**POSTERIOR, "mean_log_likelihood": value}} for value in (-0.05, -0.07)]
    group(tmp_path, "cloud", several, failed=(2,))
    group(tmp_path, "their-way", [{"preset": "paper", "params": 4000, "accuracy": 0.4}], searched=(0.9,))
    return tmp_path


def test_lines_are_sorted_by_kind_then_inference_then_size_the_papers_first(full: Path) -> None:
    found = rows(write_table(full).read_text())
    assert [(row["model"], row["run"]) for row in found] == [
        ("BNN", "the paper"), ("BNN", "plain"),
        ("BTNN", "the paper"), ("BTNN", "tt"),
        ("LR-BTNN", "the paper"), ("LR-BTNN", "aimed"), ("LR-BTNN", "zeta"), ("LR-BTNN", "their-way"),
        ("LR-BTNN", "alpha"), ("LR-BTNN", "cloud"),
    ]  # fmt: skip


def test_a_line_says_how_it_was_trained(full: Path) -> None:
    text = write_table(full).read_text()
    assert wrong_cells(text, full) == []
    found = {row["run"]: row for row in rows(text)}
    assert found["zeta"]["parameters"] == "5,200 ± 200"
    keys = ("inferred by", "preset", "prior weight", "target", "epochs", "seeds")
    assert [found["zeta"][key] for key in keys] == ["MAP", "default", "1", "–", "95", "3"]
    assert [found["alpha"]["prior weight"], found["aimed"]["target"]] == ["2", "50×"]
    assert [found["their-way"][key] for key in ("preset", "epochs")] == ["paper", "95 of 100"]
    assert [found["cloud"][key] for key in ("inferred by", "epochs")] == [
        "SVGD, 20 particles",
        "95 (42,370 iterations)",
    ]
    assert found["tt"]["calibrated"] == "-0.0300"
    assert found["zeta"]["commits"] == "7e01adb"
    for row in (row for row in rows(text) if row["run"] == "the paper"):
        assert {row[key] for key in (*keys, "log likelihood", "commits")} == {"–"}
    assert found["the paper"]["particles' mean"] == "-0.106"


def test_sentences_below_a_table(full: Path) -> None:
    text = write_table(full).read_text().replace("\u00a0", " ")
    assert "accuracy on held-out images: `their-way` (after 95 of 100 epochs) from 90.0 % to 98.1 %" not in text
    assert "Failed seeds, which no line counts: 2 of `cloud`." in text
    assert "There are no results of `cifar10-cnn` yet." in text
    assert PAPER["mnist"].notes[0] in text
    assert "All lines were trained by the package before its rewrite" in text
    group(full, "lost", [{"validation": {"accuracy": 0.5}}], searched=(0.9,))
    assert "before and after the final cut of ranks: `lost` from 90.0 % to 50.0 %." in (
        write_table(full).read_text().replace("\u00a0", " ")
    )


def test_what_the_audit_asked_for_is_told() -> None:
    """Computed here from the recorded results; the sentences are those of the committed table."""
    text = (RESULTS / "TABLE.md").read_text().replace("\u00a0", " ")
    each = {}
    for label in ("x7", "x11"):
        files = [RESULTS / "cifar10-resnet110" / label / f"seed-{seed}" / "result.json" for seed in (0, 1)]
        each[label] = 100 * statistics.fmean(json.loads(file.read_text())["accuracy"] for file in files)
    assert f"On the seeds that both have (0, 1): `x7` {each['x7']:.2f} %, `x11` {each['x11']:.2f} %." in text
    files = sorted((RESULTS / "mnist" / "svgd-20").glob("seed-*/result.json"))
    pairs = [(r["ece"], r["posterior"]["map"]["ece"]) for r in (json.loads(file.read_text()) for file in files)]
    assert all(posterior > single for posterior, single in pairs)
    assert "`svgd-20` 3 and 2 of 3" in text


def test_lines_join_weights_targets_and_short_runs_apart(full: Path) -> None:
    def joined() -> dict[str, set[str]]:
        (groups,) = gather(full).values()
        return {style: {group.label for group in members} for style, members in fronts.joined(groups).items()}

    assert joined() == {"-": {"zeta", "alpha"}}  # one target alone is no line
    group(full, "further", [{"params": 8000}], settings={"target_ratio = 0.0": "target_ratio = 60.0"})
    for label in ("brief", "briefer"):
        group(full, label, [{"params": 6000}], settings={"\nepochs = 80": "\nepochs = 30"})
    assert joined() == {"-": {"zeta", "alpha"}, ":": {"aimed", "further"}, "--": {"brief", "briefer"}}


def test_the_front_has_every_group_and_the_papers_networks(full: Path) -> None:
    (groups,) = gather(full).values()
    drawing = fronts.figures("mnist", groups)[0]
    texts = [element.text for element in ElementTree.fromstring(drawing.svg()).iter() if element.text]
    for label in ("zeta", "alpha", "aimed", "tt", "plain", "cloud", "the paper, LR-BTNN"):
        assert label in texts
    assert "their-way: 40.0 %, below" in texts
    assert "zeta: 5,200 ± 200 parameters, 98.60 ± 0.00 %." in drawing.describe


def test_labels_cover_neither_marks_nor_each_other() -> None:
    for name, groups in gather(RESULTS).items():
        figure = fronts.figures(name, groups)[0].figure
        figure.draw_without_rendering()
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        for k, box in enumerate(boxes):
            assert box.count_overlaps(boxes[:k]) == 0, (name, axes.texts[k].get_text())


def test_the_ranks_shown_are_those_of_the_median_seed(full: Path) -> None:
    (groups,) = gather(full).values()
    smallest = fronts.typical(groups)
    assert (smallest.label, smallest.median.parameters) == ("alpha", 3000)  # the smaller of the two in the middle
    group(full, "went-on", [{"params": 20, "from_run": {"run": "r", "params": 9, "epochs": 3, "seconds": 1.0}}])
    group(full, "default", [{"params": 9000}, {"params": 7000}, {"params": 8000}])
    (groups,) = gather(full).values()
    default = fronts.typical(groups)
    assert (default.label, default.median.seed) == ("default", 2)
    assert "Ranks that `default`, seed 2, kept" in write_table(full).read_text()


def test_the_uncertainty_shown_is_that_of_ranks_that_were_found() -> None:
    shown = {name: fronts.evaluated(groups) for name, groups in gather(RESULTS).items()}
    assert {name: (found[0].label, found[1].seed) for name, found in shown.items()} == {
        "mnist": ("svgd-20", 0), "cifar10-cnn": ("svgd-20", 0), "cifar10-resnet110": ("svgd-20", 2),
    }  # fmt: skip
