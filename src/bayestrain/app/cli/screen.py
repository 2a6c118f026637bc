"""What commands share: messages on stderr, results on stdout, progress, and finished runs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from bayestrain.errors import ConfigError

if TYPE_CHECKING:
    from bayestrain.app.report.read import Run
    from bayestrain.train.callbacks import Callback

HELP = {"help_option_names": ["-h", "--help"]}
FEW_LAYERS = 6


def print_error(message: str) -> None:
    """Print one message on stderr, never wrapped, so that it can be copied."""
    Console(stderr=True).print(Text("bayestrain: ", style="bold red") + Text(message), soft_wrap=True)


def print_json(value: object) -> None:
    """Print exactly one JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def finished(folder: Path) -> Run:
    """The folder of a finished run. A missing one is reported at once, before heavy imports."""
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist. Name the folder of a run.")
    if not (folder / "result.json").is_file():
        raise ConfigError(f"{folder} holds no finished run. To finish one: bayestrain train --resume --out {folder}")
    from bayestrain.app.report.read import read_run

    return read_run(folder)


def write_page(folder: Path) -> Path:
    """Write the report of a run."""
    from bayestrain.app.report import write_report

    return write_report(folder)


def print_closing(folder: Path) -> None:
    """Print the result of a finished run, and write its report."""
    from bayestrain.app.report.page import tiles
    from bayestrain.app.report.read import reading

    run = finished(folder)
    with reading(folder):
        lines = [(label, "; ".join([value, *filter(None, notes)])) for label, value, notes in tiles(run)]
        bonds = [rank for layer in run.tensor_layers for rank in layer.ranks]
        if 0 < len(run.tensor_layers) <= FEW_LAYERS:
            lines.append(("Ranks", ",  ".join(f"{x.name}: {' '.join(map(str, x.ranks))}" for x in run.tensor_layers)))
        elif bonds:
            lines.append(("Ranks", f"{sum(bonds) / len(bonds):.1f} on average in {len(run.tensor_layers)} layers"))
        lines += [("Warning", str(text)) for text in run.posterior.get("warnings", ())]
    for label, text in [*lines, ("Report", str(write_page(folder)))]:
        print(f"{label + ':':<24}{text}")


@contextmanager
def shown_progress(silent: bool) -> Iterator[list[Callback]]:
    """Callbacks that show a run on stdout, or none: a line per epoch with the time left.

    What the package logs, such as downloads, is shown too.
    """
    from bayestrain.train.callbacks import ProgressPrinter

    handler, logger = logging.StreamHandler(sys.stdout), logging.getLogger("bayestrain")
    level = logger.level
    if not silent:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield [] if silent else [ProgressPrinter()]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def resolve_device(device: str) -> str:
    """The torch device meant by --device, if this machine has it."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()
    }  # fmt: skip
    kind, colon, number = device.partition(":")
    if kind not in found or (colon and not number.isdecimal()):
        raise ConfigError(f"--device must be auto, cpu, cuda, cuda:N or mps, got {device}.")
    if int(number or 0) >= found[kind]:
        raise ConfigError(f"--device {device}: PyTorch finds {found[kind]} such devices here. Use --device cpu.")
    return device
