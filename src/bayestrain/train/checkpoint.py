"""Files that survive being killed: checkpoints and the history, written so that a run can go on exactly."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bayestrain.errors import ConfigError, TrainingError
from bayestrain.files import naming, write_atomically
from bayestrain.train.places import LAST

FORMAT = 5
"""Of checkpoints: a higher number for every change after which older ones cannot be gone on from."""


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint that `load_checkpoint` can read."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    write_atomically(folder / LAST, content.getvalue())


def load_checkpoint(folder: Path, *, glance: bool = False) -> dict[str, Any]:
    """Read a checkpoint, with tensors on the CPU; at a `glance` they stay in the file. Loads data only, never code."""
    path = folder / LAST
    if not path.exists():
        raise TrainingError(f"There is nothing to resume in {folder}: it has no {LAST}. Start without resume.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=glance)
    except (OSError, MemoryError):
        raise  # the file may well be whole
    except Exception as error:  # whatever pickle, zip or torch make of a damaged file
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(
            f"{path} is damaged, or is no checkpoint ({cause}). Remove it to begin this part of the run anew."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainingError(f"{path} is not a checkpoint of this version. Remove it to begin anew.")
    return state


class History:
    """The lines of ``history.jsonl``, in memory and, where a folder is given, on disk as they come."""

    def __init__(self, folder: Path | None, until_epoch: int = -1) -> None:
        """Keep the lines up to `until_epoch` that an interrupted run has left, drop the rest."""
        self.path = None if folder is None else folder / "history.jsonl"
        self.lines: list[dict[str, Any]] = []
        if self.path is None:
            return
        if self.path.exists() and until_epoch >= 0:
            self.lines = [line for line in _lines(self.path) if line["epoch"] <= until_epoch]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, line: dict[str, Any]) -> None:
        """Add one epoch."""
        self.lines.append(line)
        if self.path is not None:
            with naming(self.path), self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def epochs_kept(folder: Path) -> int:
    """The epoch that a run can go on from: that of its checkpoint, 0 without one."""
    return int(load_checkpoint(folder, glance=True)["epoch"]) if (folder / LAST).exists() else 0


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from the checkpoint in `folder` with other settings than it was made with."""
    before = load_checkpoint(folder, glance=True)["settings"]
    changed = [key for key, now in settings.items() if before.get(key) != now]
    if changed:
        other = "; ".join(f"{key} was {before.get(key)!r}, now {settings[key]!r}" for key in changed)
        raise ConfigError(
            f"The run in {folder} cannot go on with other settings: {other}. "
            "Go on with the same, or train in another folder."
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    texts = path.read_bytes().splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("epoch"), int):
            yield line
        elif text.strip() and number < len(texts):  # else killed while writing its last line
            raise TrainingError(f"{path}, line {number} is no epoch. Remove the line, then go on with --resume.")
