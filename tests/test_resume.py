"""Killed at any moment, a run that is resumed ends in the very same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SETTINGS = (
    "fit.epochs=4", "fit.finetune_epochs=2", "fit.batch_size=900", "fit.compact_from=2", "fit.compact_tol=0.3",
    "fit.round_tol=0.3", "prior.warmup_epochs=1", "prior.align_every=7",
)  # fmt: skip
KILLS = 10
EXACT = ("model.safetensors", "model.json", "evaluation.safetensors", "spectra.json")
POSTERIOR = ("--particles", "3", "--set", "tensorize.max_rank=6")
POSTERIOR_KILLS = 2


def start(folder: Path, *extra: str) -> subprocess.Popen[bytes]:
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "bayestrain",
        "train",
        "mnist-mini",
        "--out",
        str(folder),
        "--quiet",
        *sets,
        *extra,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nobody disturbs, and how long it took."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    started = time.monotonic()
    finish(start(folder))
    return folder, time.monotonic() - started


def kill_and_resume(run: Path, after: float, *extra: str) -> int:
    """How many epochs had been written down when the run was killed."""
    process = start(run, *extra)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    histories = [file for file in (run / "history.jsonl", run / "map" / "history.jsonl") if file.exists()]
    reached = sum(len(history.read_text().splitlines()) for history in histories)
    # Without a config it was killed too early.
    finish(start(run, *extra, "--resume") if (run / "config.toml").exists() else start(run, *extra))
    return reached


def test_killed_at_ten_random_times_the_resumed_run_is_bit_identical(
    reference: tuple[Path, float], tmp_path: Path
) -> None:
    folder, seconds = reference
    draw = random.Random(0)
    runs = [tmp_path / f"run{kill}" for kill in range(KILLS)]
    moments = [draw.uniform(0.3, 1.1) * seconds for _ in runs]
    with ThreadPoolExecutor(2) as pool:  # two processes of one thread each
        reached = list(pool.map(kill_and_resume, runs, moments))
    for run in runs:
        for name in EXACT:
            assert (run / name).read_bytes() == (folder / name).read_bytes(), (run.name, name, reached)
    assert len(set(reached)) > 2, f"the kills all came at the same stage: {reached}"


def test_a_posterior_killed_in_its_map_point_or_later_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = tmp_path / "undisturbed"
    started = time.monotonic()
    finish(start(whole, *POSTERIOR))
    seconds = time.monotonic() - started
    runs = [tmp_path / f"run{kill}" for kill in range(POSTERIOR_KILLS)]
    moments = [seconds * (0.35 + 0.6 * kill / POSTERIOR_KILLS) for kill in range(POSTERIOR_KILLS)]
    with ThreadPoolExecutor(2) as pool:
        reached = list(pool.map(lambda run, after: kill_and_resume(run, after, *POSTERIOR), runs, moments))
    for run in runs:
        for name in ("posterior.safetensors", "model.json", "evaluation.safetensors", "spectra.json", "map/model.json"):
            assert (run / name).read_bytes() == (whole / name).read_bytes(), (run.name, name, reached)
    assert len(set(reached)) > 1, f"the kills all came at the same stage: {reached}"


def test_the_run_that_was_killed_really_cut_ranks(reference: tuple[Path, float]) -> None:
    """Else the tests above would say nothing about cores that change their shapes."""
    lines = (reference[0] / "history.jsonl").read_text().splitlines()
    sizes = [line.split('"params": ')[1].split(",")[0] for line in lines]
    assert len(set(sizes)) > 1, sizes
