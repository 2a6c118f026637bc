"""Run an experiment with several seeds and keep what a table needs, under ``results/NAME/PRESET/``, with a summary.

    python tools/run_seeds.py mnist --seeds 0 1 2 3 4 --jobs 2

Each run is a process of its own with one thread, so that two share two cores without getting in each other's way.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KEPT = ("result.json", "environment.json", "config.toml")
SUMMARISED = ("params", "ratio", "accuracy", "log_likelihood", "ece", "seconds")


def run(name: str, preset: str, seed: int, runs: Path, results: Path, extra: list[str]) -> dict[str, object] | None:
    """One seed; None if it failed, which is said and counted."""
    out = runs / f"{name}-{preset}-seed{seed}"
    command = [sys.executable, "-m", "bayestrain", "train", name, "--preset", preset, "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(out), "--quiet", *extra], env=environment, check=False)
    if done.returncode:
        print(f"seed {seed} failed with exit code {done.returncode}", flush=True)
        return None
    kept = results / f"seed-{seed}"
    kept.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copy(out / file, kept / file)
    result: dict[str, object] = json.loads((out / "result.json").read_text())
    print(f"seed {seed}: " + ", ".join(f"{key} {result[key]:.5g}" for key in SUMMARISED), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments, extra = parser.parse_known_args()
    results = arguments.results / arguments.name / arguments.preset
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(
            pool.map(
                lambda seed: run(arguments.name, arguments.preset, seed, arguments.runs, results, extra),
                arguments.seeds,
            )
        )
    good = [result for result in found if result is not None]
    summary = {
        "experiment": arguments.name,
        "preset": arguments.preset,
        "seeds": arguments.seeds,
        "failed": [seed for seed, result in zip(arguments.seeds, found, strict=True) if result is None],
        "command": f"python tools/run_seeds.py {' '.join(sys.argv[1:])}",
        "commits": sorted({str(result["commit"]) for result in good}),
        **{
            key: {
                "mean": statistics.fmean(float(str(result[key])) for result in good),
                "spread": statistics.stdev(float(str(result[key])) for result in good) if len(good) > 1 else 0.0,
                "each": [result[key] for result in good],
            }
            for key in SUMMARISED
            if good
        },
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
