"""`bayestrain data`: list the data sets, or fetch one."""

import logging
from typing import Annotated

import typer

from bayestrain.app.cli.runs import HELP
from bayestrain.tables import text_table

data_app = typer.Typer(no_args_is_help=True, help="List the data sets, or fetch one.", context_settings=HELP)


@data_app.command("list")
def list_data() -> None:
    """List the data sets, and whether they are on this machine."""
    from bayestrain.app.data import SPECS, cache_folder

    rows = []
    for spec in SPECS.values():
        here = all(file.find(spec.home) for file in spec.files)
        size = f"{sum(file.size for file in spec.files) / 1e6:.0f} MB"
        rows.append([spec.name, spec.title, "yes" if here else "no", size])
    print(text_table(["name", "what", "here", "size"], rows, left_columns=3))
    print(f"\nFetch one with: bayestrain data get NAME. The cache is {cache_folder()}.")


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="One of those that [bold]bayestrain data list[/] shows.")],
) -> None:
    """Download a data set unless it is on this machine, compare its checksums, and print its folder."""
    from bayestrain.app import data

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(data.get(name))
