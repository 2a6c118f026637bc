"""A posterior's MAP point that is there already: a finished run, checked and taken over."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from bayestrain.errors import ConfigError
from bayestrain.files import write_atomically
from bayestrain.saved import DESCRIPTION, WEIGHTS, load_model
from bayestrain.train import toml
from bayestrain.train.config import RunConfig, differences
from bayestrain.train.places import MAP, TAKING
from bayestrain.train.records import FIGURES, read_record
from bayestrain.train.reevaluation import evaluate_run

TAKEN = ("environment.json", "result.json", WEIGHTS, DESCRIPTION)
SHOWN = ("history.jsonl", "spectra.json")
"""Only for the report; what is kept under ``results/`` is without them."""


def check_point(config: RunConfig, run: Path, out: Path | None = None) -> None:
    """Refuse a run that is not the finished MAP point of a posterior's settings, or not the one that `out` has."""
    if not config.posterior.particles:
        raise ConfigError("A MAP point that is there already is for a posterior: say how many --particles it has.")
    if not config.posterior.compare_map and config.posterior.start != "jitter":
        raise ConfigError("posterior.compare_map=false leaves the MAP point out, so none can be given.")
    if not run.is_dir():
        raise ConfigError(f"There is no run {run} to take the MAP point from.")
    there = (run / "config.toml").is_file()
    if there and toml.load(run / "config.toml").posterior.particles:
        raise ConfigError(f"{run} holds a posterior; its MAP point, if it has one, is {run / MAP}.")
    if missing := [name for name in ("config.toml", *TAKEN) if not (run / name).is_file()]:
        raise ConfigError(f"{run} cannot be the MAP point: it has no {missing[0]}, so it is no complete, finished run.")
    had = toml.load(run / "config.toml")
    if changed := differences(dataclasses.replace(had, posterior=config.posterior), config):
        raise ConfigError(f"The run in {run} is not the MAP point of these settings ({'; '.join(changed)}).")
    for name in ("environment.json", "spectra.json", "result.json"):  # what is damaged is found before anything is done
        if (run / name).exists():
            read_record(run / name, FIGURES if name == "result.json" else ())
    load_model(run)
    if out is not None and (out / MAP / "result.json").exists() and not _same_weights(run, out / MAP):
        raise ConfigError(f"{out} has a MAP point already, and it is not that of {run}. Resume without it.")


def take_over(config: RunConfig, run: Path, out: Path, device: str, command: str) -> None:
    """Copy a finished run into `out` as its MAP point, and see what it says of the outside images, new to it."""
    scratch, place = out / TAKING, out / MAP
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for name in (*TAKEN, *SHOWN):
        if (run / name).exists():
            write_atomically(scratch / name, (run / name).read_bytes())
    toml.save(config.replace("posterior", particles=0), scratch / "config.toml")
    evaluate_run(scratch, device=device, command=command, with_outside=True)
    shutil.rmtree(place, ignore_errors=True)  # one that was begun
    scratch.rename(place)


def _same_weights(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / WEIGHTS) for folder in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
