"""Train several seeds of an experiment and record them under `paper/results/EXPERIMENT/LABEL/`, with a summary.

    python -m paper.seeds mnist --label again --seeds 0 1 2 --jobs 2
    python -m paper.seeds cifar10-cnn --label x32-again --seeds 0 --target-ratio 32 --device cuda

Each seed is a process of its own with one CPU thread. A finished seed is only recorded, if it had these settings; one
that was stopped is resumed. --around, --from and --point take a label, which means its seed in --runs, or a folder, in
which {seed} stands for the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bayestrain.errors import BayesTrainError
from bayestrain.files import write_json
from bayestrain.train import config as configs
from paper import experiment
from paper.records import RecordError, figures, read_run, summarise

KEPT = ("result.json", "environment.json", "config.toml", "paper.json")
NETWORK = ("model.json", "model.safetensors")
LARGEST = 1 << 20
"""Bytes of the weights of a network that is kept."""

FIRST = ("validation.safetensors", "predictions.safetensors")
"""Kept of one seed: predictions for the held-out images, and, of a posterior, for the test images."""


def run_folder(runs: Path, name: str, label: str, seed: int) -> Path:
    """Where a seed is trained."""
    return runs / f"{name}-{label}-seed{seed}"


def for_seed(given: argparse.Namespace, seed: int) -> argparse.Namespace:
    """The options with the runs that they name as folders of this seed."""
    own = argparse.Namespace(**vars(given))
    for option in ("around", "start", "point"):
        if value := getattr(given, option):
            folder = str(run_folder(given.runs, given.experiment, value, seed))
            setattr(own, option, value.replace("{seed}", str(seed)) if "/" in value or "{" in value else folder)
    return own


def command(given: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """The command that trains one seed."""
    own, words = for_seed(given, seed), [sys.executable, "-m", "paper.experiment", given.experiment]
    names = {"start": "--from"}
    for option in ("preset", "kind", "particles", "around", "epochs", "jitter", "start", "point", "target_ratio",
                   "device"):  # fmt: skip
        if value := getattr(own, option):
            words += [names.get(option, "--" + option.replace("_", "-")), str(value)]
    return [
        *words,
        *(word for text in own.overrides for word in ("--set", text)),
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]


def run(given: argparse.Namespace, seed: int) -> bool:
    """Train one seed; False if it failed."""
    out = run_folder(given.runs, given.experiment, given.label, seed)
    if (out / "paper.json").exists():  # written last
        return True
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command(given, seed, out), env=environment, check=False)
    if done.returncode:
        print(f"seed {seed} failed with exit code {done.returncode}", flush=True)
    return done.returncode == 0


def refuse_other_settings(given: argparse.Namespace, seed: int) -> None:
    """Raise a `RecordError` if a finished seed had other settings: it would be recorded as this one."""
    out = run_folder(given.runs, given.experiment, given.label, seed)
    if not (out / "result.json").exists():
        return
    had, wanted = configs.load(out / "config.toml"), experiment.chosen(for_seed(given, seed), seed)
    if changed := configs.differences(*(configs.flat(*vars(each).values()) for each in (had, wanted))):
        raise RecordError(
            f"{out} is finished and had other settings ({'; '.join(changed)}). Remove it, or give another --label."
        )


def record(given: argparse.Namespace, good: Sequence[int], said: str) -> Path:
    """Copy what is kept of the good seeds, with a summary; returns the group's folder."""
    group = given.results / given.experiment / given.label
    summary = {
        "experiment": given.experiment, "preset": given.preset, "seeds": given.seeds,
        "failed": [seed for seed in given.seeds if seed not in good], "command": said,
    }  # fmt: skip
    folders = [run_folder(given.runs, given.experiment, given.label, seed) for seed in good]
    runs = [read_run(folder, summary) for folder in folders]
    summary["commits"] = sorted({commit for run in runs for commit in run.commits})
    before = json.loads((group / "summary.json").read_text()) if (group / "summary.json").exists() else None
    if before is not None and before["commits"] != summary["commits"] and not given.replace:
        raise RecordError(
            f"{group} was recorded at commits {', '.join(before['commits'])}. Give another --label, or --replace it."
        )
    shutil.rmtree(group, ignore_errors=True)
    for number, (seed, folder, run) in enumerate(zip(good, folders, runs, strict=True)):
        kept = group / f"seed-{seed}"
        kept.mkdir(parents=True)
        small = (folder / NETWORK[1]).exists() and (folder / NETWORK[1]).stat().st_size <= LARGEST
        first = FIRST[: 2 if run.posterior else 1] if number == 0 else ()
        for name in (*KEPT, *(NETWORK if small else ()), *first):
            shutil.copy(folder / name, kept / name)
        print(f"seed {seed}: " + ", ".join(f"{key} {value:.5g}" for key, value in figures(run).items()), flush=True)
    group.mkdir(parents=True, exist_ok=True)
    write_json(group / "summary.json", {**summary, **summarise([figures(run) for run in runs])})
    return group


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `paper.experiment` does not have."""
    parser.add_argument("--label", required=True, help="name of the group of seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="seeds that are trained at the same time")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="where the seeds are trained")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--replace", action="store_true", help="replace a group that was recorded at other commits")


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    experiment.options(parser)
    add_options(parser)
    given = parser.parse_args(words)
    try:
        for seed in given.seeds:  # before hours of training
            experiment.chosen(for_seed(given, seed), seed)
            refuse_other_settings(given, seed)
        with ThreadPoolExecutor(given.jobs) as pool:
            done = list(pool.map(lambda seed: run(given, seed), given.seeds))
        good = [seed for seed, well in zip(given.seeds, done, strict=True) if well]
        print(record(given, good, f"python -m paper.seeds {shlex.join(words)}"))
    except (BayesTrainError, RecordError) as error:
        sys.exit(str(error))
    if len(good) < len(given.seeds):
        sys.exit(1)


if __name__ == "__main__":
    main()
