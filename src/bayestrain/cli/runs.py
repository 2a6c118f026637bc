"""Run folders: where a run goes, and what may be resumed or overwritten."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bayestrain.errors import ConfigError
from bayestrain.train import toml
from bayestrain.train.config import RunConfig, differences
from bayestrain.train.places import LAST, MAP, START

ROOT = Path("runs")
BOARD = "tensorboard"

BEFORE = {"config.toml", "environment.json", START, "history.jsonl"}
"""What a run writes before its first checkpoint: a folder with only these holds no work yet."""
AFTER = {
    LAST,
    "model.safetensors",
    "posterior.safetensors",
    "model.json",
    "evaluation.safetensors",
    "spectra.json",
    "result.json",
    "report.html",
}


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def is_finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def default_folder(config: RunConfig, resume: bool) -> Path:
    """runs/NAME-seedS, with a counter behind it if that is taken; to resume, the latest of these.

    Preset and kind stand in the middle if they are not the default ones.
    """
    experiment = config.experiment
    name = re.sub(r"[^\w.-]+", "-", experiment.name).strip("-.") or "run"
    preset = "" if experiment.preset == "default" else f"-{experiment.preset}"
    kind = "" if experiment.kind == "low-rank" else f"-{experiment.kind}"
    first = ROOT / f"{name}{preset}{kind}-seed{experiment.seed}"
    last, count = first, 1
    while _taken(candidate := first if count == 1 else first.with_name(f"{first.name}-{count}")):
        last, count = candidate, count + 1
    return last if resume else candidate


def check_new(folder: Path, overwrite: bool) -> None:
    """Refuse a folder whose contents a new run would overwrite."""
    if not _taken(folder):
        return
    if not is_run(folder):
        raise ConfigError(f"{folder} is there already and is no run of BayesTrain. Choose another --out.")
    if not overwrite:
        state, way = (
            ("a finished run", "Choose another --out")
            if is_finished(folder)
            else ("an unfinished run", "Go on with it with --resume, choose another --out")
        )
        raise ConfigError(f"{folder} holds {state}. {way}, or say --overwrite to lose it.")


def check_own_config(folder: Path, config_file: Path | None) -> None:
    """Refuse to write a run's complete config over the file that the user wrote."""
    if config_file is not None and config_file.resolve() == (folder / "config.toml").resolve():
        raise ConfigError(f"The run would overwrite your own {config_file}. Choose another --out, or rename it.")


def check_elsewhere(folder: Path, point: Path | None, begins_with: str) -> None:
    """Refuse a MAP point, or a run to go on from, that is not there or that the run would overwrite."""
    needed = [(point, "take the MAP point from")] if point is not None else []
    needed += [(Path(begins_with), "go on from")] if begins_with else []
    for run, use in needed:
        if not run.is_dir():  # before the folder of the run, perhaps the same one, is made
            raise ConfigError(f"There is no run {run} to {use}.")
        if run.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"The run would overwrite {run}, which it is to {use}. Choose another --out.")


def check_begun(folder: Path) -> None:
    if not is_run(folder):
        raise ConfigError(f"There is nothing to resume in {folder}: no run was begun there. Leave --resume out.")


def check_resumable(folder: Path, config: RunConfig) -> None:
    """Refuse to resume what was never begun, or begun with another config."""
    check_begun(folder)
    changed = differences(toml.load(folder / "config.toml"), config)
    if changed:
        raise ConfigError(
            f"{folder} was begun with another config, so it cannot be resumed with this one. It had "
            + "; ".join(changed)
            + f". To go on with the old config: bayestrain train --resume --out {folder}"
        )


def make_writable(folder: Path) -> bool:
    """Make sure that files can be written to the folder; whether it had to be created."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"The output folder {folder} cannot be written: {error.strerror or error}. Choose another with --out."
        ) from None
    return is_new


def first_record(folder: Path) -> dict[str, Any] | None:
    """The first line of a run's history: the network before training."""
    try:
        with (folder / "history.jsonl").open(encoding="utf-8") as history:
            record = json.loads(next(history))
    except (OSError, StopIteration, ValueError):
        return None  # stopped too early
    return record if isinstance(record, dict) else None


def clear(folder: Path) -> None:
    """Remove a run's files, those of its MAP point too, and nothing else."""
    for name in BEFORE | AFTER:
        (folder / name).unlink(missing_ok=True)
    if (board := folder / BOARD).is_dir() and _is_early(board):
        shutil.rmtree(board)
    if (folder / MAP).is_dir():
        clear(folder / MAP)
        if not any((folder / MAP).iterdir()):
            (folder / MAP).rmdir()


def tidy(folder: Path) -> None:
    """Leave no new folder behind of a run that ended before its first checkpoint."""
    if folder.is_dir() and not _taken(folder):
        shutil.rmtree(folder)


def _taken(folder: Path) -> bool:
    """Whether there is something at `folder` that a new run must not touch."""
    if not folder.exists():
        return False
    early = folder.is_dir() and all(_is_early(path) for path in folder.iterdir())
    return not early or (is_run(folder) and not _is_written_by_us(folder / "config.toml"))


def _is_written_by_us(config: Path) -> bool:
    try:
        return config.read_text(encoding="utf-8") == toml.dumps(toml.load(config))
    except (OSError, ValueError):  # unreadable, no text, or not a config of today
        return False


def _is_early(path: Path) -> bool:
    """Whether a run writes this before its first checkpoint; its MAP point is a run of its own."""
    if path.name == BOARD:
        return path.is_dir() and all(file.name.startswith("events.out.tfevents.") for file in path.iterdir())
    if path.name == MAP:
        return (is_run(path) or is_run(path.parent)) and path.is_dir() and not _taken(path)
    return path.name in BEFORE or (path.name.startswith(".") and path.name.endswith(".partial"))
