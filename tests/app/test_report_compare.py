"""The comparison of several runs."""

import re
from pathlib import Path

import pytest
from run_folders import unfinished, write_run

from bayestrain.app.report import write_comparison, write_report
from bayestrain.errors import DataError


def compared(base: Path, *folders: Path) -> tuple[str, str]:
    """Source and text of the page."""
    page = write_comparison(folders, base / "out" / "page.html")
    source = page.read_text(encoding="utf-8")
    return source, re.sub(r"[ \n]+", " ", re.sub("<[^>]*>", " ", source.partition("<body>")[2]))


def test_runs_side_by_side(tmp_path: Path) -> None:
    light, heavy = write_run(tmp_path / "a"), write_run(tmp_path / "b", "posterior", weight=3.0)
    write_report(light)
    source, text = compared(tmp_path, light, heavy)
    assert "2 runs compared" in text
    assert "prior.weight 1.0 3.0" in text
    assert "fit.lr" not in text
    assert 'href="../a/report.html"' in source
    assert 'href="../b/report.html"' not in source
    assert "features.conv 6, 9, 3 6, 9, 3" in text


def test_runs_of_other_tasks_and_unfinished_ones_stand_beside_finished_ones(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", "regression", name="other")
    begun = unfinished(write_run(tmp_path / "c", name="begun"))
    _, text = compared(tmp_path, run, other, begun)
    assert "score a b c Parameters" in text
    assert "RMSE (test) – " in text
    assert "Epochs so far – – " in text


def test_a_run_given_twice_counts_once_and_none_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert "1 run compared" in compared(tmp_path, run, tmp_path / "." / "a")[1]
    with pytest.raises(DataError, match="Give at least one run folder"):
        write_comparison([], tmp_path / "page.html")
