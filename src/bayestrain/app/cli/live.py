"""Progress on stdout: a line per epoch, and in a terminal a bar with the time left below them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bayestrain.app.cli.screen import ranks_in_short
from bayestrain.train.callbacks import Callback, Plan, ProgressPrinter


class Bar(ProgressPrinter):
    """The lines of `ProgressPrinter` above a bar, which a thread of rich's draws a few times a second."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(30), TimeElapsedColumn(), note)
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("preparing", total=None, note="")
        self.ranks = ""

    def on_start(self, plan: Plan) -> None:
        super().on_start(plan)
        self.bar.update(self.task, total=plan.epochs, completed=plan.first_epoch)
        self.bar.start()

    def on_step(self, progress: Mapping[str, Any]) -> None:
        if self.plan is not None:
            self._move(progress["epoch"] - 1 + min(progress["step"] / self.plan.steps_per_epoch, 1.0))

    def on_epoch(self, record: Mapping[str, Any]) -> None:
        super().on_epoch(record)
        self.ranks = ranks_in_short(record["ranks"])
        self._move(record["epoch"])

    def _move(self, done: float) -> None:
        if self.plan is None:
            return
        epoch = f"epoch {min(int(done) + 1, self.plan.epochs)}/{self.plan.epochs}"
        self.bar.update(self.task, completed=done, description=epoch, note="  ".join([*self.left(done), self.ranks]))

    def _print(self, text: str) -> None:
        self.printed = time.monotonic()
        self.bar.console.print(Text(text))


@contextmanager
def shown_progress(silent: bool) -> Iterator[list[Callback]]:
    """Callbacks that show a run on stdout, or none. What the package logs, such as downloads, is shown too."""
    if silent:
        yield []
        return
    console = Console()
    view = Bar(console) if console.is_terminal else ProgressPrinter()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: view.on_message(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bayestrain")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield [view]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        if isinstance(view, Bar):
            view.bar.stop()  # gives the terminal its cursor back, whatever happened
