"""Commands on finished runs: `bayestrain inspect`, `evaluate` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from bayestrain.app.cli.screen import existing, finished, print_closing, print_json, resolve_device
from bayestrain.errors import ConfigError
from bayestrain.tables import text_table

DEVICE = "auto, cpu, cuda, cuda:N or mps. Default: a GPU if there is one."
Device = Annotated[str, typer.Option("--device", help=DEVICE, metavar="DEVICE", show_default=False)]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")]


def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.", metavar="RUN")],
    plan: Annotated[
        bool, typer.Option("--plan", help="Show how each layer multiplies on this machine, and its predicted time.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --plan: inputs at a time.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:
    """Show the layers of a run's network: formats, ranks and sizes.

    \b
    [bold]Examples[/]
      bayestrain inspect runs/digits-seed0
      bayestrain inspect runs/digits-seed0 --plan --batch 1
    """
    run = finished(folder)
    if as_json:
        print_json(run.result)
    elif plan:
        import torch

        from bayestrain.overview import summary
        from bayestrain.train.run import load_run

        x = torch.zeros(batch, *run.result["input_shape"], dtype=getattr(torch, run.result["input_dtype"]))
        print(summary(load_run(folder, device="cpu").template, x))
    else:
        from bayestrain.app.report.facts import layer_table

        table = layer_table(run)
        print(text_table(table.header, table.rows, left_columns=6))


def evaluate(folders: Runs, device: Device = "auto") -> None:
    """Evaluate finished runs again on their test data, and rewrite their reports. Nothing is trained.

    \b
    [bold]Example[/]
      bayestrain evaluate runs/digits-seed0
    """
    for folder in folders:
        finished(folder)
    place = resolve_device(device)
    from bayestrain.train.run import evaluate_run

    for folder in folders:
        evaluate_run(folder, device=place)
        print_closing(folder)


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
        existing(folder)
    from bayestrain.app.report import write_comparison, write_report

    if len(folders) > 1:
        print(write_comparison(folders, out or folders[0].parent / "comparison.html"))
    elif out is None:
        print(write_report(folders[0]))
    else:
        raise ConfigError("--out names the page of a comparison; the report of a run goes into its folder.")
