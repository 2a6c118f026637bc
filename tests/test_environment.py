"""What a run ran on is on record, for each of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bayestrain.errors import ConfigError
from bayestrain.train import environment
from bayestrain.train.checkpoint import FORMAT, save_checkpoint
from bayestrain.train.environment import note_environment

CPU = torch.device("cpu")


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part finds the source at another commit, a minute later than the one before."""
    whole, times = environment.describe_environment, iter(range(10))

    def describe(device: torch.device) -> dict[str, Any]:
        time = next(times)
        return {**whole(device), "commit": f"c{time}", "dirty": False, "started": f"2026-11-16T10:0{time}"}

    monkeypatch.setattr(environment, "describe_environment", describe)


def train(folder: Path, until: int) -> None:
    """Leave behind what a run does whose last checkpoint is that of an epoch, and whose history is farther on."""
    save_checkpoint(folder, {"format": FORMAT, "epoch": until})
    (folder / "history.jsonl").write_text("".join(json.dumps({"epoch": number}) + "\n" for number in range(until + 3)))


@pytest.mark.usefixtures("commits")
def test_each_part_of_a_run_is_kept_with_the_epoch_it_reached(tmp_path: Path) -> None:
    first = note_environment(tmp_path, CPU, "the first")
    assert not first.keys() & {"resumed", "earlier"}
    for until in (4, 7):
        train(tmp_path, until)
        found = note_environment(tmp_path, CPU, "again")
    assert found == json.loads((tmp_path / "environment.json").read_text())
    assert (found["command"], found["started"], found["resumed"]) == ("the first", first["started"], "2026-11-16T10:02")
    assert found["commit"] == "c2"
    said = [(part["commit"], part["started"], part["epochs"]) for part in found["earlier"]]
    assert said == [("c0", "2026-11-16T10:00", 4), ("c1", "2026-11-16T10:01", 7)]
    for part in found["earlier"]:
        assert part.keys() == first.keys() - {"command"} | {"epochs"}


@pytest.mark.usefixtures("commits")
def test_a_part_without_an_epoch_is_none(tmp_path: Path) -> None:
    note_environment(tmp_path, CPU, "stopped at once")
    assert note_environment(tmp_path, CPU, "")["earlier"] == []
    train(tmp_path, 3)
    for _ in range(3):  # perhaps its checkpoint is damaged
        found = note_environment(tmp_path, CPU, "")
    assert [(part["commit"], part["epochs"]) for part in found["earlier"]] == [("c1", 3)]
    assert found["commit"] == "c4"


@pytest.mark.usefixtures("commits")
def test_of_a_part_without_a_checkpoint_nothing_is_left(tmp_path: Path) -> None:
    note_environment(tmp_path, CPU, "")
    train(tmp_path, 5)
    note_environment(tmp_path, CPU, "")
    (tmp_path / "checkpoint-last.pt").unlink()  # as a damaged one is, to begin anew
    assert note_environment(tmp_path, CPU, "")["earlier"] == []


@pytest.mark.parametrize("earlier", [None, 3, "none", [1], [{}], [{"epochs": "three"}]])
def test_a_damaged_record_is_named(earlier: object, tmp_path: Path) -> None:
    file = tmp_path / "environment.json"
    file.write_text(json.dumps({"started": "", "command": "", "earlier": earlier}))
    with pytest.raises(ConfigError, match=r"environment\.json is damaged: earlier is no list of parts\. Remove it"):
        note_environment(tmp_path, CPU, "")
