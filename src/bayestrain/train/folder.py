"""`RunFolder`: the folder of a run, from its creation to its last file."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from bayestrain.errors import ConfigError, TrainingError
from bayestrain.files import naming, write_atomically, write_json

FORMAT = 3
"""Of checkpoints: a higher number for every change after which older ones cannot be resumed."""

LAST, PREVIOUS = "checkpoint.pt", "checkpoint-previous.pt"

FILES = (
    "result.json", LAST, PREVIOUS, "config.toml", "environment.json", "history.jsonl", "spectra.json",
    "model.safetensors", "posterior.safetensors", "model.json", "predictions.safetensors", "report.html",
)  # fmt: skip
"""Everything that a run writes, and all that overwriting removes: first what says that there is a run."""


class RunFolder:
    """The folder of a run, open for writing by one process only.

    Use it as a context manager; leaving it releases the lock::

        with RunFolder(path, resume=False) as folder:
            folder.save_checkpoint(state)
            folder.finish(result)

    Args:
        path: the folder; a new run creates it.
        resume: continue the run in it. Otherwise a folder that holds a run is refused.
        overwrite: remove the files of the run in it first. Other files stay. Symbolic links are never followed.
    """

    def __init__(self, path: Path | str, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        if resume and overwrite:
            raise ConfigError("A run is either resumed or overwritten: choose one of resume and overwrite.")
        if self.path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link. Name the folder it leads to, {self.path.resolve()}.")
        if resume and not self.holds_run:
            raise TrainingError(f"There is nothing to resume in {path}: it has no checkpoint. Start without resume.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"Cannot write to {path}: {error.strerror}. Choose another folder.") from error
        try:
            self._acquire()
            if self.holds_run and not (resume or overwrite):
                raise ConfigError(f"{path} already holds a run. Resume it, overwrite it, or choose another folder.")
            partial = [file for name in FILES for file in self.path.glob(f".{name}.*.partial")]  # of a killed process
            for file in [*partial, *(self.path / name for name in (() if resume else FILES))]:
                if file.is_symlink() or file.is_file():  # never what a link leads to, no folder
                    file.unlink()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "result.json").exists()

    @property
    def holds_run(self) -> bool:
        """Whether there is a run, finished or with a checkpoint."""
        return self.finished or (self.path / LAST).exists() or (self.path / PREVIOUS).exists()

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"{self.path} is in use by {owner}. Wait until that ends, stop it, or choose another folder."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- files --------------------------------------------------------------------------------------------------------

    def write(self, name: str, content: bytes | str | Mapping[str, Any]) -> None:
        """Write one of the run's files, whole or not at all; a table becomes JSON."""
        assert name in FILES, name
        write_as = write_atomically if isinstance(content, bytes | str) else write_json
        write_as(self.path / name, content)  # type: ignore[arg-type]

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, the last file: its presence means that the run is finished."""
        self.write("result.json", result)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, keeping the previous one."""
        content = io.BytesIO()
        torch.save({**state, "format": FORMAT}, content)
        if (self.path / LAST).exists():
            (self.path / PREVIOUS).unlink(missing_ok=True)
            (self.path / PREVIOUS).hardlink_to(self.path / LAST)  # there is a checkpoint at any time
        data = content.getvalue()
        self.write(LAST, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)

    def load_checkpoint(self) -> tuple[dict[str, Any], str]:
        """The newest undamaged checkpoint, its tensors on the CPU, and a message that names a damaged one, or "".

        Only data are loaded, never code.
        """
        damaged: list[str] = []
        for path in (self.path / LAST, self.path / PREVIOUS):
            if not path.exists():
                continue
            digest, _, data = path.read_bytes().partition(b"\n")
            if hashlib.sha256(data).hexdigest().encode() != digest:
                damaged.append(str(path))
                continue
            state: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if state.get("format") != FORMAT:
                raise TrainingError(f"{path} was written by another version of BayesTrain. Start a new run.")
            note = f"{damaged[0]} is damaged: its checksum does not match. Resuming from {path}." if damaged else ""
            return state, note
        raise TrainingError(
            f"No checkpoint can be read; damaged: {', '.join(damaged)} (their checksums do not match). Overwrite the "
            "run to start it again."
        )

    def write_history(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write ``history.jsonl`` with the records of the epochs so far."""
        self.write("history.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def append_history(self, record: Mapping[str, Any]) -> None:
        """Add the record of an epoch."""
        path = self.path / "history.jsonl"
        with naming(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "a") as file:
            file.write(json.dumps(record) + "\n")


def read_json(file: Path, *needed: str) -> dict[str, Any]:
    """The JSON object in a file of a run; a `ConfigError` names a file that is missing, damaged or incomplete."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing: {file.parent} holds no finished run. Resume it, or train it.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}. Resume the run, or overwrite it.") from error
    if not isinstance(found, dict) or (missing := [key for key in needed if key not in found]):
        what = f"it has no {missing[0]}" if isinstance(found, dict) else "it holds no object"
        raise ConfigError(f"{file} is damaged: {what}. Resume the run, or overwrite it.")
    return found
