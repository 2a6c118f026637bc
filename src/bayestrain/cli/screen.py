"""Printing: results on stdout, everything else on stderr, and numbers the way people read them."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bayestrain.errors import ConfigError

HELP = {"help_option_names": ["-h", "--help"]}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system calls a disk without room."""


def print_error(message: str) -> None:
    """One message on stderr, never wrapped, so that it can be copied."""
    Console(stderr=True).print(Text("bayestrain: ", style="bold red") + Text(message), soft_wrap=True)


def in_full(error: Exception) -> str:
    """What an error says, with the notes that were added to it on its way."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def failed_access(error: OSError) -> str:
    """What the system says of a file or a disk, and what to do."""
    what = "A file" if error.filename is None else str(error.filename)
    room = " Make room first." if error.errno in FULL else ""
    text = f"{what} cannot be read or written: {error.strerror or error}.{room}"
    return " ".join([text, *getattr(error, "__notes__", ())])


def print_json(value: object) -> None:
    """Exactly one JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def existing(path: Path) -> Path:
    """`path`, if there is something."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist.")
    return path


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    """75 -> "1:15", 4000 -> "1:06:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def inner(ranks: Sequence[int]) -> str:
    """(1, 8, 1, 5, 1) -> "8 1 5": the bonds that can have another rank than 1."""
    return " ".join(map(str, ranks[1:-1])) or "-"


def closing_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a finished run is about, as (word, value)."""
    posterior = result.get("posterior") or {}
    many = posterior.get("particles", 1) > 1
    lines = [
        ("accuracy", f"{percent(result['accuracy'])} on the test images"),
        ("log likelihood", f"{result['log_likelihood']:.4f}" + ("" if many else _at_temperature(result))),
        *([("posterior", _posterior_in_short(posterior))] if many else []),
        *(("warning", text) for text in posterior.get("warnings", ())),
        (
            "parameters",
            (
                f"{result['params']:,} instead of {result['dense_params']:,}: {result['ratio']:.0f}x smaller"
                if result["ranks"]
                else f"{result['params']:,}, all dense"
            )
            + (", each" if many else ""),
        ),
    ]
    if 0 < len(result["ranks"]) <= 6:
        lines.append(("ranks", ",  ".join(f"{name}: {inner(ranks)}" for name, ranks in result["ranks"].items())))
    return [*lines, ("time", duration(result["seconds"]))]


def _at_temperature(result: Mapping[str, Any]) -> str:
    calibrated = result.get("calibrated")
    if not calibrated:
        return ""
    return f" ({calibrated['log_likelihood']:.4f} at temperature {calibrated['temperature']:.2f})"


def _posterior_in_short(posterior: Mapping[str, Any]) -> str:
    """What the particles add: against a single one of them, against the MAP point, and outside of the data."""
    text = f"{posterior['particles']} particles by {posterior['method']}, alone {posterior['mean_log_likelihood']:.4f}"
    if posterior.get("map"):
        point = posterior["map"]
        if posterior.get("temperature", 1.0) != 1.0 and point.get("calibrated"):
            point = point["calibrated"]  # like with like
        text += f", MAP point {point['log_likelihood']:.4f}"
    if posterior.get("ood"):
        text += f"; tells {posterior['ood']['name']} apart with AUROC {posterior['ood']['auroc']:.3f}"
    return text
