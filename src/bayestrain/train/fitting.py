"""`fit` and `fit_posterior`: the training loop for a network or a posterior, in one call.

A user with a loop of their own needs none of this; see the README.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.data import Images
from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.infer import Kernel
from bayestrain.posterior import Posterior
from bayestrain.prior import Prior
from bayestrain.sizes import tt_layers
from bayestrain.speed import plan_report
from bayestrain.train.arithmetic import lowered, products
from bayestrain.train.checkpoint import check_settings
from bayestrain.train.config import IMMATERIAL, FitConfig, PriorConfig
from bayestrain.train.loop import Augment, Evaluate, FitResult, Loop
from bayestrain.train.metrics import check_labels
from bayestrain.train.particles import ParticleSubject
from bayestrain.train.places import LAST
from bayestrain.train.point import Loss, Point
from bayestrain.train.progress import Progress, Silent
from bayestrain.train.schedule import steps_per_epoch
from bayestrain.train.subject import make_optimizer, make_prior

PROBE = 64
"""Inputs on which a posterior's outputs are looked at after each epoch."""


def fit(
    model: nn.Module,
    train: Images,
    evaluate: Evaluate | None,
    config: FitConfig,
    *,
    prior: PriorConfig | None = None,
    search: bool = True,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
    device: torch.device | str = "cpu",
    seed: int = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> FitResult:
    """Train a tensorised model in place until it is small and good.

    Args:
        model: a model with TT layers; any model without a `search`.
        train: training images; they go through `augment` as floats in [0, 1], on `device`.
        evaluate: called before the first epoch and after each with the model, in evaluation mode; returns a dict of
            validation metrics. Never give it the test set.
        config, prior: the settings of the loop and of the prior.
        search: whether ranks are sought. If not, every weight has the prior Normal(0, ``prior.other_variance``) and
            nothing is cut.
        augment: ``augment(images, generator)``: normalisation and augmentation of one batch; on a GPU of many batches
            at once (`Images.batches`).
        loss: mean loss of a batch; its outputs' largest entry counts as the predicted class in the progress.
        folder: where checkpoints and ``history.jsonl`` go; none are written without it.
        resume: go on from the last checkpoint in `folder`, with the same settings. On a CPU the result is the same,
            bit for bit.
        progress: who watches.
    """
    place, settings, seed = torch.device(device), prior or PriorConfig(), index(seed)
    _check_train(train)
    common = _common(config, settings, search, seed, train, trains="a network")
    _check_folder(folder, config, resume, common)
    x, _ = _first_batch(train, config, augment, place, seed)
    if loss is F.cross_entropy:  # what labels another loss takes, it knows itself
        with products(config.precision, place), lowered(config.precision, place):
            check_labels(model.to(place), x, train.labels)
    subject = Point(model, config, settings, loss, len(train), place, search)
    watcher = progress or Silent()
    run = Loop(subject, train, evaluate, config, augment, place, seed, folder, watcher, common)
    with products(config.precision, place), lowered(config.precision, place):
        if tt_layers(model):
            watcher.message(plan_report(model, subject.arrange(x), training=True).verdict())
    return run.run(resume)


def fit_posterior(
    models: Sequence[nn.Module],
    train: Images,
    evaluate: Evaluate | None,
    config: FitConfig,
    *,
    method: str = "svgd",
    kernel: Kernel | None = None,
    temperature: float | None = None,
    chunk: int | None = None,
    prior: PriorConfig | None = None,
    search: bool = True,
    augment: Augment | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[Posterior, FitResult]:
    """Train a posterior of classifiers that start at `models`; what is not told of here is as for `fit`.

    Args:
        evaluate: is called with the `Posterior`.
        method, kernel, chunk: as for `Posterior`.
        temperature: for "sgld", which is its own optimiser: 1 (default) samples the posterior, less a sharper one.
    """
    place, settings, seed = torch.device(device), prior or PriorConfig(), index(seed)
    _check_train(train)
    models, steps = list(models), steps_per_epoch(len(train), config.batch_size)
    common = _common(
        config, settings, search, seed, train, trains="a posterior", particles=len(models), method=method,
        kernel=None if kernel is None else getattr(kernel, "__name__", repr(kernel)), temperature=temperature,
    )  # fmt: skip
    _check_folder(folder, config, resume, common)
    x, y = _first_batch(train, config, augment, place, seed)
    for model in models[:1]:
        with products(config.precision, place), lowered(config.precision, place):
            check_labels(model.to(place), x, train.labels)

    def one_prior(model: nn.Module) -> Prior:
        return make_prior(settings, model, len(train), steps, search=search)

    def optimizer(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return make_optimizer(config, named, config.lr, model=models[0], capturable=place.type == "cuda")

    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    if method == "sgld":
        options |= {"lr": config.lr, "memory": 0.99, "seed": seed}
    particles = Posterior(
        [model.to(place) for model in models], len(train), method=method, prior=one_prior, kernel=kernel, chunk=chunk,
        optimizer=None if method == "sgld" else optimizer, clip=config.clip_norm or None, **options,
    )  # fmt: skip
    watcher = progress or Silent()
    watcher.message(f"{particles.estimate_memory(x, y)}")
    subject = ParticleSubject(particles, config, settings, probe=x[:PROBE])
    run = Loop(subject, train, evaluate, config, augment, place, seed, folder, watcher, common)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ParticleWarning)  # the run tells of broken particles in its own way
        return particles, run.run(resume)


def _check_folder(
    folder: Path | str | None, config: FitConfig, resume: bool, common: dict[str, Any]
) -> None:  # fmt: skip
    """Before anything is changed: a folder where one is needed, the same settings as before, never another run's."""
    if folder is None:
        if resume or config.tensorboard:
            raise ConfigError("resume and fit.tensorboard need the folder of a run. Give folder=.")
    elif resume:
        check_settings(Path(folder), common)
    elif (Path(folder) / LAST).exists():
        raise ConfigError(f"{folder} already holds a run. Go on with resume=True, or give another folder.")


def _common(
    config: FitConfig, prior: PriorConfig, search: bool, seed: int, train: Images, **others: Any
) -> dict[str, Any]:
    """What a run has in common with the one that it goes on from, as JSON would have it."""
    fitted = {key: value for key, value in asdict(config).items() if f"fit.{key}" not in IMMATERIAL}
    priors = {f"prior.{key}": value for key, value in asdict(prior).items()}
    common = {**others, **fitted, **priors, "search": bool(search), "seed": seed, "number of images": len(train)}
    found: dict[str, Any] = json.loads(json.dumps(common))
    return found


def _check_train(train: Images) -> None:
    if not isinstance(train, Images):
        raise ConfigError(f"train must be bayestrain.data.Images(images, labels), got a {type(train).__name__}.")
    if len(train) == 0:
        raise ConfigError("There are no training images.")


def _first_batch(
    train: Images, config: FitConfig, augment: Augment | None, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    x, y = next(train.batches(config.batch_size, shuffle=False, device=device))
    return x if augment is None else augment(x, torch.Generator(device).manual_seed(seed)), y
