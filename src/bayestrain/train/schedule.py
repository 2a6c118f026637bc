"""The learning rate at any moment, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from bayestrain.train.config import FitConfig


def learning_rate(config: FitConfig, epoch: float) -> float:
    """The rate after `epoch` epochs (a fraction counts steps) of the rank search."""
    warmup = min(1.0, epoch / config.lr_warmup_epochs) if config.lr_warmup_epochs else 1.0
    done = min(epoch / config.epochs, 1.0)
    if config.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * done))
    elif config.schedule == "step":
        factor = config.gamma ** sum(done >= milestone for milestone in config.milestones)
    else:
        factor = 1.0
    return config.lr * warmup * factor


def finetune_rate(config: FitConfig, epoch: float) -> float:
    """The rate after `epoch` epochs of the fine-tuning: from its start to zero along a cosine."""
    return config.finetune_lr * 0.5 * (1 + math.cos(math.pi * min(epoch / config.finetune_epochs, 1.0)))
