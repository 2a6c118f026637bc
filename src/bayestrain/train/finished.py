"""Finished runs that another run builds on: what is needed of one is there and whole, or it is refused."""

from __future__ import annotations

from pathlib import Path

from bayestrain.errors import ConfigError
from bayestrain.saved import DESCRIPTION, WEIGHTS, load_model
from bayestrain.train import toml
from bayestrain.train.config import RunConfig
from bayestrain.train.places import MAP
from bayestrain.train.records import FIGURES, read_record

PARTS = ("environment.json", "result.json", WEIGHTS, DESCRIPTION)
"""What every finished run of one network has beside its config; so has what is kept under ``results/``."""


def check_finished(run: Path, use: str) -> RunConfig:
    """The config of a finished run of one network, all of whose files can be read; `use` is what it is wanted for."""
    if not run.is_dir():
        raise ConfigError(f"There is no run {run} to {use}.")
    config = toml.load(run / "config.toml") if (run / "config.toml").is_file() else None
    if config is not None and config.posterior.particles:
        raise ConfigError(f"{run} holds a posterior; its MAP point, if it has one, is {run / MAP}.")
    missing = [name for name in ("config.toml", *PARTS) if not (run / name).is_file()]
    if config is None or missing:
        raise ConfigError(
            f"{run} is no complete, finished run to {use}: it has no {missing[0]}. If it "
            f"was stopped: bayestrain train --resume --out {run}"
        )
    for name in ("environment.json", "spectra.json", "result.json"):
        if (run / name).exists():
            read_record(run / name, FIGURES if name == "result.json" else ())
    load_model(run)
    return config
