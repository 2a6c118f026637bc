"""TABLE.md and its figures: generated from the committed results again, and from groups made up for the purpose."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from table_kit import POSTERIOR, RESULTS, ROOT, group

from paper import fronts, table
from paper.published import PAPER
from paper.records import gather
from paper.table import write_table


def said(path: Path) -> list[str]:
    """What a figure says: its texts, and the numbers of its description. Coordinates may differ between versions."""
    texts = ((element.text or "").strip() for element in ElementTree.fromstring(path.read_text()).iter())
    return [text for text in texts if text]


def test_committed_table_figures_and_documents_are_those_of_the_committed_results(tmp_path: Path) -> None:
    write_table(RESULTS, tmp_path)
    committed, again = (re.sub(r"\[([^]]*)\]\((?!\.\.)[^)]*\)", r"\1", path.read_text())  # links only beside results
                        for path in (RESULTS / "TABLE.md", tmp_path / "TABLE.md"))  # fmt: skip
    assert again == committed, "paper/results/TABLE.md is stale: run `make paper-table`"
    ours, theirs = ({path.name: path for path in (folder / "figures").iterdir()} for folder in (tmp_path, RESULTS))
    assert set(ours) == set(theirs)
    for name, path in ours.items():
        assert said(path) == said(theirs[name]), f"paper/results/figures/{name} is stale: run `make paper-table`"
        assert path.stat().st_size < 400_000
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
    several = [{"posterior": {**POSTERIOR, "mean_log_likelihood": value}} for value in (-0.05, -0.07)]
    group(tmp_path, "cloud", several, failed=(2,))
    group(tmp_path, "their-way", [{"preset": "paper", "params": 4000, "accuracy": 0.4}], searched=(0.9,))
    return tmp_path


def test_sentences_below_a_table_and_lines_of_a_front(full: Path) -> None:
    text = write_table(full).read_text().replace("\u00a0", " ")
    assert "Failed seeds, which no line counts: 2 of `cloud`." in text
    assert "There are no results of `cifar10-cnn` yet." in text
    assert PAPER["mnist"].notes[0] in text
    assert "All lines were trained by the package before its rewrite" in text
    group(full, "lost", [{"validation": {"accuracy": 0.5}}], searched=(0.9,))
    text = write_table(full).read_text().replace("\u00a0", " ")
    assert "before and after the final cut of ranks: `lost` from 90.0 % to 50.0 %." in text

    def joined() -> dict[str, set[str]]:
        (groups,) = gather(full).values()
        return {style: {group.label for group in members} for style, members in fronts.joined(groups).items()}

    assert joined() == {"-": {"zeta", "alpha", "lost"}}  # one target alone is no line
    group(full, "further", [{"params": 8000}], settings={"target_ratio = 0.0": "target_ratio = 60.0"})
    for label in ("brief", "briefer"):
        group(full, label, [{"params": 6000}], settings={"\nepochs = 80": "\nepochs = 30"})
    assert joined() == {"-": {"zeta", "alpha", "lost"}, ":": {"aimed", "further"}, "--": {"brief", "briefer"}}


def test_labels_cover_neither_marks_nor_each_other() -> None:
    for name, groups in gather(RESULTS).items():
        figure = fronts.figures(name, groups)[0].figure
        figure.draw_without_rendering()
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        for k, box in enumerate(boxes):
            assert box.count_overlaps(boxes[:k]) == 0, (name, axes.texts[k].get_text())
