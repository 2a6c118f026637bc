"""`RunFolder`: the folder of a run, from its creation to its last file."""

import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from bayestrain.errors import ConfigError, TrainingError
from bayestrain.files import CHECKSUMS, checksum, reading, write_atomically, write_json

FORMAT = 3  # of checkpoints: a higher number for every change after which older ones cannot be resumed
LAST, PREVIOUS = "checkpoint.pt", "checkpoint-previous.pt"

CHECKED = (
    "result.json", "config.toml", "environment.json", "history.jsonl",
    "model.safetensors", "posterior.safetensors", "model.json", "predictions.safetensors",
)  # fmt: skip
PARTS = "checkpoint-*.parts"  # folders of what several processes have written of a checkpoint
FILES = (LAST, PREVIOUS, *CHECKED, CHECKSUMS, "report.html")
"""Everything that a run writes, and all that overwriting removes: first what says that there is a run."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder of a run, a context manager in which one process only may write to it.

    Args:
        path: the folder; a new run creates it.
        resume: continue the run in it. Otherwise a folder that holds a run is refused.
        overwrite: remove the files of the run in it first. Other files stay. Symbolic links are never followed.
    """

    def __init__(self, path: Path | str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._parts: str | None = None  # the folder that belongs to the last checkpoint
        self.checkpoint = self.path / PREVIOUS
        """The newest one that is known to be good: this process has read or written it."""
        if resume and overwrite:
            raise ConfigError("A run is either resumed or overwritten: choose one of resume and overwrite.")
        if self.path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link. Name the folder it leads to, {self.path.resolve()}.")
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and self.holds_run:
            resume, overwrite = True, False  # torchrun has started the same command again
        self.resumed = resume
        """Whether the run in it is continued."""
        if resume and not self.holds_run:
            raise TrainingError(f"There is nothing to resume in {path}: it has no checkpoint. Start without resume.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"Cannot write to {path}: {error.strerror}. Choose another folder.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            if self.holds_run and not (resume or overwrite):
                raise ConfigError(f"{path} already holds a run. Resume it, overwrite it, or choose another folder.")
            partial = [file for name in FILES for file in self.path.glob(f".{name}.*.partial")]  # of a killed process
            for file in [*partial, *(self.path / name for name in (() if resume else FILES))]:
                if file.is_symlink() or file.is_file():  # never what a link leads to, no folder
                    file.unlink()
            for folder in self.path.glob(PARTS) if overwrite else ():
                if not folder.is_symlink():
                    shutil.rmtree(folder)
        except BlockingIOError:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._lock)
            remedy = "Wait until that ends, stop it, or choose another folder."
            raise ConfigError(f"{path} is in use by {owner}. {remedy}") from None
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    @property
    def holds_run(self) -> bool:
        return any((self.path / name).exists() for name in ("result.json", LAST, PREVIOUS))

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)  # which releases it

    def write(self, name: str, content: bytes | str | Mapping[str, Any]) -> None:
        """Write one of the run's files, whole or not at all; a table becomes JSON. ``result.json`` is the last."""
        assert name in FILES, name
        (self.path / CHECKSUMS).unlink(missing_ok=True)  # they are written again with the last file
        if isinstance(content, Mapping):
            write_json(self.path / name, content)
        else:
            write_atomically(self.path / name, content)
        if name == "result.json":
            there = [file for each in CHECKED if (file := self.path / each).is_file()]
            write_json(self.path / CHECKSUMS, {file.name: checksum(file) for file in there})

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; the last one becomes the previous one, unless it is damaged."""
        content = io.BytesIO()
        torch.save({**state, "format": FORMAT}, content)
        if self.checkpoint.name == LAST and self.checkpoint.is_file():
            (self.path / PREVIOUS).unlink(missing_ok=True)
            shutil.copyfile(self.checkpoint, self.path / PREVIOUS)  # so that there is always a last one
        data = content.getvalue()
        self.write(LAST, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        self.checkpoint, needed = self.path / LAST, self._parts
        self._parts = state.get("parts", {}).get("folder")
        for old in self.path.glob(PARTS):
            if old.name not in (needed, self._parts):
                shutil.rmtree(old)

    def load_checkpoint(self) -> tuple[dict[str, Any], str]:
        """The newest undamaged checkpoint, on the CPU, and a message that names a damaged one, or "". Loads no code."""
        damaged = []
        for path in filter(Path.exists, (self.path / LAST, self.path / PREVIOUS)):
            try:
                state = _unpacked(path.read_bytes())
                json.dumps(state.get("settings"))
            except Exception as error:  # a forged file can raise anything
                damaged.append(f"{path} is damaged: {error}.")
                continue
            if parts := state.get("parts"):
                there = self.path / Path(str(parts["folder"])).name
                files = {there / Path(name).name: known for name, known in parts["files"].items()}
                if odd := [file for file, known in files.items() if not file.is_file() or checksum(file) != known]:
                    damaged.append(f"{odd[0]} is damaged.")
                    continue
                self._parts = there.name
            if state.get("format") != FORMAT or not isinstance(state.get("settings"), dict):
                raise TrainingError(f"{path} was written by another version of BayesTrain. Start a new run.")
            self.checkpoint = path
            return state, f"{damaged[0]} Resuming from {path}." if damaged else ""
        raise TrainingError(f"No checkpoint can be read. {' '.join(damaged)} Overwrite the run to start it again.")

    def write_history(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.write("history.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def _unpacked(content: bytes) -> dict[str, Any]:
    """The state in a checkpoint, which takes no more memory than the file. Loads no code."""
    digest, _, data = content.partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise ValueError("its checksum does not match")
    if sum(entry.file_size for entry in zipfile.ZipFile(io.BytesIO(data)).infolist()) > len(data):
        raise ValueError("it is compressed, which checkpoints are not")
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def read_json(file: Path, *needed: str) -> dict[str, Any]:
    """The JSON object in a file of a run; the error names a file that is missing, damaged or incomplete."""
    if not file.exists():
        raise ConfigError(f"{file} is missing: {file.parent} holds no finished run. Resume it, or train it.")
    with reading(file, "Resume the run, or overwrite it."):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if missing := set(needed) - found.keys():
            raise ValueError(f"it has no {min(missing)}")
    return found
