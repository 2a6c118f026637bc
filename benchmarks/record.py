"""Files of the benchmarks: what was measured, what was promised, on which machine, with which versions."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bayestrain.train.environment import describe_environment

RESULTS = Path("results/benchmarks")


def arguments(doc: str | None, devices: tuple[str, ...] = ("cpu", "cuda")) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=devices)
    parser.add_argument("--rounds", type=int, default=31, help="measurements of each function; the median counts")
    parser.add_argument("--quick", action="store_true", help="few and small measurements, to see that all of it runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the file")
    return parser


def claim(
    what: str, measured: float, target: float | None, sense: str = "<=", unit: str = "of dense"
) -> dict[str, Any]:
    """One line of the tables: what was measured and what it should be at most ("<=") or at least (">=")."""
    met = None if target is None else (measured <= target if sense == "<=" else measured >= target)
    return {"what": what, "measured": measured, "target": target, "sense": sense, "unit": unit, "met": met}


def write(
    name: str, options: argparse.Namespace, claims: list[dict[str, Any]], details: dict[str, Any],
    packages: Iterable[str] = (),
) -> Path:  # fmt: skip
    """Write ``NAME-DEVICE.json`` and print the claims."""
    if options.quick:  # too small and too few to be judged
        claims = [{**line, "target": None, "met": None} for line in claims]
    quick = " --quick" if options.quick else ""  # folders are of no interest elsewhere
    report = {
        "command": f"python benchmarks/{name}.py --device {options.device} --rounds {options.rounds}{quick}",
        "quick": options.quick,
        "claims": claims,
        **details,
        "load_average": list(os.getloadavg()),
        "versions": {package: version(package) for package in packages},
        "environment": describe_environment(torch.device(options.device)),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path: Path = options.results / f"{name}-{options.device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    for line in claims:
        print(describe(line), flush=True)
    print(path)
    return path


def describe(line: dict[str, Any]) -> str:
    """A claim in words."""
    target = "" if line["target"] is None else f" (target {line['sense']} {line['target']:g})"
    verdict = {None: "", True: " met", False: " MISSED"}[line["met"]]
    return f"{line['what']}: {line['measured']:.3g} {line['unit']}{target}{verdict}"


def version(package: str) -> str | None:
    """What is installed, None if it is not, or not as a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
