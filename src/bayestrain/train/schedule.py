"""Learning rate and size at any time, as pure functions: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from bayestrain.train.config import FitConfig

ARRIVED = 0.8
"""Fraction of the search after which a network with a target size should have that size."""


def learning_rate(config: FitConfig, epoch: float, search_ended: int | None = None) -> float:
    """The rate after `epoch` epochs; a fraction counts steps.

    Fine-tuning has a cosine of its own, from `finetune_lr` to zero, unless the schedule continues through it. It starts
    when the search has ended, which may be earlier than planned.
    """
    start = config.epochs if search_ended is None else search_ended
    tuned, length = epoch - start, config.epochs + config.finetune_epochs - start
    if config.finetune_lr and length and tuned >= 0:
        return config.finetune_lr * _cosine(tuned / length)
    length = config.epochs if config.finetune_lr else config.epochs + config.finetune_epochs
    warmup = min(1.0, epoch / config.lr_warmup_epochs) if config.lr_warmup_epochs else 1.0
    done = min(epoch / length, 1.0)
    if config.schedule == "cosine":
        factor = _cosine(done)
    elif config.schedule == "step":
        factor = config.gamma ** sum(done >= milestone for milestone in config.milestones)
    else:
        factor = 1.0
    return config.lr * warmup * factor


def wanted_parameters(config: FitConfig, epoch: float, start: int, target: int) -> int:
    """The parameters that a network on its way to `target` should have after `epoch` epochs.

    From the `start` at the first cut they shrink by the same factor each epoch and reach the target when most of the
    search is over.
    """
    last = ARRIVED * config.epochs
    done = min(max((epoch - config.first_cut) / max(last - config.first_cut, 1.0), 0.0), 1.0)
    return target if done == 1 else math.floor(start * (target / start) ** done)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
