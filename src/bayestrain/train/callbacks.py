"""What a run reports while it trains: the protocol of callbacks, and the plain lines that `fit` prints."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from bayestrain.compact import CompactReport
    from bayestrain.train.fit import FitResult

STEP_LINES_EVERY = 10.0  # seconds between lines within an epoch


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

    def on_cut(self, report: "CompactReport") -> None:
        """Ranks were cut."""

    def on_message(self, text: str) -> None:
        """A message to show."""

    def on_end(self, result: "FitResult") -> None:
        """Training is over."""


class ProgressPrinter(Callback):
    """Prints a line per epoch, at most one every `every` seconds, with the time left; also when piped."""

    def __init__(self, every: float = 0.5, file: TextIO | None = None) -> None:
        self.every, self.file, self.phase = every, file, ""

    def on_start(self, plan: Plan) -> None:
        self.plan, self.started = plan, time.monotonic()
        each = f"{plan.particles} particles of " * (plan.particles > 1) + self._size(plan.parameters)
        self.on_message(f"training on {plan.num_data:,} examples for {plan.epochs} epochs: {each}")

    def on_step(self, progress: Mapping[str, Any]) -> None:
        if time.monotonic() - self.printed >= STEP_LINES_EVERY:
            epoch, step, steps = progress["epoch"], progress["step"], self.plan.steps_per_epoch
            where = f"epoch {epoch}/{self.plan.epochs}, step {step}/{steps}"
            self.on_message("  ".join([where, *losses(progress), *self._left(epoch - 1 + min(step / steps, 1.0))]))

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        epoch, phase = record["epoch"], record["phase"]
        if epoch == self.plan.epochs or phase != self.phase or time.monotonic() - self.printed >= self.every:
            self.phase, where = phase, f"epoch {epoch}/{self.plan.epochs} ({phase})"
            self.on_message("  ".join([where, *losses(record), self._size(record["parameters"]), *self._left(epoch)]))

    def on_message(self, text: str) -> None:
        self.printed = time.monotonic()
        print(text, file=self.file or sys.stdout, flush=True)

    def _left(self, done: float) -> list[str]:
        """``["0:01:31 left"]`` after so many epochs, or nothing if it is not known yet, or over."""
        new, left = done - self.plan.first_epoch, self.plan.epochs - done
        seconds = (time.monotonic() - self.started) / max(new, 1e-9) * left
        return [f"{timedelta(seconds=round(seconds))} left"] if new > 0 < left else []

    def _size(self, parameters: int) -> str:
        dense = self.plan.dense_parameters
        return f"{parameters:,} parameters" + (f" ({dense / parameters:.3g}x smaller)" if dense > parameters else "")


def losses(record: Mapping[str, Any]) -> list[str]:
    """What a line of progress says about the fit: likelihood and prior apart, then accuracies."""
    found, validation = [], record.get("validation") or {}
    if record["train_loss"] is not None:
        found += [f"likelihood loss {record['train_loss']:.4f}", f"prior loss {record['prior_loss']:.4g}"]
    if record["train_accuracy"] is not None:
        found.append(f"train {100 * record['train_accuracy']:.2f} %")
    if "accuracy" in validation:
        found.append(f"validation {100 * validation['accuracy']:.2f} %")
    elif validation:
        name = "rmse" if "rmse" in validation else next(iter(validation))
        found.append(f"validation {name.replace('_', ' ')} {validation[name]:.4g}")
    return found
