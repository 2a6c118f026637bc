"""What a run tells about itself: the protocol of callbacks, and the plain lines that `fit` prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from bayestrain.compact import CompactReport
    from bayestrain.train.fit import FitResult

STEP_LINES_EVERY = 10.0
"""Seconds between lines within an epoch."""


@dataclass(frozen=True)
class Plan:
    """What a run is going to do."""

    epochs: int
    """All of them, fine-tuning included."""
    first_epoch: int
    """The epochs that are behind a resumed run; 0 for a new one."""
    steps_per_epoch: int | None
    """None if the data do not tell."""
    num_data: int
    particles: int
    parameters: int
    dense_parameters: int


@dataclass(frozen=True)
class Progress:
    """Where a run is within an epoch; losses and accuracy are means over the epoch so far."""

    epoch: int
    step: int
    train_loss: float
    prior_loss: float
    train_accuracy: float | None
    lr: float


class Callback:
    """Base of callbacks: `fit` calls these methods, which do nothing unless overridden. All of them are optional."""

    def on_start(self, plan: Plan) -> None:
        """Training is about to start."""

    def on_step(self, progress: Progress) -> None:
        """Some steps were taken; not called after every one."""

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is over: its line of the history. Epoch 0 is the network before training."""

    def on_cut(self, report: CompactReport) -> None:
        """Ranks were cut."""

    def on_message(self, text: str) -> None:
        """Something worth a line."""

    def on_end(self, result: FitResult) -> None:
        """Training is over."""


class ProgressPrinter(Callback):
    """Prints a line per epoch, at most one every `every` seconds, with the time left; also when piped."""

    def __init__(self, every: float = 0.5, file: TextIO | None = None) -> None:
        self.every, self.file = every, file
        self.plan: Plan | None = None
        self.printed = self.epoch_started = time.monotonic()
        self.per_epoch: float | None = None
        self.phase = ""

    def on_start(self, plan: Plan) -> None:
        self.plan, self.epoch_started = plan, time.monotonic()
        size = f"{plan.parameters:,} parameters{times_smaller(plan.dense_parameters, plan.parameters)}"
        each = f"{plan.particles} particles of {size}" if plan.particles > 1 else size
        self._print(f"training on {plan.num_data:,} data for {plan.epochs} epochs: {each}")

    def on_step(self, progress: Progress) -> None:
        if self.plan is None or time.monotonic() - self.printed < STEP_LINES_EVERY:
            return
        steps, spent = self.plan.steps_per_epoch, time.monotonic() - self.epoch_started
        per_epoch = spent * steps / progress.step if steps else self.per_epoch
        left = None if per_epoch is None else per_epoch * (self.plan.epochs - progress.epoch + 1) - spent
        of = f"/{steps}" if steps else ""
        where = f"epoch {progress.epoch}/{self.plan.epochs}, step {progress.step}{of}"
        self._print("  ".join([where, *losses(vars(progress)), *time_left(left)]))

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        now, plan = time.monotonic(), self.plan
        if plan is None:
            return
        spent, self.epoch_started = now - self.epoch_started, now
        if record["epoch"]:
            self.per_epoch = spent if self.per_epoch is None else 0.5 * (self.per_epoch + spent)
        last, new = record["epoch"] == plan.epochs, record["phase"] != self.phase
        if not (last or new or now - self.printed >= self.every):
            return
        self.phase = record["phase"]
        left = None if self.per_epoch is None or last else self.per_epoch * (plan.epochs - record["epoch"])
        size = f"{record['parameters']:,} parameters{times_smaller(plan.dense_parameters, record['parameters'])}"
        where = f"epoch {record['epoch']}/{plan.epochs} ({record['phase']})"
        self._print("  ".join([where, *losses(record), size, *time_left(left)]))

    def on_message(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self.printed = time.monotonic()
        print(text, file=self.file or sys.stdout, flush=True)


def losses(record: Mapping[str, Any]) -> list[str]:
    """What a line of progress says about the fit: likelihood and prior apart, then accuracies."""
    found = []
    if record["train_loss"] is not None:
        found += [f"likelihood loss {record['train_loss']:.4f}", f"prior loss {record['prior_loss']:.4g}"]
    if record["train_accuracy"] is not None:
        found.append(f"train {100 * record['train_accuracy']:.2f} %")
    validation = record.get("validation") or {}
    if "accuracy" in validation:
        found.append(f"validation {100 * validation['accuracy']:.2f} %")
    elif validation:
        name = "rmse" if "rmse" in validation else next(iter(validation))
        found.append(f"validation {name.replace('_', ' ')} {validation[name]:.4g}")
    return found


def times_smaller(dense: int, parameters: int) -> str:
    """How much smaller than the dense network, in brackets; nothing for a dense one."""
    return f" ({dense / parameters:.3g}x smaller)" if dense > parameters else ""


def time_left(seconds: float | None) -> list[str]:
    """``["1:31 left"]``, or nothing if it is not known yet."""
    if seconds is None:
        return []
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return [f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"]
