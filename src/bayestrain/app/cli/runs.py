"""Commands on finished runs, `bayestrain inspect`, `evaluate`, `report` and `export`, and what others share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


def loaded(folder: Path, device: str) -> tuple[Any, dict[str, Any]]:
    """The posterior of a finished run, or its network at the temperature that was fitted; and the run's result."""
    result = finished(folder).result
    if not result.get("input_shape"):
        raise ConfigError("this network takes several tensors. Use it in Python: train.run.load_run(RUN).predict(x)")
    from bayestrain.train.run import load_run

    model = load_run(folder, device=resolve_device(device))
    if len(model) == 1 and result["calibrated"]:
        model.likelihood.temperature = result["calibrated"]["temperature"]
    return model, result


def inspect(folder: Finished) -> None:
    """Show the layers of a run's network: formats, ranks and sizes."""
    run = finished(folder)
    from bayestrain.app.report.facts import layer_table

    table = layer_table(run)
    print(text_table(table.header, table.rows, left_columns=6))


def evaluate(folders: Runs, device: Device = "auto") -> None:
    """Evaluate finished runs again on their test data, and rewrite their reports. Nothing is trained."""
    for folder in folders:
        finished(folder)
    place = resolve_device(device)
    from bayestrain.train.run import evaluate_run

    for folder in folders:
        evaluate_run(folder, device=place)
        print_closing(folder)


def report(folders: Runs) -> None:
    """Write the HTML report of each run, also of an unfinished one."""
    from bayestrain.app.report import write_report

    for folder in folders:
        print(write_report(folder))


def export(
    folder: Finished,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="onnx, pt2 or executorch.")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", show_default=False, help="File to write. "
                                             "Default: model.FORMAT in the run's folder.")] = None,
    weights: Annotated[str | None, typer.Option("--weights", metavar="BITS", show_default=False,
                                                help="int8 or bf16 stores weights in fewer bits.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Inputs at a time that the file is made with, and the "
                                       "most that ExecuTorch will take.")] = 8,
) -> None:  # fmt: skip
    """Write a run's network or posterior as one file, after comparing its outputs with PyTorch's.

    It returns the mean prediction, and the total, aleatoric and epistemic uncertainty. Its metadata name the classes
    and what pictures were normalised with. Only use runs you trust: the function that a run names is called.

    ```sh
    bayestrain export runs/digits-seed0
    bayestrain export runs/digits-seed0 --format pt2 --weights int8 --out digits.pt2
    ```
    """
    model, result = loaded(folder, "cpu")
    import torch

    from bayestrain.io import export as write

    shape = batch, *result["input_shape"]
    dtype = getattr(torch, result["input_dtype"])
    example = torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    known = {key: result[key] for key in ("name", "classes", "mean", "std", "input_shape") if result.get(key)}
    print(write(model, out or folder / f"model.{format}", format, example=example, weights=weights, metadata=known))
