"""The comparison of several runs."""

import re
from pathlib import Path

import pytest
from run_folders import edit, unfinished, write_run

from bayestrain.app.report import write_comparison, write_report
from bayestrain.app.report.page import verdict
from bayestrain.app.report.read import Run, read_run
from bayestrain.errors import DataError


def compared(base: Path, *folders: Path) -> tuple[str, str]:
    """Source and text of the page."""
    page = write_comparison(folders, base / "out" / "page.html")
    source = page.read_text(encoding="utf-8")
    return source, re.sub(r"[ \n]+", " ", re.sub("<[^>]*>", " ", source.partition("<body>")[2]))


def named(**folders: Path) -> dict[str, Run]:
    return {name: read_run(folder) for name, folder in folders.items()}


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
    assert source.count("<img") == 1


def test_the_best_run_and_the_smallest_that_comes_close(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name=name) for name in ("large", "small", "poor")]
    for run, accuracy, size in zip(runs, (0.95, 0.947, 0.9), (5000, 900, 100), strict=True):
        edit(run, metrics={"accuracy": accuracy}, parameters=size)
    found = verdict(named(large=runs[0], small=runs[1], poor=runs[2]))[0]
    assert found.startswith("large has the best accuracy, 95.00%, with 5,000 parameters.")
    assert found.endswith(" small comes close with 94.70% and only 900.")


def test_a_low_rmse_is_best(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "regression", name=name) for name in ("good", "bad")]
    for run, rmse in zip(runs, (0.2, 0.4), strict=True):
        edit(run, metrics={"rmse": rmse})
    assert verdict(named(good=runs[0], bad=runs[1]))[0] == "good has the best RMSE, 0.200, with 3,650 parameters."


def test_different_tasks_and_unfinished_runs_are_not_ranked(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", "regression", name="other")
    assert "different tasks" in compared(tmp_path, run, other)[1]
    begun = unfinished(write_run(tmp_path / "c", name="begun"))
    _, text = compared(tmp_path, run, begun)
    assert "nothing to compare yet" in text
    assert "c (unfinished)" in text


def test_a_run_given_twice_counts_once_and_none_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert "1 run compared" in compared(tmp_path, run, tmp_path / "." / "a")[1]
    with pytest.raises(DataError, match="Give at least one run folder"):
        write_comparison([], tmp_path / "page.html")
