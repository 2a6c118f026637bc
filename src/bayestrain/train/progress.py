"""What a run tells about itself while it goes on. The command line shows it; a program may listen too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bayestrain.train.config import RunConfig


class Progress(Protocol):
    """Someone who watches a run. Calls come in the order of the methods; `message` at any time."""

    def start(self, total_epochs: int, steps_per_epoch: int, config: RunConfig, dense_params: int) -> None:
        """Training begins; `total_epochs` counts the fine-tuning too."""

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float) -> None:
        """Step `step` (from 1) of epoch `epoch` (from 1) is done; loss and accuracy are means over the epoch so far."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is done: its line of history.jsonl. Epoch 0 is the network before training."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run is done: its result.json."""


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, total_epochs: int, steps_per_epoch: int, config: RunConfig, dense_params: int) -> None:
        pass

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float) -> None:
        pass

    def epoch(self, record: Mapping[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self, result: Mapping[str, Any]) -> None:
        pass


class Unfinished:
    """Hands everything on but the end: for a run that is only a part of another."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.step, self.epoch, self.message = (
            progress.start, progress.step, progress.epoch, progress.message,
        )  # fmt: skip

    def finish(self, result: Mapping[str, Any]) -> None:
        pass
