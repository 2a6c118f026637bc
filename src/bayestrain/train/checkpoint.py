"""Files that survive being killed: checkpoints and the history, written so that a run can go on exactly."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bayestrain.errors import TrainingError
from bayestrain.files import naming, write_atomically
from bayestrain.train.places import LAST

BEST = "checkpoint-best.pt"


def save_checkpoint(folder: Path, state: Mapping[str, Any], name: str = LAST) -> None:
    """Write a checkpoint that `load_checkpoint` can read."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    write_atomically(folder / name, content.getvalue())


def load_checkpoint(folder: Path, name: str = LAST) -> dict[str, Any]:
    """Read a checkpoint, with tensors on the CPU. Loads data only, never code."""
    path = folder / name
    if not path.exists():
        raise TrainingError(f"There is nothing to resume in {folder}: it has no {name}. Start without resume.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle, zip or torch make of a damaged file
        raise TrainingError(f"{path} is not a checkpoint of this program or is damaged ({error}).") from error
    if not isinstance(state, dict) or state.get("format") != 3:
        raise TrainingError(f"{path} is not a checkpoint of this version. Start anew.")
    return state


class History:
    """The lines of ``history.jsonl``, in memory and, where a folder is given, on disk as they come."""

    def __init__(self, folder: Path | None, until_epoch: int = -1) -> None:
        """Keep the lines up to `until_epoch` that an interrupted run has left, drop the rest."""
        self.path = None if folder is None else folder / "history.jsonl"
        self.lines: list[dict[str, Any]] = []
        if self.path is None:
            return
        if self.path.exists():
            for text in self.path.read_text().splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    break  # killed while writing its last line
                if line["epoch"] <= until_epoch:
                    self.lines.append(line)
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, line: dict[str, Any]) -> None:
        """Add one epoch."""
        self.lines.append(line)
        if self.path is not None:
            with naming(self.path), self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
