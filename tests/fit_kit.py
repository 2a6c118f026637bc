"""What tests of training loops share: short settings, an augmentation, and somebody who presses Ctrl-C."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import bayestrain as bt
from bayestrain import data
from bayestrain.train.progress import Silent


def settings(**changes: Any) -> bt.FitConfig:
    """Six epochs that cut ranks."""
    common = {"epochs": 4, "batch_size": 100, "lr": 1e-2, "compact_from": 1, "compact_every": 1, "compact_tol": 0.3}
    return bt.FitConfig(**{**common, "finetune_epochs": 2, "round_tol": 0.3, **changes})


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    return data.shift(images, 1, generator)


class StopAfter(Silent):
    """Presses Ctrl-C after some epochs."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float) -> None:  # noqa: ARG002
        if epoch > self.last:
            raise KeyboardInterrupt
