"""A run that begins with the network of a finished one, as a rule to make it smaller still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from bayestrain.errors import ConfigError
from bayestrain.files import write_json
from bayestrain.saved import load_model
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.finished import check_finished
from bayestrain.train.places import START
from bayestrain.train.records import commits, read_record, read_result
from bayestrain.train.settings import shown

SAME = (
    "experiment.model", "experiment.seed", "data.name", "data.normalize", "data.validation_fraction",
    "tensorize.max_rank", "tensorize.keep_dense", "tensorize.modes",
)  # fmt: skip
"""What two trainings of one network share. The seed chose the held-out images: with another, they were trained on."""

KINDS = {"low-rank": ("low-rank", "tensorized"), "tensorized": ("tensorized",), "dense": ("dense",)}
"""The kinds of networks that a run of each kind can begin with."""


def check_from_run(config: RunConfig) -> None:
    """Refuse a run whose network cannot be trained further with this config."""
    run = Path(config.experiment.from_run)
    had = check_finished(run, "go on from")
    before, after = had.to_dict(), config.to_dict()
    pairs = [(key, *(settings[section][name] for settings in (before, after)))
             for key in SAME for section, name in [key.split(".")]]  # fmt: skip
    if other := [f"{key}: {shown(old)}, now {shown(new)}" for key, old, new in pairs if old != new]:
        raise ConfigError(
            f"The network of {run} had other settings ({'; '.join(other)}). Give those that it had; its seed (--seed "
            f"{had.experiment.seed}) chose the images that are held out."
        )
    kind, old = config.experiment.kind, had.experiment.kind
    if old not in KINDS[kind]:
        raise ConfigError(f"{run} is {old}: a run that is {kind} can go on from {' or '.join(KINDS[kind])} ones.")
    _note(run)  # what is damaged is found before anything is done


def begin(config: RunConfig, out: Path) -> nn.Module:
    """The network to begin with, after noting in `out` where it comes from and how long it has been trained."""
    run = Path(config.experiment.from_run)
    write_json(out / START, _note(run))
    return load_model(run)


def _note(run: Path) -> dict[str, Any]:
    had, result = toml.load(run / "config.toml").fit, read_result(run)
    earlier = result.get("from_run") or {}
    if not isinstance(earlier, dict):
        raise ConfigError(f"{run / 'result.json'} is damaged: from_run is {earlier!r}.")
    return {
        "run": str(run),
        "epochs": had.epochs + had.finetune_epochs + earlier.get("epochs", 0),
        **{key: result[key] for key in ("params", "ratio", "accuracy", "log_likelihood")},
        "seconds": result["seconds"] + earlier.get("seconds", 0.0),
        "commits": sorted({*commits(run), *earlier.get("commits", [])}),
    }


def noted(out: Path) -> dict[str, Any]:
    """What `begin` noted, without which nobody would know where the network came from."""
    advice = " Begin anew with --overwrite."
    if not (out / START).exists():
        raise ConfigError(f"{out / START}, which says what the run went on from, is missing.{advice}")
    return read_record(out / START, ("run", "epochs", "seconds"), advice)
