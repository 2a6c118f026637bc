"""What commands share: finished runs, results on stdout, devices."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bayestrain.errors import ConfigError

if TYPE_CHECKING:
    from bayestrain.app.report.read import Run

HELP = {"help_option_names": ["-h", "--help"]}


def print_json(value: object) -> None:
    """Print exactly one JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def existing(folder: Path) -> Path:
    """The folder, if there is one: a missing one is reported at once, before heavy imports."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist. Name the folder of a run.")
    return folder


def finished(folder: Path) -> "Run":
    """The finished run in a folder."""
    if not (existing(folder) / "result.json").is_file():
        raise ConfigError(f"{folder} holds no finished run. To finish one: bayestrain train --resume --out {folder}")
    from bayestrain.app.report.read import read_run

    return read_run(folder)


def print_closing(folder: Path) -> None:
    """Print the result of a finished run, and write its report."""
    from bayestrain.app.report import write_report
    from bayestrain.app.report.facts import tiles
    from bayestrain.app.report.read import reading

    run = finished(folder)
    with reading(folder):
        lines = [(label, "; ".join([value, *filter(None, notes)])) for label, value, notes in tiles(run)]
        lines += [("Warning", str(text)) for text in run.posterior.get("warnings", ())]
    for label, text in [*lines, ("Report", str(write_report(folder)))]:
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
