"""The learning rate at any time, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from bayestrain.train.config import FitConfig


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
    factors = {
        "cosine": _cosine(done),
        "step": config.gamma ** sum(done >= milestone for milestone in config.milestones),
        "constant": 1.0,
    }
    return config.lr * warmup * factors[config.schedule]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
