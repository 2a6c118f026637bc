"""`bayestrain inspect`: the rank table of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bayestrain.cli.screen import existing, inner, print_json
from bayestrain.errors import ConfigError
from bayestrain.tables import text_table, times

BATCH = 128
"""Images that plans are shown for unless --batch says otherwise."""


def inspect(
    file: Annotated[Path, typer.Argument(help="A run folder, or its model.json.", metavar="FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print model.json as one JSON object.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show how every layer runs here, and how fast beside a dense one.")
    ] = False,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help=f"With --plan: images at a time; {BATCH} if left out.")
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="With --plan: a training step instead of a forward pass.")
    ] = False,
) -> None:
    """Show the layers of a saved model: modes, ranks and sizes, or how they run.

    \b
    [bold]Examples[/]
      bayestrain inspect runs/mnist-seed0
      bayestrain inspect model.safetensors --json
      bayestrain inspect runs/mnist-seed0 --plan --batch 1
    """
    from bayestrain.saved import read_description, require

    if as_json and plan:
        raise ConfigError("--json prints model.json, which holds no plans. Leave one of --json and --plan out.")
    if not plan and (batch is not None or training):
        option = "--training" if batch is None else "--batch"
        raise ConfigError(f"{option} is about the plans that --plan shows. Add --plan, or leave {option} out.")
    description = read_description(existing(file))[1]
    if as_json:
        print_json(description)
        return
    if plan:
        print(_plan_table(file, description, BATCH if batch is None else batch, training))
        return
    require(description, "params", "dense_params")
    print(rank_table(description))


def _plan_table(file: Path, description: dict[str, Any], batch: int, training: bool) -> str:
    """How every layer of one network runs on this machine."""
    import torch

    from bayestrain.saved import load_model, load_posterior
    from bayestrain.speed import plan_report
    from bayestrain.train.config import INPUTS

    shape = INPUTS.get(str(description.get("model")))
    if shape is None:
        raise ConfigError(
            f"{file} holds a model of your own, whose inputs are not known here. In Python: "
            "bayestrain.plan_report(model, x)."
        )
    network = load_posterior(file).template if description.get("particles") else load_model(file)
    what, images = "Training step" if training else "Forward pass", "image" if batch == 1 else "images"
    head = f"{what}, {batch} {images}, {torch.get_num_threads()} threads"
    return f"{head}\n{plan_report(network, torch.rand(batch, *shape), training)}"


def _dense_size(params: int, particles: int | None) -> str:
    text = f"No tensor-train layers: {params:,} parameters, all dense"
    return f"{text}, in each of {particles} particles: {particles * params:,} together." if particles else f"{text}."


def rank_table(description: dict[str, Any]) -> str:
    """Every layer in a row, the whole network below; of a dense network there is only its size to tell."""
    if not description["layers"]:
        return _dense_size(description["params"], description.get("particles"))
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
