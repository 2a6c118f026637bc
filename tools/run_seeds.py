"""Run an experiment with several seeds and keep what a table needs, under ``results/NAME/LABEL/``, with a summary.

    python tools/run_seeds.py mnist --seeds 0 1 2 3 4 --jobs 2
    python tools/run_seeds.py mnist --label svgd-20 --seeds 0 1 2 --particles 20

Each run is a process of its own with one thread, so that two share two cores without getting in each other's way. A
finished run is only gathered, if it had these settings; one that was stopped goes on. Networks that are small are kept,
to be evaluated again or to start a posterior around. Of a posterior, the first good seed keeps its answers to the test
images too, for the figure of its uncertainty. Further arguments go to ``bayestrain train``; ``{seed}`` in them is the
seed, as in ``--map runs/cifar10-cnn-x16-seed{seed}``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bayestrain.train import toml
from bayestrain.train.config import RunConfig, differences
from bayestrain.train.records import commits, read_result

KEPT = ("result.json", "environment.json", "config.toml")
NETWORK = ("model.json", "model.safetensors")
LARGEST = 1 << 20
"""Bytes of the weights of a network that is kept."""

ANSWERS = "evaluation.safetensors"
"""The answers to every test image and outside image, some 0.7 MB: kept of one seed only."""

SUMMARISED = ("params", "ratio", "accuracy", "log_likelihood", "ece", "seconds")


def run_folder(runs: Path, name: str, label: str, seed: int) -> Path:
    """Where a seed is trained."""
    return runs / f"{name}-{label}-seed{seed}"


def training(name: str, preset: str, seed: int, out: Path, extra: list[str]) -> list[str]:
    """The command that trains a seed."""
    train = [sys.executable, "-m", "bayestrain", "train", name, "--preset", preset, "--seed", str(seed)]
    return [*train, "--out", str(out), "--quiet", *(word.replace("{seed}", str(seed)) for word in extra)]


def refuse_other_settings(command: list[str], out: Path) -> None:
    """End with a message if a finished run had other settings than `command` asks for; it would be told as its own."""
    asked = subprocess.run([*command, "--print-config"], capture_output=True, text=True, check=False)
    if asked.returncode:
        sys.exit(asked.stderr.strip())
    wanted = RunConfig.from_dict(tomllib.loads(asked.stdout))
    had = toml.load(out / "config.toml").replace("experiment", seed=wanted.experiment.seed)  # the table looks at seeds
    if other := differences(had, wanted):
        sys.exit(f"{out} is finished and had other settings ({'; '.join(other)}). Remove it, or give another --label.")


def run(
    name: str, preset: str, label: str, seed: int, runs: Path, results: Path, extra: list[str]
) -> dict[str, Any] | None:
    """One seed; None if it failed, which is said and counted."""
    out = run_folder(runs, name, label, seed)
    command = training(name, preset, seed, out, extra)
    if not (out / "result.json").exists():
        resume = ["--resume"] if (out / "config.toml").exists() else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *resume], env=environment, check=False)
        if done.returncode:
            print(f"seed {seed} failed with exit code {done.returncode}", flush=True)
            return None
    try:
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        all_commits(out, result)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        print(f"seed {seed} failed: a record of {out} is damaged ({error}). Remove the folder to train it anew.")
        return None
    kept = results / f"seed-{seed}"
    kept.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copy(out / file, kept / file)
    for file in NETWORK:
        (kept / file).unlink(missing_ok=True)
        if (out / NETWORK[1]).exists() and (out / NETWORK[1]).stat().st_size <= LARGEST:
            shutil.copy(out / file, kept / file)
    print(f"seed {seed}: " + ", ".join(f"{key} {result[key]:.5g}" for key in SUMMARISED), flush=True)
    return result


def keep_answers(folders: list[tuple[Path, Path]]) -> None:
    """Keep the answers of the first seed, given as (run, results), and none that an earlier gathering kept."""
    for number, (out, kept) in enumerate(folders):
        if number == 0:
            shutil.copy(out / ANSWERS, kept / ANSWERS)
        else:
            (kept / ANSWERS).unlink(missing_ok=True)


def searched(result: dict[str, Any], out: Path) -> dict[str, float]:
    """Held-out accuracy when a search for ranks ended, before the last cut, and after that and the fine-tuning."""
    history, after = out / "history.jsonl", result.get("validation")
    lines = [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []
    before = [line["validation"] for line in lines if line.get("phase") == "search" and line.get("validation")]
    if not before or not after:
        return {}
    return {"searched_accuracy": before[-1]["accuracy"], "validation_accuracy": after["accuracy"]}


def all_commits(out: Path, result: dict[str, Any]) -> set[str]:
    """The commits that a run was trained at, and so the run that it went on from; a posterior has its MAP point."""
    found = commits(out) | set((result.get("from_run") or {}).get("commits", []))
    point = out / "map"
    return found | all_commits(point, read_result(point)) if (point / "result.json").exists() else found


def figures(result: dict[str, Any], out: Path) -> dict[str, float]:
    """What is summarised of one run; of a posterior also the MAP point's figures, and those without calibration."""
    found = {key: float(result[key]) for key in SUMMARISED}
    posterior = result.get("posterior") or {}
    if "mean_log_likelihood" not in posterior:
        calibrated = result.get("calibrated") or {}
        found |= {f"calibrated_{key}": float(calibrated[key]) for key in ("log_likelihood", "ece") if calibrated}
        return found | searched(result, out)
    known = ("mean_log_likelihood", "temperature", "within_one_rank")  # the last only where ranks were rounded
    found |= {key: float(posterior[key]) for key in known if posterior[key] is not None}
    found |= {f"uncalibrated_{key}": float(posterior["uncalibrated"][key]) for key in ("log_likelihood", "ece")}
    if posterior["ood"]:
        found |= {key: float(posterior["ood"][key]) for key in ("auroc", "auroc_epistemic")}
    if posterior["map"]:
        found |= {f"map_{key}": float(posterior["map"][key]) for key in (*SUMMARISED[:1], *SUMMARISED[2:])}
        if calibrated := posterior["map"]["calibrated"]:
            found |= {f"map_calibrated_{key}": float(calibrated[key]) for key in ("ece", "log_likelihood")}
        if posterior["ood"]:
            found["map_auroc"] = float(posterior["map"]["ood_auroc"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--label", help="name of the folder of results; the preset if left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    arguments, extra = parser.parse_known_args()
    label = arguments.label or arguments.preset
    results = arguments.results / arguments.name / label
    for seed in arguments.seeds:  # before hours of training
        out = run_folder(arguments.runs, arguments.name, label, seed)
        if (out / "result.json").exists():
            refuse_other_settings(training(arguments.name, arguments.preset, seed, out, extra), out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(
            pool.map(
                lambda seed: run(arguments.name, arguments.preset, label, seed, arguments.runs, results, extra),
                arguments.seeds,
            )
        )
    good = [
        (run_folder(arguments.runs, arguments.name, label, seed), results / f"seed-{seed}", result)
        for seed, result in zip(arguments.seeds, found, strict=True)
        if result is not None
    ]
    several = [((result.get("posterior") or {}).get("particles") or 1) > 1 for _, _, result in good]
    keep_answers([(out, kept) for (out, kept, _), particles in zip(good, several, strict=True) if particles])
    rows = [figures(result, out) for out, _, result in good]
    summary = {
        "experiment": arguments.name,
        "preset": arguments.preset,
        "seeds": arguments.seeds,
        "failed": [seed for seed, result in zip(arguments.seeds, found, strict=True) if result is None],
        "command": f"python tools/run_seeds.py {shlex.join(sys.argv[1:])}",
        "commits": sorted(set().union(*(all_commits(out, result) for out, _, result in good))),
        **{
            key: {
                "mean": statistics.fmean(row[key] for row in rows),
                "spread": statistics.stdev(row[key] for row in rows) if len(rows) > 1 else 0.0,
                "each": [row[key] for row in rows],
            }
            for key in (rows[0] if rows else ())
            if all(key in row for row in rows)
        },
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if summary["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
