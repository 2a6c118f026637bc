"""Reads a run folder into a `Run`; a file that is damaged is named in a `DataError`."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bayestrain.errors import DataError

Array = NDArray[Any]
Json = dict[str, Any]
FAULTS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, SafetensorError, TypeError, ValueError)
"""What damaged files raise: RecursionError comes from deep JSON, OverflowError from huge integers."""


USUAL: Json = {
    "task": "other", "dense_parameters": 0, "ranks": {}, "start_ranks": {}, "layers": {},
    "metrics": {}, "calibrated": {}, "validation": {}, "posterior": {}, "classes": (),
}  # fmt: skip
"""The entries of a result that may be missing or null."""


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say; the `result` of an unfinished run is that of its last epoch.

    `spectra` has, for each layer, what each bond held just before the final cut, largest first, and how many of these
    values it kept. `predictions` are arrays over the test inputs: "probabilities" and "labels" of classes, or "mean",
    "std" and "targets" of values, with "aleatoric" and "epistemic" uncertainty.
    """

    folder: Path
    finished: bool
    result: Json
    history: list[Json]
    spectra: dict[str, list[tuple[Array, int]]]
    predictions: Mapping[str, Array]
    config: Json

    @property
    def name(self) -> str:
        return str(self.config.get("run", {}).get("name") or self.folder.resolve().name)

    @property
    def progress(self) -> str:
        """How far an unfinished run has come."""
        fit = self.config.get("fit", {})
        epochs = fit.get("epochs", 0) + fit.get("search", True) * fit.get("finetune_epochs", 0)
        return f"{self.history[-1]['epoch']}" + (f" of {epochs}" if epochs else "")


def read_run(folder: Path) -> Run:
    """Read a run folder; without ``result.json`` the run is unfinished and its history is enough for a page."""
    result, history = load(folder / "result.json"), _history(folder / "history.jsonl")
    spectra, config = load(folder / "spectra.json", _spectra), load(folder / "config.toml", tomllib.loads)
    if not result and not history:
        raise DataError(
            f"{folder} is not a run folder: it has neither result.json nor a history.jsonl with an epoch in it. "
            "Give a folder that `bayestrain train` or fit(folder=) has written."
        )
    with reading(folder / "predictions.safetensors") as path:
        predictions = _predictions(path)
    with reading(folder / "result.json"):
        known = USUAL | {key: value for key, value in (result or _so_far(history, config)).items() if value is not None}
        numbers = [*known["metrics"].values(), *(about["dense"] / about["now"] for about in known["layers"].values())]
        if known["parameters"] < 1 or not all(isinstance(number, float | int) for number in numbers):
            raise ValueError("parameters and metrics must be numbers")
        if any(len(ranks) != len(known["start_ranks"].get(name, ())) for name, ranks in known["ranks"].items()):
            raise ValueError("ranks and start_ranks do not fit each other")
    return Run(folder, bool(result), known, history, spectra, predictions, config)


def _so_far(history: list[Json], config: Json) -> Json:
    """What the history tells of the result of an unfinished run."""
    first, last = history[0], history[-1]
    task = config.get("run", {}).get("likelihood")
    validation: Json = next((line["validation"] for line in reversed(history) if line["validation"]), {})
    ranks = {"start_ranks": first["ranks"], "ranks": last["ranks"]}
    return {"task": task, "parameters": last["parameters"], "validation": validation, **ranks}


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Turn whatever goes wrong with the content of `path` into an error that names it."""
    try:
        yield path
    except FAULTS as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{path} is damaged or was not written by bayestrain: {reason}. Restore it, or delete it to leave out what "
            "it holds."
        ) from error


def load(path: Path, parse: Callable[[str], Any] = json.loads) -> Json:
    """The object in a JSON or TOML file; empty if there is no such file."""
    with reading(path):
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


def _spectra(text: str) -> Json:
    return {
        name: list(zip((np.asarray(bond, float) for bond in about["bonds"]), about["kept"], strict=True))
        for name, about in json.loads(text)["layers"].items()
    }


def _predictions(path: Path) -> dict[str, Array]:
    """Arrays in double precision; those of values have a column per output."""
    tensors = load_file(path) if path.is_file() else {}
    found = {name: t.astype(np.float64) if t.dtype.kind == "f" else t for name, t in tensors.items()}
    if "mean" in found:
        found = {name: values.reshape(len(values), -1) for name, values in found.items()}
    names = [name for name in ("total", "aleatoric", "epistemic", "labels", "mean", "std", "targets") if name in found]
    if found and (len(names) < 3 or len({found[name].shape for name in names}) > 1):
        raise ValueError("its tensors do not fit each other")
    return found
