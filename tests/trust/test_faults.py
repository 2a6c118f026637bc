"""A short fault campaign; ``make test-faults`` has 600 of them."""

import time
from pathlib import Path

import pytest
import torch
from faults import FINAL, JOBS, campaign


@pytest.mark.parametrize("name", ["train", "save", "fetch"])
def test_no_finished_work_is_lost(name: str) -> None:
    torch.set_num_threads(1)
    kinds = ["kill", "disk", "handles", "permissions", "damage", "two"]
    found = campaign([name], kinds, 12, seed=1)
    assert [row["broken"] for row in found.values()] == [[] for _ in found]
    assert sum(row["faults"] for row in found.values()) == 12


def test_a_broken_promise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that writes in place loses the old model when it is killed half-way."""

    def careless(folder: Path, _: object) -> None:
        file = folder / FINAL["save"]
        content = file.read_bytes() if file.exists() else b"new"
        file.write_bytes(content[:100])
        time.sleep(0.3)
        file.write_bytes(content)

    monkeypatch.setattr(JOBS["save"], "run", careless)
    found = campaign(["save"], ["kill"], 4, seed=0)
    assert found["save, kill"]["broken"]
