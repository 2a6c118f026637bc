"""A short fault campaign, in a process of its own, which may fork; ``make test-faults`` has 600 faults."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).with_name("faults.py")
KINDS = ("kill", "disk", "handles", "permissions", "damage", "two")

CARELESS = """
import time, torch
from faults import FINAL, JOBS, campaign

def careless(folder, _):  # writes in place, and loses the old model when it is killed half-way
    file = folder / FINAL["save"]
    content = file.read_bytes() if file.exists() else b"new"
    file.write_bytes(content[:100])
    time.sleep(0.3)
    file.write_bytes(content)

torch.set_num_threads(1)
JOBS["save"].run = careless
print(len(campaign(["save"], ["kill"], 4, seed=0)["save, kill"]["broken"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(FAULTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("name", ["train", "save", "fetch"])
def test_no_finished_work_is_lost(name: str) -> None:
    done = run(str(FAULTS), "--jobs", name, "--kinds", *KINDS, "--faults", "12", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(int(line.partition("'faults': ")[2].partition(",")[0]) for line in done.stdout.splitlines()) == 12


def test_a_broken_promise_is_seen() -> None:
    done = run("-c", CARELESS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
