"""Progress as plain lines, for logs and pipes: no control characters, one line per epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayestrain.cli.screen import closing_lines, duration, inner, percent
from bayestrain.train.config import RunConfig

FEW_LAYERS = 4


class PlainLines:
    """A `Progress` that prints."""

    def start(self, total_epochs: int, steps_per_epoch: int, config: RunConfig, dense_params: int) -> None:
        self.total_epochs, self.dense_params = total_epochs, dense_params
        experiment = config.experiment
        particles = config.posterior.particles
        many = f"{particles} particles by {config.posterior.method}, " if particles else ""
        self.message(
            f"{experiment.name} ({experiment.kind}, preset {experiment.preset}, seed {experiment.seed}): "
            f"{many}{total_epochs} epochs of {steps_per_epoch} steps, {dense_params:,} parameters when dense"
        )

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float) -> None:
        pass

    def epoch(self, record: Mapping[str, Any]) -> None:
        parts = [f"epoch {record['epoch']:>3}/{self.total_epochs}"]
        if record["train_loss"] is not None:
            parts += [f"loss {record['train_loss']:.4f}", f"train {percent(record['train_accuracy'])}"]
        if record["validation"] is not None:
            parts.append(f"validation {percent(record['validation']['accuracy'])}")
        if record["ranks"]:
            parts.append(f"{record['params']:,} parameters ({self.dense_params / record['params']:.1f}x)")
            parts.append(ranks_in_short(record["ranks"]))
        if record["phase"] == "finetune":
            parts.append("fine-tuning")
        parts.append(duration(record["seconds"]))
        self.message("  ".join(parts))

    def message(self, text: str) -> None:
        print(text, flush=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        for word, value in closing_lines(result):
            self.message(f"{word + ':':<16}{value}")


def ranks_in_short(ranks: Mapping[str, list[int]]) -> str:
    """The ranks of a few layers, or the mean rank of many."""
    if len(ranks) <= FEW_LAYERS:
        return "ranks " + ", ".join(f"{name}: {inner(row)}" for name, row in ranks.items())
    bonds = [rank for row in ranks.values() for rank in row[1:-1]]
    return f"mean rank {sum(bonds) / max(len(bonds), 1):.1f}"
