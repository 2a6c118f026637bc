"""What differs between several runs."""

from pathlib import Path

from run_folders import LAYERS, unfinished, write_run

from bayestrain.app.report.facts import differences
from bayestrain.app.report.read import read_run


def rows(**folders: Path) -> dict[str, list[str]]:
    table = differences({name: read_run(folder) for name, folder in folders.items()})
    assert list(table.header) == ["what differs", *folders]
    return {name: values for name, *values in table.rows}


def test_figures_ranks_and_settings_that_differ_are_shown(tmp_path: Path) -> None:
    light = write_run(tmp_path / "a")
    layers = {name: (*about[:4], [1] * len(about[4])) for name, about in LAYERS.items()}
    heavy = write_run(tmp_path / "b", "posterior", weight=3.0, layers=layers)
    found = rows(light=light, heavy=heavy)
    assert found["prior.weight"] == ["1.0", "3.0"]
    assert found["ranks of features.conv"] == ["6, 9, 3", "1, 1, 1"]
    assert "Parameters" in found
    assert "fit.lr" not in found


def test_runs_of_other_tasks_and_unfinished_ones_stand_beside_finished_ones(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", "regression", name="other")
    found = rows(a=run, b=other, c=unfinished(write_run(tmp_path / "c", name="begun")))
    assert found["RMSE (test)"][0] == found["RMSE (test)"][2] == "–"
    assert found["Epochs so far"][:2] == ["–", "–"]
