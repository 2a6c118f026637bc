"""Reads a run folder into a `Run`; a file that is damaged is named in a `DataError`."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bayestrain.errors import DataError
from bayestrain.files import check_files, reading

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Json = dict[str, Any]

USUAL: Json = {
    "task": "other", "dense_parameters": 0, "ranks": {}, "start_ranks": {}, "layers": {},
    "metrics": {}, "calibrated": {}, "validation": {}, "posterior": {}, "classes": (),
}  # fmt: skip
"""The entries of a result that may be missing or null."""


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say; the `result` of an unfinished run is that of its last epoch.

    `predictions`: arrays over the test inputs, those of the file with "confidence" and "right", or "errors" in std.
    """

    folder: Path
    finished: bool
    result: Json
    history: list[Json]
    predictions: Arrays
    config: Json

    @property
    def progress(self) -> str:
        """How far an unfinished run has come."""
        fit = self.config.get("fit", {})
        epochs = fit.get("epochs", 0) + fit.get("search", True) * fit.get("finetune_epochs", 0)
        return f"{self.history[-1]['epoch']}" + (f" of {epochs}" if epochs else "")


def read_run(folder: Path) -> Run:
    """Read a run folder; without ``result.json`` the run is unfinished and its history is enough for a page."""
    check_files(folder)
    result, history = load(folder / "result.json"), _history(folder / "history.jsonl")
    finished, config = bool(result), load(folder / "config.toml")
    predictions = _predictions(folder / "predictions.safetensors")
    if not finished and not history:
        raise DataError(f"{folder} is not a run folder: it has neither result.json nor an epoch in history.jsonl.")
    with reading(folder / "result.json"):
        if not finished:
            result = {key: history[-1][key] for key in ("parameters", "ranks")}
            result |= {"start_ranks": history[0]["ranks"], "task": config.get("run", {}).get("likelihood")}
            result["validation"] = next((v for line in reversed(history) if (v := line["validation"])), None)
        known = USUAL | {key: value for key, value in result.items() if value is not None}
        numbers = [*known["metrics"].values(), *(about["dense"] / about["now"] for about in known["layers"].values())]
        if known["parameters"] < 1 or not all(isinstance(number, float | int) for number in numbers):
            raise ValueError("parameters and metrics must be numbers")
        if any(len(ranks) != len(known["start_ranks"].get(name, ())) for name, ranks in known["ranks"].items()):
            raise ValueError("ranks and start_ranks do not fit each other")
    return Run(folder, finished, known, history, predictions, config)


def load(path: Path) -> Json:
    """The object in a JSON or TOML file; empty if there is no such file."""
    with reading(path):
        parse = tomllib.loads if path.suffix == ".toml" else json.loads
        found = parse(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__} instead of an object")
        return found


def _history(path: Path) -> list[Json]:
    """A record for each epoch, in order; one written twice counts once, and a last line cut short is dropped."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if path.is_file() else []
    records: dict[int, Json] = {}
    for place, line in enumerate(lines, start=1):
        with reading(Path(f"{path}, line {place},")):
            content = {key: value for key, value in json.loads(line).items() if value is not None}
            records[int(content["epoch"])] = {"phase": "train", "ranks": {}, "validation": {}, **content}
    return [records[number] for number in sorted(records)]


def _predictions(path: Path) -> Arrays:
    """Arrays in double precision; those of values have a column per output."""
    with reading(path):
        tensors = load_file(path) if path.is_file() else {}
        found = {name: t.astype(np.float64) if t.dtype.kind == "f" else t for name, t in tensors.items()}
        if "mean" in found:
            found = {name: values.reshape(len(values), -1) for name, values in found.items()}
        names = {"total", "aleatoric", "epistemic", "labels", "mean", "std", "targets"} & found.keys()
        if found and (len(names) < 3 or len({found[name].shape for name in names}) > 1):
            raise ValueError("its tensors do not fit each other")
        if "mean" in found:
            found["errors"] = (found["targets"] - found["mean"]) / np.maximum(found["std"], 1e-30)
        elif found:
            found["confidence"] = found["probabilities"].max(1)
            found["right"] = found["probabilities"].argmax(1) == found["labels"]
        return found
