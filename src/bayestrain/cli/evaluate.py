"""`bayestrain evaluate`: a finished run's figures, taken anew."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bayestrain.cli import devices
from bayestrain.cli.screen import closing_lines, existing


def evaluate(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", metavar="RUN")],
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.", metavar="DEVICE", show_default=False)
    ] = "auto",
) -> None:
    """Evaluate finished runs again and write their reports anew; nothing is trained.

    For runs that were trained elsewhere, or with an older version.

    \b
    [bold]Examples[/]
      bayestrain evaluate runs/mnist-seed0
    """
    from bayestrain.report import write_report
    from bayestrain.train.reevaluation import evaluate_run

    place = devices.resolve(device)
    for folder in folders:
        command = f"bayestrain evaluate {shlex.quote(folder.name)}"
        result = evaluate_run(existing(folder), device=place, command=command).summary
        for word, value in closing_lines(result):
            print(f"{word + ':':<16}{value}")
        print(f"report: {write_report(folder, folder / 'report.html')}")
