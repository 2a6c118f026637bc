"""A few hundred damaged inputs for every reader, and a few faults; ``make fuzz`` and ``make test-faults`` have more."""

import contextlib
import os
from pathlib import Path

import pytest
from fuzz import attack
from processes import WITH_TESTS, python
from readers import READERS, SLOW


@pytest.mark.parametrize("name", [name for name in READERS if name != "files of a report"])
def test_only_our_own_errors_come_out(name: str, tmp_path: Path) -> None:
    with Path(os.devnull).open("w") as silence, contextlib.redirect_stdout(silence):
        reader = READERS[name](tmp_path)
    found = attack(name, reader, 1, range(300 // SLOW.get(name, 1)))
    assert not found["unexpected"], found["odd"]
    assert found["refused"] > 0


@pytest.mark.slow
def test_damaged_files_of_a_report(tmp_path: Path) -> None:
    found = attack("files of a report", READERS["files of a report"](tmp_path), 1, range(20))
    assert not found["unexpected"], found["odd"]
    assert found["read"] > 0


def test_an_unexpected_exception_is_seen_and_can_be_repeated(tmp_path: Path) -> None:
    reader = READERS["config"](tmp_path)
    read = reader.read

    def broken(given: tuple[bytes]) -> None:
        if len(given[0]) % 7 == 0:
            raise KeyError("ours")
        read(given)

    reader.read = broken
    first, again = (attack("config", reader, 1, range(100)) for _ in range(2))
    assert first["unexpected"] == sum(map(len, first["odd"].values())) > 0
    assert first["odd"] == again["odd"]


FAULTS = Path(__file__).with_name("faults.py")
KINDS = ("kill", "disk", "handles", "permissions", "damage", "two")

CARELESS = """
import time, torch
from faults import FINAL, JOBS, campaign

def careless(folder, _):  # writes in place, and loses the old model when it is killed half-way
    file = folder / FINAL["save"]
    content = file.read_bytes() if file.exists() else b"new"
    file.write_bytes(content[:100])
    time.sleep(0.3)
    file.write_bytes(content)

torch.set_num_threads(1)
JOBS["save"].run = careless
print(len(campaign(["save"], ["kill"], 4, seed=0)["save, kill"]["broken"]))
"""


@pytest.mark.parametrize(("name", "faults"), [("train", 18), ("save", 12), ("fetch", 12)])
def test_no_finished_work_is_lost(name: str, faults: int) -> None:
    done = python(FAULTS, "--jobs", name, "--kinds", *KINDS, "--faults", faults, "--seed", 1, env=WITH_TESTS)
    assert sum(int(line.partition("'faults': ")[2].partition(",")[0]) for line in done.stdout.splitlines()) == faults


def test_a_broken_promise_is_seen() -> None:
    assert int(python("-c", CARELESS, env=WITH_TESTS).stdout) > 0
