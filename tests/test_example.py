"""The example keeps its promise, run for real as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"


def test_a_loop_of_ones_own_ends_small_and_good() -> None:
    run = subprocess.run([sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["dense_params"] == 496_885
    assert figures["ratio"] >= 40
    assert figures["accuracy"] >= figures["dense_accuracy"] - 0.005
    for line in ("layer 1: 1 20 20 20 1  ->  1 ", "times smaller", "parameters before"):
        assert line in run.stdout
