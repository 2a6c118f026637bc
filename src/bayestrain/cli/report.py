"""`bayestrain report`: the page of one run, or several runs compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders; several are compared.", metavar="RUN")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; RUN/report.html, or comparison.html beside the first run, if left out.",
            show_default=False,
            metavar="FILE.html",
        ),
    ] = None,
) -> None:
    """Write the HTML report of a run, or a comparison of several runs.

    \b
    [bold]Examples[/]
      bayestrain report runs/mnist-seed0
      bayestrain report runs/mnist-seed0 runs/mnist-seed1 --out seeds.html
    """
    from bayestrain.report import write_report

    print(write_report(folders, out))
