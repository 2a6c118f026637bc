"""The learning rate at any moment, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from bayestrain.train.config import FitConfig

ARRIVED = 0.8
"""Part of the search after which a network that has a target should have its size."""


def learning_rate(config: FitConfig, epoch: float, search_ended: int | None = None) -> float:
    """The rate after `epoch` epochs; a fraction counts steps.

    The fine-tuning has a cosine of its own, from `finetune_lr` to zero, unless the schedule goes on through it. It
    begins when the search was over, if that was earlier than planned.
    """
    begins = config.epochs if search_ended is None else search_ended
    tuned, length = epoch - begins, config.epochs + config.finetune_epochs - begins
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


def wanted_ratio(config: FitConfig, epoch: float, start: float) -> float:
    """How many times smaller than dense the network should be after `epoch` epochs, on its way to the target.

    From the `start` at the first cut it grows by the same factor each epoch, and is the target when most of the search
    is over.
    """
    last = ARRIVED * config.epochs
    done = min(max((epoch - config.compact_from) / max(last - config.compact_from, 1.0), 0.0), 1.0)
    return float(start * (config.target_ratio / start) ** done) if done < 1 else config.target_ratio


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def steps_per_epoch(images: int, batch_size: int) -> int:
    """Batches of a pass over the training images."""
    return math.ceil(images / batch_size) - leaves_one(images, batch_size)


def leaves_one(images: int, batch_size: int) -> bool:
    """Whether the last batch would be a single image, of which batch norm learns nothing: it is left out then."""
    return images % batch_size == 1 and images > batch_size > 1
