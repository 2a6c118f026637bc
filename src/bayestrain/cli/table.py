"""`bayestrain table`: all results in one table beside the paper's, with figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def table(
    results: Annotated[
        Path, typer.Argument(help="The folder that tools/run_seeds.py filled.", metavar="RESULTS")
    ] = Path("results"),
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write; RESULTS if left out.", show_default=False, metavar="DIR"),
    ] = None,
) -> None:
    """Write TABLE.md: the results of all seeds beside the paper's, with figures.

    \b
    [bold]Examples[/]
      bayestrain table
      bayestrain table results --out docs
    """
    from bayestrain.report import write_table

    print(write_table(results, out))
