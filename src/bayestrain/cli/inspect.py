"""`bayestrain inspect`: the rank table of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bayestrain.cli.screen import existing, inner, print_json, times
from bayestrain.tables import text_table


def inspect(
    file: Annotated[Path, typer.Argument(help="A run folder, or its model.json.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print model.json as one JSON object.")] = False,
) -> None:
    """Show the layers of a saved model: modes, ranks and sizes.

    \b
    [bold]Examples[/]
      bayestrain inspect runs/mnist-seed0
      bayestrain inspect model.safetensors --json
    """
    from bayestrain.saved import read_description, require

    description = read_description(existing(file))[1]
    if as_json:
        print_json(description)
        return
    require(description, "params", "dense_params")
    print(rank_table(description))


def rank_table(description: dict[str, Any]) -> str:
    """Every layer in a row, the whole network below."""
    rows = [
        [name, layer["kind"], times(layer["in_modes"]), times(layer["out_modes"]), inner(layer["ranks"]),
         f"{layer['dense_parameters']:,}", f"{layer['parameters']:,}",
         f"{layer['dense_parameters'] / layer['parameters']:.1f}x"]
        for name, layer in description["layers"].items()
    ]  # fmt: skip
    params, dense = description["params"], description["dense_params"]
    rows.append(["whole network", "", "", "", "", f"{dense:,}", f"{params:,}", f"{dense / params:.1f}x"])
    if particles := description.get("particles"):
        rows.append([f"{particles} particles", "", "", "", "", "", f"{particles * params:,}",
                     f"{dense / (particles * params):.1f}x"])  # fmt: skip
    header = ["layer", "kind", "in modes", "out modes", "ranks", "dense", "now", "smaller"]
    return text_table(header, rows, left_columns=5)
