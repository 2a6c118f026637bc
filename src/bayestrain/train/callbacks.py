"""What a run reports while it trains: the protocol of callbacks, and the plain lines that `fit` prints."""

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
    """What a run is going to do: `epochs` in all, of which a resumed run has done `first_epoch`."""

    epochs: int
    first_epoch: int
    steps_per_epoch: int
    num_data: int
    particles: int
    parameters: int
    dense_parameters: int


class Callback:
    """Base of callbacks: `fit` calls these methods, which do nothing unless overridden. All of them are optional."""

    def on_start(self, plan: Plan) -> None:
        """Training is about to start."""

    def on_step(self, progress: Mapping[str, Any]) -> None:
        """Some steps were taken: epoch, step, lr, and the means of losses and accuracy over the epoch so far."""

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is over: its line of the history. Epoch 0 is the network before training."""

    def on_cut(self, report: CompactReport) -> None:
        """Ranks were cut."""

    def on_message(self, text: str) -> None:
        """A message to show."""

    def on_end(self, result: FitResult) -> None:
        """Training is over."""


class ProgressPrinter(Callback):
    """Prints a line per epoch, at most one every `every` seconds, with the time left; also when piped."""

    def __init__(self, every: float = 0.5, file: TextIO | None = None) -> None:
        self.every, self.file, self.phase = every, file, ""
        self.plan: Plan | None = None
        self.started = self.printed = time.monotonic()

    def on_start(self, plan: Plan) -> None:
        self.plan, self.started = plan, time.monotonic()
        size = f"{plan.parameters:,} parameters{times_smaller(plan.dense_parameters, plan.parameters)}"
        each = f"{plan.particles} particles of {size}" if plan.particles > 1 else size
        self._print(f"training on {plan.num_data:,} data for {plan.epochs} epochs: {each}")

    def on_step(self, progress: Mapping[str, Any]) -> None:
        if self.plan is not None and time.monotonic() - self.printed >= STEP_LINES_EVERY:
            epoch, step, steps = progress["epoch"], progress["step"], self.plan.steps_per_epoch
            where = f"epoch {epoch}/{self.plan.epochs}, step {step}/{steps}"
            self._print("  ".join([where, *losses(progress), *self.left(epoch - 1 + min(step / steps, 1.0))]))

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        if (plan := self.plan) is None:
            return
        last, new = record["epoch"] == plan.epochs, record["phase"] != self.phase
        if last or new or time.monotonic() - self.printed >= self.every:
            self.phase = record["phase"]
            size = f"{record['parameters']:,} parameters{times_smaller(plan.dense_parameters, record['parameters'])}"
            where = f"epoch {record['epoch']}/{plan.epochs} ({record['phase']})"
            self._print("  ".join([where, *losses(record), size, *self.left(record["epoch"])]))

    def on_message(self, text: str) -> None:
        self._print(text)

    def left(self, done: float) -> list[str]:
        """``["1:31 left"]`` after so many epochs, or nothing if it is not known yet, or over."""
        behind = 0.0 if self.plan is None else done - self.plan.first_epoch
        if self.plan is None or behind <= 0 or done >= self.plan.epochs:
            return []
        seconds = (time.monotonic() - self.started) / behind * (self.plan.epochs - done)
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return [f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"]

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
