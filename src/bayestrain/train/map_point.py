"""A posterior's MAP point that is there already: a finished run, checked and taken over."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from bayestrain.errors import ConfigError
from bayestrain.files import write_atomically
from bayestrain.saved import WEIGHTS
from bayestrain.train import toml
from bayestrain.train.config import RunConfig, differences
from bayestrain.train.finished import PARTS, check_finished
from bayestrain.train.places import MAP, TAKING
from bayestrain.train.reevaluation import evaluate_run

SHOWN = ("history.jsonl", "spectra.json")
"""Only for the report; what is kept under ``results/`` is without them."""


def check_point(config: RunConfig, run: Path, out: Path | None = None) -> None:
    """Refuse a run that is not the finished MAP point of a posterior's settings, or not the one that `out` has."""
    if not config.posterior.particles:
        raise ConfigError("A MAP point that is there already is for a posterior: say how many --particles it has.")
    if not config.posterior.compare_map and config.posterior.start != "jitter":
        raise ConfigError("posterior.compare_map=false leaves the MAP point out, so none can be given.")
    had = check_finished(run, "take the MAP point from")  # what is damaged is found before anything is done
    had = had.replace("experiment", from_run="")  # how it came about does not matter
    if changed := differences(dataclasses.replace(had, posterior=config.posterior), config):
        raise ConfigError(f"The run in {run} is not the MAP point of these settings ({'; '.join(changed)}).")
    if out is not None and (out / MAP / "result.json").exists() and not _same_weights(run, out / MAP):
        raise ConfigError(f"{out} has a MAP point already, and it is not that of {run}. Resume without it.")


def take_over(config: RunConfig, run: Path, out: Path, device: str, command: str) -> None:
    """Copy a finished run into `out` as its MAP point, and see what it says of the outside images, new to it."""
    scratch, place = out / TAKING, out / MAP
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for name in (*PARTS, *SHOWN):
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
