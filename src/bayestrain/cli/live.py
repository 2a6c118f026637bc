"""Progress in a terminal: two bars, the numbers, and the ranks shrinking in a small table.

The training loop only stores numbers here; a thread of rich's draws them a few times a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bayestrain.cli.screen import closing_lines, duration, inner, percent
from bayestrain.train.config import RunConfig

BAR = 30
GAUGE = 20
MANY_LAYERS = 12
"""Rows of the rank table at the end."""
OTHER_LINES = 12
"""Lines of the view beside the rows of the rank table."""


class LiveView:
    """A `Progress` that draws. Use it in a `with`, which gives the terminal back whatever happens."""

    def __init__(self, console: Console, first: Mapping[str, Any] | None = None) -> None:
        self.console = console
        self.title = ""
        self.total_epochs = self.steps_per_epoch = self.dense_params = 1
        self.epochs_done = self.steps_done = self.epochs_before = 0
        self.began = time.monotonic()
        self.loss = self.accuracy = self.validation = float("nan")
        self.ranks_at_start: Mapping[str, list[int]] = first["ranks"] if first else {}
        self.params_at_start: int = first["params"] if first else 0
        self.ranks, self.params = self.ranks_at_start, self.params_at_start
        self.finetuning = False
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=6, transient=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live.is_started:
            self.live.transient = kind is None  # the last state stays on the screen when the run was stopped
            self.live.stop()

    def start(self, total_epochs: int, steps_per_epoch: int, config: RunConfig, dense_params: int) -> None:
        self.total_epochs, self.steps_per_epoch, self.dense_params = total_epochs, steps_per_epoch, dense_params
        experiment = config.experiment
        preset = "" if experiment.preset == "default" else f", preset {experiment.preset}"
        kind = "" if experiment.kind == "low-rank" else f", {experiment.kind}"
        self.title = f"{experiment.name}{kind}{preset}, seed {experiment.seed}"
        if config.posterior.particles:
            self.title += f", {config.posterior.particles} particles by {config.posterior.method}"
        self.began = time.monotonic()
        if self.live.is_started:  # a second part of the same run: everything from the start
            self.epochs_done = self.steps_done = self.epochs_before = 0
            self.ranks_at_start, self.params_at_start, self.finetuning = {}, 0, False
        self.live.start()

    def step(self, epoch: int, step: int, loss: float, accuracy: float, lr: float) -> None:  # noqa: ARG002
        if not self.steps_done and not self.epochs_done:
            self.epochs_done = self.epochs_before = epoch - 1  # more than 0 when resumed
        self.steps_done, self.loss, self.accuracy = step, loss, accuracy

    def epoch(self, record: Mapping[str, Any]) -> None:
        if not self.ranks_at_start:
            self.ranks_at_start, self.params_at_start = record["ranks"], record["params"]
        self.epochs_done, self.steps_done = record["epoch"], 0
        self.ranks, self.params = record["ranks"], record["params"]
        self.finetuning = record["phase"] == "finetune"
        if record["train_loss"] is not None:
            self.loss, self.accuracy = record["train_loss"], record["train_accuracy"]
        if record["validation"] is not None:
            self.validation = record["validation"]["accuracy"]

    def message(self, text: str) -> None:
        self.console.print(Text(text))

    def finish(self, result: Mapping[str, Any]) -> None:
        self.live.stop()
        table = Table.grid(padding=(0, 2))
        for word, value in closing_lines(result):
            if word == "ranks":
                continue  # they are in the other table
            table.add_row(
                Text(word, style="dim"), Text(value, style="bold" if word in ("accuracy", "parameters") else "")
            )
        self.console.print(Group(Text(self.title, style="bold"), self.rank_table(MANY_LAYERS), table))

    def picture(self) -> RenderableType:
        """The whole view as it stands now."""
        return Group(
            Text(self.title + (", fine-tuning" if self.finetuning else ""), style="bold"),
            self.bars(),
            self.numbers(),
            self.rank_table(max(self.console.height - OTHER_LINES, 3)),
        )

    def bars(self) -> Table:
        elapsed = time.monotonic() - self.began
        done = (self.epochs_done - self.epochs_before) + self.steps_done / self.steps_per_epoch
        left = self.total_epochs - self.epochs_before - done
        remaining = f"{duration(elapsed / done * left)} left" if done else ""
        table = Table.grid(padding=(0, 2))
        rows = (
            ("epochs", self.epochs_done, self.total_epochs, remaining),
            ("steps", self.steps_done, self.steps_per_epoch, f"{duration(elapsed)} so far"),
        )
        for word, completed, total, note in rows:
            bar = ProgressBar(total=total, completed=completed, width=BAR)
            table.add_row(word, bar, f"{completed:,}/{total:,}", Text(note, style="dim"))
        return table

    def numbers(self) -> Text:
        text = Text()
        for word, value in (("loss", self.loss), ("accuracy", self.accuracy), ("validation", self.validation)):
            if value == value:  # not NaN: known
                text.append(f"{word} ", style="dim")
                text.append(f"{f'{value:.4f}' if word == 'loss' else percent(value)}   ", style="bold")
        if self.params:
            text.append("\nparameters ", style="dim")
            text.append(f"{self.params:,}", style="bold green")
            if self.ranks:
                text.append(f" of {self.params_at_start:,} at the start, {self.dense_params:,} dense: ", style="dim")
                text.append(f"{self.dense_params / self.params:.1f}x smaller", style="bold green")
        return text

    def rank_table(self, rows: int) -> RenderableType:
        """The ranks of at most `rows` layers against those at the start."""
        if not self.ranks:
            return Text("" if self.params else "preparing ...", style="dim")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for header in ("layer", "ranks at the start", "ranks now", ""):
            table.add_column(header, no_wrap=True)
        for name, now in list(self.ranks.items())[:rows]:
            before = self.ranks_at_start.get(name, now)
            table.add_row(name, Text(inner(before), style="dim"), Text(inner(now), style="bold"), gauge(now, before))
        hidden = len(self.ranks) - rows
        return Group(table, Text(f"and {hidden} layers more", style="dim")) if hidden > 0 else table


def gauge(now: list[int], before: list[int]) -> Text:
    """A bar that shrinks with the sum of a layer's ranks."""
    filled = round(GAUGE * sum(now[1:-1]) / max(sum(before[1:-1]), 1))
    return Text("━" * filled, style="green") + Text("━" * (GAUGE - filled), style="bright_black")
