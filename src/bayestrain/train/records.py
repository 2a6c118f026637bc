"""JSON files of a run folder, read with care: one that is damaged is named, with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayestrain.errors import ConfigError
from bayestrain.train.places import LAST

FIGURES = ("accuracy", "log_likelihood", "ece", "brier", "params", "dense_params", "ratio", "ranks", "seconds")
"""What every ``result.json`` has."""


def read_record(file: Path, needed: Sequence[str] = (), advice: str = "") -> dict[str, Any]:
    """The JSON object in a file, which must have all that is `needed`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}.{advice}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged: it has no entries.{advice}")
    if missing := [key for key in needed if key not in found]:
        raise ConfigError(f"{file} is damaged: it has no {missing[0]}.{advice}")
    return found


def read_result(folder: Path) -> dict[str, Any]:
    """The ``result.json`` of a finished run."""
    again = (folder / LAST).exists()  # its last checkpoint is that of the end
    advice = " Remove it, then bayestrain train --resume makes it anew." if again else " Train anew with --overwrite."
    return read_record(folder / "result.json", FIGURES, advice)


def commits(folder: Path) -> set[str]:
    """The commits that a run was trained at, one for each part of a run that was stopped."""
    last = read_record(folder / "environment.json")
    earlier = last.get("earlier", [])
    if not isinstance(earlier, list) or not all(isinstance(part, dict) for part in earlier):
        raise ConfigError(f"{folder / 'environment.json'} is damaged: earlier is no list of parts.")
    return {part["commit"] for part in (last, *earlier) if part.get("commit")}
