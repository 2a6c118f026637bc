"""`RunFolder`: one process at a time, nothing overwritten by accident, no symbolic link followed."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bayestrain.errors import ConfigError, DataError, TrainingError
from bayestrain.files import check_files
from bayestrain.train.folder import FILES, FORMAT, RunFolder, read_json

CHECKPOINT = "checkpoint.pt"


def begun(path: Path) -> Path:
    with RunFolder(path) as folder:
        folder.save_checkpoint({"epoch": 1, "settings": {}})
    return path


def test_a_folder_that_holds_a_run_is_refused_and_one_that_was_hardly_begun_is_not(tmp_path: Path) -> None:
    run = begun(tmp_path / "a" / "run")
    (run / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"already holds a run. Resume it, overwrite it, or choose another"):
        RunFolder(run)
    with RunFolder(run, resume=True) as folder:
        assert folder.load_checkpoint()[0]["epoch"] == 1
        folder.write("result.json", {"accuracy": 1.0})
        assert folder.finished
    with RunFolder(run, overwrite=True) as folder:
        assert not folder.holds_run
    assert sorted(file.name for file in run.iterdir()) == [".lock", "notes.txt"]
    with pytest.raises(ConfigError, match="either resumed or overwritten"):
        RunFolder(run, resume=True, overwrite=True)
    place = tmp_path / "begun"
    with RunFolder(place) as folder:
        folder.write("environment.json", {"earlier": []})
    (place / ".history.jsonl.0123.partial").write_text("half of it")
    with RunFolder(place):
        assert [file.name for file in place.iterdir()] == [".lock"]
    with pytest.raises(TrainingError, match="nothing to resume"):
        RunFolder(place, resume=True)
    (place / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write to .*file/run: Not a directory"):
        RunFolder(place / "file" / "run")


HOLD = "from bayestrain.train.folder import *; RunFolder({!r}); print('held', flush=True); import time; time.sleep(60)"


def test_a_second_process_is_told_the_first_ones_number(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD.format(str(tmp_path))], stdout=subprocess.PIPE)
    try:
        assert first.stdout.readline() == b"held\n"
        for options in ({}, {"overwrite": True}):
            with pytest.raises(ConfigError, match=rf"in use by process {first.pid} on .*\. Wait until that ends"):
                RunFolder(tmp_path, **options)
    finally:
        first.kill()
        first.communicate()
    with RunFolder(tmp_path), pytest.raises(ConfigError, match="in use by process"):  # a killed process leaves no lock
        RunFolder(tmp_path)


def test_links_are_removed_never_followed_and_no_folder(tmp_path: Path) -> None:
    other, run = begun(tmp_path / "other"), begun(tmp_path / "run")
    (other / "sub").mkdir()
    (other / "sub" / "file").write_text("theirs")
    for name, target in (("model.json", other / CHECKPOINT), ("report.html", other / "sub"), ("extra", other / "sub")):
        (run / name).symlink_to(target)
    (run / "posterior.safetensors").mkdir()  # a folder in the place of a file
    with RunFolder(run, overwrite=True):
        pass
    assert sorted(file.name for file in run.iterdir()) == [".lock", "extra", "posterior.safetensors"]
    assert (other / CHECKPOINT).exists()
    assert (other / "sub" / "file").read_text() == "theirs"
    (tmp_path / "link").symlink_to(other)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=rf"symbolic link. Name the folder it leads to, {other}"):
            RunFolder(tmp_path / "link", **options)
    assert (other / CHECKPOINT).exists()


def test_writing_never_follows_a_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    with RunFolder(run) as folder:
        for name in FILES:
            (run / name).symlink_to(victim)
        folder.write("result.json", {})
        (run / CHECKPOINT).unlink()
        folder.save_checkpoint({"epoch": 1, "settings": {}})
        folder.write_history([{"epoch": 0}])
    assert victim.read_text() == "precious"
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="Cannot write to"):
        RunFolder(run, overwrite=True)
    assert victim.read_text() == "precious"


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        for epoch in range(4):
            folder.save_checkpoint({"epoch": epoch, "settings": {}})
        assert folder.load_checkpoint() == ({"epoch": 3, "settings": {}, "format": FORMAT}, "")
        (tmp_path / CHECKPOINT).unlink()  # killed between two renames
        assert folder.holds_run
        assert folder.load_checkpoint()[0]["epoch"] == 2


def test_a_good_checkpoint_is_never_lost_to_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path)
    with RunFolder(run, resume=True) as folder:
        folder.load_checkpoint()
        folder.save_checkpoint({"epoch": 2, "settings": {}})
    content = bytearray((run / CHECKPOINT).read_bytes())
    content[-5] ^= 1
    (run / CHECKPOINT).write_bytes(content)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with RunFolder(run, resume=True) as folder:
        assert folder.load_checkpoint()[0]["epoch"] == 1
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                folder.save_checkpoint({"epoch": 2, "settings": {}})
        assert folder.load_checkpoint()[0]["epoch"] == 1
        folder.save_checkpoint({"epoch": 2, "settings": {}})
        assert folder.load_checkpoint() == ({"epoch": 2, "settings": {}, "format": FORMAT}, "")
        (run / CHECKPOINT).unlink()
        assert folder.load_checkpoint()[0]["epoch"] == 1


def test_checkpoints_need_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    test_the_last_two_checkpoints_are_kept(tmp_path)


def forged(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def compressed(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
    return file.getvalue()


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "not a zip"),
    (b"nonsense", "not a zip"),
    (pickle.dumps({"format": FORMAT}), "not a zip"),
    (saved([1, 2]), "cannot convert"),
    (saved(Path("code")), "Weights only load failed"),
    (saved({"format": FORMAT, "epoch": 1, "settings": {}})[:-30], "not a zip"),
    (compressed(saved({"format": FORMAT, "zeros": torch.zeros(1_000_000)})), "compressed, which checkpoints are"),
    (None, "Is a directory"),
], ids=str)  # fmt: skip
def test_forged_checkpoints_are_damaged_ones(content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is None:
        (tmp_path / CHECKPOINT).mkdir()
    else:
        (tmp_path / CHECKPOINT).write_bytes(forged(content))
    with RunFolder(tmp_path, resume=True) as folder:
        with pytest.raises(TrainingError, match=rf"be read\. {tmp_path / CHECKPOINT} is damaged: .*{reason}"):
            folder.load_checkpoint()
        (tmp_path / "checkpoint-previous.pt").write_bytes(forged(saved({"format": FORMAT, "epoch": 1, "settings": {}})))
        assert folder.load_checkpoint()[0]["epoch"] == 1


def test_files_of_a_run_are_read_with_care(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with pytest.raises(ConfigError, match=r"is missing: .* holds no finished run"):
        read_json(file)
    file.mkdir()
    with pytest.raises(DataError, match=rf"{file} is damaged .*Is a directory"):
        read_json(file)
    file.rmdir()
    for content, message in (
        ("{", "is damaged .* Expecting"), ("[]", "is damaged"), ("{}", "has no accuracy"), ("\0", "is damaged"),
        ("[" * 100_000, "is damaged"), ('{"accuracy": ' + "9" * 5000 + "}", "is damaged"),
    ):  # fmt: skip
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            read_json(file, "accuracy")


def test_files_of_a_finished_run_that_have_changed_are_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write("config.toml", "[run]\n")
        folder.write_history([{"epoch": 0}])
        check_files(tmp_path)
        (tmp_path / "config.toml").write_text("[fit]\n")  # of an unfinished run it may change
        check_files(tmp_path)
        folder.write("result.json", {"accuracy": 1.0})
    check_files(tmp_path)
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "history.jsonl").unlink()  # may be left out
    check_files(tmp_path)
    for name in ("config.toml", "result.json"):
        file = tmp_path / name
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        with pytest.raises(DataError, match=rf"{file} is damaged .*checksum.* delete {tmp_path}/checksums\.json; to"):
            check_files(tmp_path)
        file.write_bytes(content)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.write("predictions.safetensors", b"new")
        check_files(tmp_path)  # killed before it was finished again
        folder.write("result.json", {"accuracy": 0.5})
    check_files(tmp_path)
    for content in ("[1, 2]", "{", "[" * 100_000):
        (tmp_path / "checksums.json").write_text(content)
        with pytest.raises(DataError, match=r"checksums\.json is damaged"):
            check_files(tmp_path)
