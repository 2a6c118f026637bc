"""Printing: results on stdout, messages on stderr, and numbers in readable form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bayestrain.errors import ConfigError

HELP = {"help_option_names": ["-h", "--help"]}
FEW_LAYERS = 6


def print_error(message: str) -> None:
    """Print one message on stderr, never wrapped, so that it can be copied."""
    Console(stderr=True).print(Text("bayestrain: ", style="bold red") + Text(message), soft_wrap=True)


def print_json(value: object) -> None:
    """Print exactly one JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def read_result(run: Path) -> dict[str, Any]:
    """The result.json of a finished run. What is not there is reported before torch is imported."""
    if not run.exists():
        raise ConfigError(f"{run} does not exist. Name the folder of a run.")
    if not (run / "result.json").is_file():
        raise ConfigError(f"{run} holds no finished run. To finish one: bayestrain train --resume --out {run}")
    from bayestrain.train.folder import read_json

    return read_json(run / "result.json", "parameters", "dense_parameters", "layers")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    """75 -> "1:15", 4000 -> "1:06:40"."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def closing_lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a finished run has to say, as (word, value)."""
    metrics, calibrated = result.get("metrics") or {}, result.get("calibrated") or {}
    for name, value in metrics.items():
        text = percent(value) if name in ("accuracy", "coverage_90") else f"{value:.4g}"
        at = calibrated.get("temperature")
        if name == "log_likelihood" and at and at != 1:
            text += f" ({calibrated[name]:.4g} at temperature {at:.2f})"
        yield {"coverage_90": "in 90 % interval"}.get(name, name.replace("_", " ")), text
    posterior = result.get("posterior") or {}
    particles = posterior.get("particles") or 1
    if particles > 1:
        yield "posterior", f"{particles} particles by {posterior['method']}"
    for text in posterior.get("warnings", ()):
        yield "warning", text
    size, dense = result["parameters"], result["dense_parameters"]
    smaller = f" instead of {dense:,}: {dense / size:.3g}x smaller" if dense > size else ""
    yield "parameters", f"{size:,}{smaller}{', each' * (particles > 1)}"
    if ranks := ranks_in_short(result.get("ranks") or {}):
        yield "ranks", ranks
    yield "time", duration(result["seconds"])


def ranks_in_short(ranks: Mapping[str, Sequence[int]]) -> str:
    """The ranks of a few layers, or the mean rank of many."""
    if len(ranks) <= FEW_LAYERS:
        return ",  ".join(f"{name}: {' '.join(map(str, row)) or '-'}" for name, row in ranks.items())
    bonds = [rank for row in ranks.values() for rank in row]
    return f"mean rank {sum(bonds) / max(len(bonds), 1):.1f} in {len(ranks)} layers"
