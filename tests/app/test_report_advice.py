"""What the report tells its reader to do next, and the facts that make it say so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import LAYERS, Json, edit, load, write_run
from safetensors.numpy import load_file, save_file

from bayestrain.app.report.facts import advice
from bayestrain.app.report.read import read_run


def said(folder: Path) -> str:
    return " ".join(advice(read_run(folder)))


def with_ends(*ends: list[int]) -> Any:
    return {name: (*about[:4], end) for (name, about), end in zip(LAYERS.items(), ends, strict=True)}


FULL = [starts for _, _, _, starts, _ in LAYERS.values()]


@pytest.mark.parametrize(("ends", "wanted", "unwanted"), [
    ([[6, 20, 3], [20], [4, 20, 8, 2]], "3 of 8 bonds kept the maximum rank of 20. If accuracy", "collapsed"),
    ([[6, 20, 3], [20], [4, 20, 8, 2]], "for example to 40", "No rank was pruned"),
    ([[18, 7, 9], [7], [4, 8, 8, 2]], "Nothing here", "maximum rank"),  # their modes limit these bonds
    (FULL, "No rank was pruned: train longer (epochs in [fit]), or raise weight in [prior], which reached 0.200",
     "max"),
    ([[6, 9, 3], [1], [1, 1, 1, 1]], "2 layers collapsed to rank 1: fc1, fc2. If they are bottlenecks", "max"),
])  # fmt: skip
def test_ranks(tmp_path: Path, ends: list[list[int]], wanted: str, unwanted: str) -> None:
    text = said(write_run(tmp_path / "run", layers=with_ends(*ends), weight=0.2))
    assert wanted in text
    assert unwanted not in text


def test_a_cut_that_cost_accuracy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    validation = load(folder / "result.json")["validation"]
    edit(folder, validation={**validation, "accuracy": validation["accuracy"] - 0.031})
    assert "The final cut cost 3.1 points of validation accuracy" in said(folder)


@pytest.mark.parametrize(("temper", "claim"), [(3.0, "overconfident"), (0.4, "underconfident")])
def test_confidence_that_is_off(tmp_path: Path, temper: float, claim: str) -> None:
    folder = write_run(tmp_path / "run", temper=temper)
    assert f"It is {claim} (" in said(folder)
    assert f"predict at temperature {temper:.2f}, which lowers the calibration error from" in said(folder)
    edit(folder, calibrated=None)
    assert "calibrate on validation data, or train a posterior" in said(folder)


@pytest.mark.parametrize(("factor", "claim"), [(0.4, "narrow"), (3.0, "wide")])
def test_intervals_that_are_off(tmp_path: Path, factor: float, claim: str) -> None:
    folder = write_run(tmp_path / "run", "regression")
    tensors = load_file(folder / "predictions.safetensors")
    save_file({**tensors, "std": (factor * tensors["std"]).astype(np.float32)}, folder / "predictions.safetensors")
    assert f"Its intervals are too {claim}" in said(folder)


def test_particles(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "posterior")
    result = load(folder / "result.json")
    posterior = {**result["posterior"], "warnings": ["The particles have collapsed: start them apart."]}
    edit(folder, posterior=posterior)
    assert said(folder) == "The particles have collapsed: start them apart."
    alone = result["metrics"]["log_likelihood"] + 0.01
    edit(folder, posterior={**posterior, "warnings": [], "mean_log_likelihood": alone})
    assert "The particles together are no better than one alone" in said(folder)


@pytest.mark.parametrize(("change", "wanted"), [
    (lambda x: {**x, "validation": {"log_likelihood": -1.0 - abs(x["epoch"] - 6) / 10}},
     "It overfits: validation log likelihood was best at epoch 6 (-1.00) and ended at -2.40"),
    (lambda x: {**x, "validation": {"log_likelihood": -3.0 + x["epoch"] / 10}}, "still rising at the end"),
    (lambda x: {**x, "phase": "train"}, "Nothing here"),  # no rank was to move
], ids=["overfitting", "too short", "no search"])  # fmt: skip
def test_what_the_history_says(tmp_path: Path, change: Callable[[Json], Json], wanted: str) -> None:
    no_search = wanted == "Nothing here"
    folder = write_run(tmp_path / "run", layers=with_ends(*FULL) if no_search else None)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    (folder / "history.jsonl").write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    assert wanted in said(folder)
