"""The last commit of the old house beside this one and dense layers, in one run: seconds, new over old and over dense.

    python benchmarks/old_and_new.py                        # on a CPU
    python benchmarks/old_and_new.py --device cuda          # captured steps on a GPU
    python benchmarks/old_and_new.py --page                 # only write the page of results again

Two processes, one with each version on its path, measure in turns; a ratio is the median over rounds of the quotient of
two neighbouring measurements, so what slows the machine for a while slows both. The old version is taken from git, or
from a folder that `git archive COMMIT src` filled. Writes ``results/benchmarks/old-and-new-DEVICE.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

OLD_COMMIT = "a19cf68"
LIMIT = 1.05
LONG = 1.0
"""Seconds from which on a call is long: it warms up by itself, and fewer rounds measure it."""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "benchmarks"

INTRODUCTION = """# Speed

`make bench` and `make bench-gpu` write this page. They run the last commit of version 0.1 (%s), this version and dense
PyTorch layers in turns, in one run. A ratio is the median over rounds of the quotient of two neighbouring measurements,
with its quartiles. Training is a forward and a backward pass; an epoch includes the prior and the updates of lambda.

[Earlier measurements of version 0.1](0.1/README.md), with other libraries beside it, stay as they were recorded.
"""

KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""For both versions, as a run of `fit` sets it. By default it depends on what lies at the top of the heap whether glibc
returns a block to the system and a call pays for its pages again: up to a third of a convolution's time."""

IMPORTS = {
    "import bayestrain": "import bayestrain",
    "import bayestrain and its layers": "import bayestrain as b; getattr(b, 'TensorLinear', None) or b.TTLinear",
    "bayestrain --help": "import runpy, sys; sys.argv = ['bayestrain', '--help']; runpy.run_module('bayestrain')",
}


class Version:
    """A process that measures with one version of the package."""

    def __init__(self, source: Path, device: str) -> None:
        places = os.pathsep.join([str(source), str(ROOT)])
        self.environment = {**os.environ, **KEEP_FREED_MEMORY, "PYTHONPATH": places, "BENCHMARK_DEVICE": device}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "rows.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip
        found = self.ask(rows=True)
        self.rows: list[str] = found["rows"]
        if Path(found["package"]).parent != source.resolve():
            raise SystemExit(f"expected the package of {source}, got {found['package']}")

    def ask(self, **command: Any) -> Any:
        """The answer to one command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the measuring process ended with {self.process.wait()}")
        return json.loads(line)

    def seconds(self, calls: int, what: str = "ours") -> float:
        """Mean seconds of a call of the open row."""
        return float(self.ask(time=calls, what=what)["seconds"])

    def imported(self, code: str) -> float:
        """Seconds of a fresh process that runs this code."""
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code], env=self.environment, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return time.perf_counter() - started


def old_source(folder: Path | None) -> Path:
    """The old version's ``src``."""
    if folder is not None:
        return folder.resolve()
    place = Path(tempfile.mkdtemp(prefix="bayestrain-old-"))
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD_COMMIT, "src"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(place, filter="data")
    return place / "src"


def measurement(version: Version, what: str, at_least: float) -> tuple[Callable[[], float], bool]:
    """Measures so many calls that they last this long, the first ones to warm up; and whether a single call is long."""
    started = time.perf_counter()
    version.seconds(1, what)
    if time.perf_counter() - started > LONG:
        return lambda: version.seconds(1, what), True
    calls = 1
    while (took := version.seconds(calls, what) * calls) < at_least:
        calls = min(max(calls + 1, int(1.2 * calls * at_least / max(took, 1e-7))), 10 * calls)
    return lambda: version.seconds(calls, what), False


def compare(measure: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Seconds round by round, in random order, and the medians of new over old and of new over dense."""
    order = list(measure)
    times: dict[str, list[float]] = {name: [] for name in measure}
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(measure[name]())
    found: dict[str, Any] = {"rounds": rounds, "seconds": {k: statistics.median(own) for k, own in times.items()}}
    for other in set(measure) - {"new"}:
        ratios = [new / old for new, old in zip(times["new"], times[other], strict=True)]
        first, middle, third = statistics.quantiles(ratios, n=4, method="inclusive")
        found[f"over_{other}"] = {"median": middle, "quartiles": [first, third]}
    return found


def described(line: dict[str, Any]) -> str:
    """A row in words."""
    ratios = [(name, line[f"over_{name}"]) for name in ("old", "dense") if f"over_{name}" in line]
    words = [
        f"{own['median']:.3f} of {name} ({own['quartiles'][0]:.3f} to {own['quartiles'][1]:.3f})"
        for name, own in ratios
    ]
    return f"{line['row']}: {', '.join(words)}"


def page(results: Path) -> str:
    """The page of all recorded comparisons."""
    text = INTRODUCTION % OLD_COMMIT
    for path in sorted(results.glob("old-and-new-*.json")):
        report = json.loads(path.read_text())
        about = report["environment"]
        machine = about["gpu"] or f"{about['cpu']}, {about['threads']} thread{'s' * (about['threads'] > 1)}"
        slower = [line["row"] for line in report["rows"] if line["over_old"]["median"] > report["limit"]]
        text += (
            f"\n## On {'a GPU' if about['gpu'] else 'a CPU'}\n\n{machine}; torch {about['torch']}; Python "
            f"{about['python']}; commit {about['commit'][:10]}; {about['started'][:10]}; `{report['command']}`.\n\n"
            "| row | milliseconds | of version 0.1 | of dense |\n| --- | --: | --: | --: |\n"
        )
        for line in report["rows"]:
            cells = [_ratio(line[name]) if name in line else "" for name in ("over_old", "over_dense")]
            text += f"| {line['row']} | {1e3 * line['seconds']['new']:.3g} | {' | '.join(cells)} |\n"
        text += f"\nSlower than {report['limit']} of version 0.1: {', '.join(slower) or 'none'}.\n"
    return text + (_layers(json.loads(path.read_text())) if (path := results / "layers.json").exists() else "")


def _layers(report: dict[str, Any]) -> str:
    """What `benchmarks/layers.py` recorded."""
    about, threads = report["environment"], report["environment"]["threads"]
    text = (
        f"\n## Embeddings and encoders on a CPU\n\n{about['cpu']}, {threads} thread{'s' * (threads > 1)}; torch "
        f"{about['torch']}; Python {about['python']}; commit {about['commit'][:10]}; {about['started'][:10]}; "
        f"`{report['command']}`.\n\n| row | milliseconds | of dense |\n| --- | --: | --: |\n"
    )
    for line in report["rows"]:
        text += f"| {line['row']} | {1e3 * line['seconds']['new']:.3g} | {_ratio(line['over_dense'])} |\n"
    text += "\nMemory that an embedding of 1,000,000 x 256 takes to train with Adam, of the dense table's:"
    shares = [f" {own['bytes'] / own['dense_bytes']:.2%} at rank {own['rank']}" for own in report["memory"]]
    return text + f"{','.join(shares)}.\n"


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f} ({found['quartiles'][0]:.2f} to {found['quartiles'][1]:.2f})"


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and commit."""
    code = (
        "import json, torch; from bayestrain.train.environment import describe_environment as d; "
        f"print(json.dumps(d(torch.device({device!r}))))"
    )
    places = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=places)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--old", type=Path, help="the src folder of the old version; left out: taken from git")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--commit", help="of the new version, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    options = parser.parse_args()
    if options.page:
        (options.results / "README.md").write_text(page(options.results))
        return
    versions = {
        name: Version(source, options.device)
        for name, source in (("old", old_source(options.old)), ("new", ROOT / "src"))
    }
    lines: list[dict[str, Any]] = []

    report = {
        "command": f"python benchmarks/old_and_new.py --device {options.device} --rounds {options.rounds}",
        "old_commit": OLD_COMMIT,
        "limit": LIMIT,
        "rows": lines,
        "load_average": list(os.getloadavg()),
        "environment": environment(options.device),
    }
    if options.commit:
        report["environment"]["commit"] = options.commit
    options.results.mkdir(parents=True, exist_ok=True)

    def add(row: str, measure: Mapping[str, Callable[[], float]], rounds: int) -> None:
        lines.append({"row": row, **compare(measure, rounds)})
        print(described(lines[-1]), flush=True)
        if not options.only:  # after every row, so that a run that is stopped leaves what it has
            text = json.dumps(report, indent=1) + "\n"
            (options.results / f"old-and-new-{options.device}.json").write_text(text)
            (options.results / "README.md").write_text(page(options.results))

    for row in versions["new"].rows:
        if options.only not in row:
            continue
        calls = {name: version.ask(open=row)["calls"] for name, version in versions.items()}
        found = {name: measurement(version, "ours", 0.05) for name, version in versions.items()}
        if "dense" in calls["new"]:
            found["dense"] = measurement(versions["new"], "dense", 0.05)
        fewer = max(options.rounds // 3, 3) if found["old"][1] else options.rounds
        add(row, {name: measure for name, (measure, _) in found.items()}, fewer)
    if options.device == "cpu" and not options.only:
        for row, code in IMPORTS.items():
            add(row, {name: partial(version.imported, code) for name, version in versions.items()}, 7)
    slower = [line["row"] for line in lines if line["over_old"]["median"] > LIMIT]
    print(f"slower than {LIMIT} of before: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
