"""The example keeps its promise, run for real as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str) -> tuple[str, dict[str, float]]:
    """What an example prints, and the figures in its last line."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(run.stdout.splitlines()[-1])


def test_there_are_no_other_examples() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {"own_loop.py", "posterior.py"}


def test_a_loop_of_ones_own_ends_small_and_good() -> None:
    output, figures = run_example("own_loop.py")
    assert figures["dense_params"] == 496_885
    assert figures["ratio"] >= 40
    assert figures["accuracy"] >= figures["dense_accuracy"] - 0.005
    for line in ("layer 1: 1 20 20 20 1  ->  1 ", "times smaller", "parameters before"):
        assert line in output


def test_a_posterior_of_ones_own_is_good_and_knows_strange_digits() -> None:
    _, figures = run_example("posterior.py")
    assert figures["accuracy"] > 0.9
    assert figures["log_likelihood"] > figures["mean_log_likelihood"]
    assert figures["digits"] == 0.5  # nothing is told from itself
    assert figures["on their side"] > 0.8
    assert figures["quarters swapped"] > 0.8
