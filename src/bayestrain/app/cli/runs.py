"""Commands on finished runs, `bayestrain inspect`, `evaluate` and `report`, and what they share with the others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bayestrain.errors import ConfigError
from bayestrain.tables import text_table

if TYPE_CHECKING:
    from bayestrain.app.report.read import Run

DEVICE = "auto, cpu, cuda, cuda:N or mps. Default: a GPU if there is one."
Device = Annotated[str, typer.Option("--device", help=DEVICE, metavar="DEVICE", show_default=False)]
Finished = Annotated[Path, typer.Argument(help="Folder of a finished run.", metavar="RUN")]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN")]


def finished(folder: Path) -> "Run":
    """The finished run in a folder; a missing one is reported at once, before heavy imports."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist. Name the folder of a run.")
    if not (folder / "result.json").is_file():
        raise ConfigError(f"{folder} holds no finished run. To finish one: bayestrain train --resume --out {folder}")
    from bayestrain.app.report.read import read_run

    return read_run(folder)


def print_closing(folder: Path) -> None:
    """Write the report of a finished run, which checks its files, and print its result."""
    from bayestrain.app.report import write_report
    from bayestrain.app.report.facts import tiles

    page, run = write_report(folder), finished(folder)
    lines = [(label, "; ".join([value, *filter(None, notes)])) for label, value, notes in tiles(run)]
    lines += [("Warning", str(text)) for text in run.result["posterior"].get("warnings", ())]
    for label, text in [*lines, ("Report", str(page))]:
        print(f"{label + ':':<24}{text}")


def resolve_device(device: str) -> str:
    """The torch device meant by --device, if this machine has it."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch was built without this kind of device
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--device {device}: {reason} Choose auto, cpu, cuda, cuda:N or mps.") from None
    return device


def inspect(
    folder: Finished,
    plan: Annotated[bool, typer.Option("--plan", help="Show how each layer multiplies on this machine, and its "
                                       "predicted time.")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --plan: inputs at a time.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
) -> None:  # fmt: skip
    """Show the layers of a run's network: formats, ranks and sizes.

    ```sh
    bayestrain inspect runs/digits-seed0
    bayestrain inspect runs/digits-seed0 --plan --batch 1
    ```
    """
    run = finished(folder)
    if as_json:
        print((folder / "result.json").read_text(encoding="utf-8"), end="")
    elif plan:
        import torch

        from bayestrain.nn import summary
        from bayestrain.train.run import load_run

        x = torch.zeros(batch, *run.result["input_shape"], dtype=getattr(torch, run.result["input_dtype"]))
        print(summary(load_run(folder, device="cpu").template, x))
    else:
        from bayestrain.app.report.facts import layer_table

        table = layer_table(run)
        print(text_table(table.header, table.rows, left_columns=6))


def evaluate(folders: Runs, device: Device = "auto") -> None:
    """Evaluate finished runs again on their test data, and rewrite their reports. Nothing is trained.

    ```sh
    bayestrain evaluate runs/digits-seed0
    ```
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
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", show_default=False, help="Page of a comparison. "
                                             "Default: comparison.html beside the first run.")] = None,
) -> None:  # fmt: skip
    """Write the HTML report of a run, or a comparison of several.

    ```sh
    bayestrain report runs/digits-seed0
    bayestrain report runs/digits-seed0 runs/digits-seed1 --out seeds.html
    ```
    """
    from bayestrain.app.report import write_comparison, write_report

    if len(folders) > 1:
        print(write_comparison(folders, out or folders[0].parent / "comparison.html"))
    elif out is None:
        print(write_report(folders[0]))
    else:
        raise ConfigError("--out names the page of a comparison; the report of a run goes into its folder.")
