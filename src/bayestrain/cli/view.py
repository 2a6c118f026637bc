"""Which `Progress` watches a run: drawn in a terminal, lines in a file or pipe, or none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from bayestrain.cli.live import LiveView
from bayestrain.cli.plain import PlainLines
from bayestrain.train.progress import Progress, Silent


@contextmanager
def shown_progress(silent: bool = False, first: Mapping[str, Any] | None = None) -> Iterator[Progress]:
    """The right view for where stdout goes; what the package logs meanwhile appears in it.

    `first` is the first line of the history of a run that is resumed.
    """
    console = Console()
    if silent:
        yield Silent()
    elif console.is_terminal:
        with LiveView(console, first) as live, _logged_to(live):
            yield live
    else:
        lines = PlainLines()
        with _logged_to(lines):
            yield lines


@contextmanager
def _logged_to(progress: Progress) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            progress.message(record.getMessage())

    logger, handler = logging.getLogger("bayestrain"), Handler(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
