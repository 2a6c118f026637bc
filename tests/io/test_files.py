"""Files are written whole or not at all, and never through a symlink."""

import json
import os
import secrets
import stat
from pathlib import Path

import pytest

from bayestrain.files import write_atomically, write_json


def test_the_content_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"old")
    write_atomically(path, "new")
    write_json(tmp_path / "other.json", {"a": 1})
    assert path.read_text() == "new"
    assert json.loads((tmp_path / "other.json").read_text()) == {"a": 1}
    assert sorted(found.name for found in tmp_path.iterdir()) == ["other.json", "result.json"]


def test_even_a_guessed_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".result.json.guessed.partial").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        write_atomically(tmp_path / "result.json", "new")
    assert victim.read_text() == "mine"


def test_a_symlink_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "result.json"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_atomically(path, "new")
    assert victim.read_text() == "mine"
    assert not path.is_symlink()


def test_what_fails_leaves_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"result\.json cannot be written: No space left on device\. Make room"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_file_and_folder_are_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(tmp_path / "result.json", "new")
    assert kinds == [False, True]


def test_the_usual_permissions_are_given(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
