"""Runs of several processes against the same run of one: real processes that torchrun starts, on the CPU with gloo."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("torchrun_worker.py")
KINDS = ("tensors", "loader", "function", "sharded", "own_loop", "svgd", "anchored", "sgld")


def repeated(command: list[str], state: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; again, with `state` as it was, if a process aborts.

    PyTorch's own threads abort about one in fifty runs as a process ends, also those of a script without BayesTrain:
    "terminate called without an active exception".
    """
    kept = None if state is None else state.with_name(f"{state.name} kept")
    if state is not None and kept is not None and state.exists():
        shutil.copytree(state, kept)
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)
        if done.returncode == 0 or "SIGABRT" not in done.stdout + done.stderr:
            break
        if state is not None and kept is not None:
            shutil.rmtree(state, ignore_errors=True)
            if kept.exists():
                shutil.copytree(kept, state)
    return done


def start(processes: int, *arguments: str, restarts: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """The worker in so many processes, none of which outlives this call."""
    options = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options] if processes > 1 else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BAYESTRAIN_TIMEOUT": "60", **variables}
    state = Path(arguments[2]) if arguments[1] == "run" else None
    return repeated([*torchrun, str(WORKER), *arguments], state, env=environment)


def result(processes: int, folder: Path, *arguments: str, restarts: int = 0) -> Any:
    out = folder / f"{processes}.json"
    out.unlink(missing_ok=True)
    done = start(processes, str(out), *arguments, restarts=restarts)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()) if out.exists() else None


def compare(found: Any, expected: Any, where: str = "") -> None:
    """The same ranks exactly, the same numbers to 1e-8."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            compare(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            compare(one, other, f"{where}/{i}")
    else:
        close = pytest.approx(expected, rel=1e-8, abs=1e-8) if isinstance(expected, float) else expected
        assert found == close, where


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def one(folder: Path) -> Any:
    return result(1, folder, *KINDS, "mesh")


@pytest.fixture(scope="module")
def two(folder: Path) -> Any:
    return result(2, folder, *KINDS, "stream")


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(kind: str, one: Any, two: Any) -> None:
    compare(two[kind], one[kind], kind)
    ranks = one[kind]["ranks"]
    if kind != "own_loop":
        assert sum(ranks[-1]["0"]) < sum(ranks[0]["0"]), "no rank was cut, so cuts were not compared"


def test_uneven_shards_are_all_read(two: Any) -> None:
    assert two["stream"]["plan"] == [97, 3]
    assert two["stream"]["curve"][-2] < two["stream"]["curve"][0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["particles", *(pytest.param(kind, marks=SLOW) for kind in ("network", "sharded"))])
def test_a_killed_worker_is_replaced(kind: str, tmp_path: Path) -> None:
    expected = result(1, tmp_path, "run", str(tmp_path / "whole"), kind, "run")
    compare(result(2, tmp_path, "run", str(tmp_path / "killed"), kind, "kill", restarts=1), expected)


@pytest.mark.slow
def test_four_processes_train_as_one(folder: Path, one: Any) -> None:
    found = result(4, folder, *KINDS, "mesh")
    for kind, expected in one.items():
        compare(found[kind], expected, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["network", "particles", "sharded"])
def test_a_checkpoint_is_resumed_by_other_numbers_of_processes(kind: str, tmp_path: Path) -> None:
    expected = result(1, tmp_path, "run", str(tmp_path / "whole"), kind, "run")
    assert result(4, tmp_path, "run", str(tmp_path / "four"), kind, "stop") is None
    assert result(1, tmp_path, "run", str(tmp_path / "alone"), kind, "stop") is None
    for processes, start_from in ((3, "four"), (1, "four"), (2, "alone")):
        copied = tmp_path / f"{start_from} by {processes}"
        shutil.copytree(tmp_path / start_from, copied)
        compare(result(processes, tmp_path, "run", str(copied), kind, "resume"), expected, f"{start_from} {processes}")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "processes", "message"), [
    ("config", 2, "fit.lr is 0.01 in process 0 and 0.5 in process 1"),
    ("code", 2, "of another day"),
    ("memory", 2, "Process 1 of 2 failed: RuntimeError: .*memory"),
    ("particles", 3, "3 processes with posterior.replicas 2 do not go with 2 particles"),
])  # fmt: skip
def test_process_0_says_what_is_wrong(what: str, processes: int, message: str, tmp_path: Path) -> None:
    done = start(processes, str(tmp_path / "out"), "wrong", what)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("process 0")]
    assert done.returncode != 0
    assert re.search(message, line)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("map", 2), ("svgd", 2), ("svgd", 3)])
def test_the_bytes_of_a_step_are_those_of_the_formula(kind: str, processes: int, tmp_path: Path) -> None:
    benchmark, out = WORKER.parents[2] / "benchmarks/scaling.py", tmp_path / "out.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*torchrun, str(benchmark), "--work", kind, "512", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = repeated(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["bytes"] == found["formula"] > 0


def test_nobody_to_meet() -> None:
    lonely = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "BAYESTRAIN_TIMEOUT": "2"}
    done = start(1, "out", "tensors", **lonely)
    assert done.returncode != 0
    assert "Process 1 of 2 has not met the others at 127.0.0.1:1 within 2 s" in done.stdout + done.stderr


def test_the_command_line_trains_with_two_processes(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom torchrun_worker import classes\n"
        "def build(): return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3)).double()\n"
        "def loaders(): return classes(97), classes(50), classes(40)\n"
    )
    settings = ["epochs=2", "finetune_epochs=1", "batch_size=32", "sharded=true"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bayestrain",
        "train", "--model=nets:build", "--data=nets:loaders", "--set=tensorize.keep_dense=['0']", "--device=cpu",
        *[f"--set=fit.{each}" for each in settings], "--out=run",
    ]  # fmt: skip
    path = os.pathsep.join([str(WORKER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = repeated(command, tmp_path / "run", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("epoch 3/3") for line in done.stdout.splitlines()) == 1, "only process 0 prints"
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run/history.jsonl").read_text().splitlines()) == 4
