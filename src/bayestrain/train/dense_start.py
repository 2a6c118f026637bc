"""Dense networks trained first, for tensor trains to start from.

A tensor train learns more slowly than the dense layer it stands for. The first epochs of a budget are better spent on
the dense network; TT-SVD then takes over what it knows, as far as the ranks hold it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bayestrain.sizes import count_parameters
from bayestrain.train.checkpoint import LAST
from bayestrain.train.config import FitConfig, RunConfig
from bayestrain.train.loop import fit
from bayestrain.train.material import Material
from bayestrain.train.progress import Progress, Unfinished

DENSE = "dense"
"""Sub-folder of a run with a folder for each dense network that it started from."""


def dense_settings(settings: FitConfig, epochs: int) -> FitConfig:
    """The loop of a dense network for so many epochs."""
    return dataclasses.replace(
        settings, epochs=epochs, finetune_epochs=0, target_ratio=0.0, lr=settings.dense_lr or settings.lr
    )


def train_dense(
    networks: Sequence[nn.Module], config: RunConfig, material: Material, out: Path, progress: Progress,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Train each of these dense networks for ``fit.dense_epochs``; one that was stopped goes on.

    `options` are those of `fit` for the run itself; the order of the images differs from network to network.
    """
    settings = dense_settings(config.fit, config.fit.dense_epochs)
    which = f"{len(networks)} dense networks" if len(networks) > 1 else "the dense network"
    progress.message(f"first {which}, for {settings.epochs} epochs: the tensor trains start from what it has learned")
    for number, network in enumerate(networks):
        folder = out / DENSE / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        steps = -(-len(material.train) // settings.batch_size)
        progress.start(settings.epochs, steps, config.replace("experiment", kind="dense"), count_parameters(network))
        fit(
            network, material.train, options["evaluate"], settings, prior=config.prior, search=False,
            augment=options["augment"], device=options["device"], seed=config.experiment.seed + 1000 * number,
            folder=folder, resume=(folder / LAST).exists(), progress=Unfinished(progress),
        )  # fmt: skip
        network.cpu()  # for TT-SVD; and particles' dense networks need not all be on a GPU


def dense_seconds(out: Path) -> float:
    """What the dense networks of this run took, in seconds of training."""
    histories = sorted((out / DENSE).glob("*/history.jsonl"))
    return sum(float(json.loads(file.read_text().splitlines()[-1])["seconds"]) for file in histories)


def forget_checkpoints(out: Path) -> None:
    """The dense networks of a finished run are of no more use; their histories stay."""
    for file in (out / DENSE).glob("*/*.pt"):
        file.unlink()
