"""Commands on finished runs: `bayestrain inspect`, `evaluate` and `report`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bayestrain.app.cli.screen import closing_lines, print_json, read_result
from bayestrain.errors import ConfigError
from bayestrain.tables import text_table, times

DEVICE = "auto, cpu, cuda, cuda:N or mps. Default: a GPU if there is one."
Device = Annotated[str, typer.Option("--device", help=DEVICE, metavar="DEVICE", show_default=False)]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")]


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", metavar="RUN")],
    plan: Annotated[
        bool, typer.Option("--plan", help="Show how every layer multiplies here, and its predicted time.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --plan: inputs at a time.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Show the layers of a run's network: formats, ranks and sizes, or how they multiply.

    \b
    [bold]Examples[/]
      bayestrain inspect runs/digits-seed0
      bayestrain inspect runs/digits-seed0 --plan --batch 1
    """
    result = read_result(run)
    if as_json:
        print_json(result)
    elif plan:
        import torch

        from bayestrain.overview import summary
        from bayestrain.train.run import load_run

        x = torch.zeros(batch, *result["input_shape"], dtype=getattr(torch, result["input_dtype"]))
        print(summary(load_run(run, device="cpu").template, x))
    else:
        print(rank_table(result))


def rank_table(result: Mapping[str, Any]) -> str:
    """A row for each factorised layer, and one for the whole network."""
    size, dense = result["parameters"], result["dense_parameters"]
    rows = []
    for name, layer in result["layers"].items():
        if layer["format"]:
            ranks, old, new = " ".join(map(str, result["ranks"].get(name, ()))), layer["dense"], layer["now"]
            kind = [name, layer["format"], layer["layout"], times(layer["shape"]), ranks or "-"]
            rows.append([*kind, f"{old:,}", f"{new:,}", f"{old / new:.1f}x"])
    particles = (result.get("posterior") or {}).get("particles") or 1
    each = f", in each of {particles} particles" if particles > 1 else ""
    if not rows:
        return f"No layer is factorised: {size:,} parameters{each}."
    rows.append(["whole network", "", "", "", "", f"{dense:,}", f"{size:,}", f"{dense / size:.1f}x"])
    header = ["layer", "format", "layout", "shape", "ranks", "dense", "now", "smaller"]
    return text_table(header, rows, left_columns=5) + each * bool(each)


def evaluate(folders: Runs, device: Device = "auto") -> None:
    """Evaluate finished runs again on their test data, and rewrite their reports. Nothing is trained.

    \b
    [bold]Example[/]
      bayestrain evaluate runs/digits-seed0
    """
    for folder in folders:
        read_result(folder)
    place = resolve(device)
    from bayestrain.train.run import evaluate_run

    for folder in folders:
        closing(evaluate_run(folder, device=place), write_page(folder))


def report(
    folders: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Page of a comparison. Default: comparison.html beside the first run.", show_default=False,
            metavar="FILE.html",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Write the HTML report of a run, or a comparison of several.

    \b
    [bold]Examples[/]
      bayestrain report runs/digits-seed0
      bayestrain report runs/digits-seed0 runs/digits-seed1 --out seeds.html
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} does not exist. Name folders of runs.")
    if len(folders) == 1:
        if out is not None:
            raise ConfigError("--out names the page of a comparison; the report of a run goes into its folder.")
        print(write_page(folders[0]))
        return
    from bayestrain.app.report import write_comparison

    print(write_comparison(folders, out or folders[0].parent / "comparison.html"))


def write_page(folder: Path) -> Path:
    from bayestrain.app.report import write_report

    return write_report(folder)


def closing(result: Mapping[str, Any], page: Path) -> None:
    """Print what a run came to, and where its report is."""
    for word, value in closing_lines(result):
        print(f"{word + ':':<20}{value}")
    print(f"{'report:':<20}{page}")


def resolve(device: str) -> str:
    """The torch device meant by --device, if this machine has it."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
        raise ConfigError(f"--device must be auto, cpu, cuda, cuda:N or mps, got {device}.")
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = {"cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()}
    kind, _, number = device.partition(":")
    if int(number or 0) >= found[kind]:
        raise ConfigError(f"--device {device}: PyTorch finds {found[kind]} such devices here. Use --device cpu.")
    return device
