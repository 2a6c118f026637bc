"""The learning rate at any moment, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from bayestrain.train.config import FitConfig


def learning_rate(config: FitConfig, epoch: float) -> float:
    """The rate after `epoch` epochs; a fraction counts steps.

    The fine-tuning has a cosine of its own, from `finetune_lr` to zero, unless the schedule goes on through it.
    """
    tuned = epoch - config.epochs
    if config.finetune_lr and config.finetune_epochs and tuned >= 0:
        return config.finetune_lr * _cosine(tuned / config.finetune_epochs)
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


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
