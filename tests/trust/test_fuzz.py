"""A few hundred damaged inputs for every reader; ``make fuzz`` has a million."""

import contextlib
import os
from pathlib import Path

import pytest
from fuzz import attack
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
