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
Ranks = tuple[int, ...]
FAULTS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, SafetensorError, TypeError, ValueError)
"""What damaged files raise: RecursionError comes from deep JSON, OverflowError from huge integers."""


@dataclass(frozen=True)
class Layer:
    """One layer; `ranks` has one entry per bond, and none for a dense layer.

    `dense` and `now` are its numbers of parameters, 0 where unknown. `spectrum` has what each bond held just before the
    final cut, largest first, and how many of these values it kept.
    """

    name: str
    ranks: Ranks
    start_ranks: Ranks
    format: str
    layout: str
    shape: Ranks
    dense: int
    now: int
    spectrum: tuple[tuple[Array, int], ...]


@dataclass(frozen=True)
class Run:
    """What the files of a run folder say; `result` is empty while the run is unfinished.

    `predictions` are arrays over the test inputs: "probabilities" and "labels" of classes, or "mean", "std" and
    "targets" of values, with "aleatoric" and "epistemic" uncertainty.
    """

    folder: Path
    result: Json
    history: list[Json]
    layers: list[Layer]
    predictions: Mapping[str, Array]
    config: Json

    def scores(self, name: str) -> dict[str, float]:
        """The "metrics", "calibrated" or "validation" scores; an unfinished run has those of its last epoch."""
        last: Json = next((line for line in reversed(self.history) if line.get(name)), {})
        return {**(self.result.get(name) or last.get(name) or {})}

    @property
    def name(self) -> str:
        return str(self.config.get("run", {}).get("name") or self.folder.resolve().name)

    @property
    def task(self) -> str:
        return str(self.result.get("task") or self.config.get("run", {}).get("likelihood", "other"))

    @property
    def parameters(self) -> int:
        return int((self.result or self.history[-1])["parameters"])

    @property
    def posterior(self) -> Json:
        """What is known of the particles; empty for one network."""
        return self.result.get("posterior") or {}

    @property
    def tensor_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.ranks]

    @property
    def progress(self) -> str:
        """How far an unfinished run has come."""
        fit = self.config.get("fit", {})
        epochs = fit.get("epochs", 0) + fit.get("search", True) * fit.get("finetune_epochs", 0)
        return f"{self.history[-1]['epoch']}" + (f" of {epochs}" if epochs else "")

    def class_name(self, label: int) -> str:
        classes = self.result.get("classes") or ()
        return str(classes[label]) if label < len(classes) else str(label)


def read_run(folder: Path) -> Run:
    """Read a run folder; without ``result.json`` the run is unfinished and its history is enough for a page."""
    result, history = load(folder / "result.json"), _history(folder / "history.jsonl")
    if not result and not history:
        raise DataError(
            f"{folder} is not a run folder: it has neither result.json nor a history.jsonl with an epoch in it. "
            "Give a folder that `bayestrain train` or fit(folder=) has written."
        )
    spectra = load(folder / "spectra.json", _spectra)
    config = load(folder / "config.toml", tomllib.loads)
    with reading(folder / "predictions.safetensors") as path:
        predictions = _predictions(path)
    with reading(folder / "result.json"):
        run = Run(folder, result, history, _layers(result, history, spectra), predictions, config)
        if run.parameters < 1 or not all(isinstance(v, float | int) for v in run.scores("metrics").values()):
            raise ValueError("parameters and metrics must be numbers")
        return run


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
    """What every bond held before the final cut, and how many values it kept, by layer."""
    return {
        name: tuple(zip((np.asarray(bond, float) for bond in about["bonds"]), _ranks(about["kept"]), strict=True))
        for name, about in json.loads(text)["layers"].items()
    }


def _layers(result: Json, history: list[Json], spectra: Json) -> list[Layer]:
    """All layers in the network's order; an unfinished run knows only the ranks in its history."""
    begins = result.get("start_ranks") or (history[0]["ranks"] if history else {})
    ends = result.get("ranks") or (history[-1]["ranks"] if history else {})
    described, layers = result.get("layers") or {}, []
    for name in dict.fromkeys([*described, *ends]):
        about, ranks = described.get(name) or {}, _ranks(ends.get(name, ()))
        start, shape = _ranks(begins.get(name, ranks)), _ranks(about.get("shape") or ())
        if len(start) != len(ranks):
            raise ValueError(f"layer {name!r} has {len(ranks)} ranks but {len(start)} start_ranks")
        form, layout = (str(about.get(key) or "") for key in ("format", "layout"))
        dense, now = (int(about.get(key, 0)) for key in ("dense", "now"))
        layers.append(Layer(name, ranks, start, form, layout, shape, dense, now, spectra.get(name, ())))
    return layers


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


def _ranks(values: Any) -> Ranks:
    return tuple(int(value) for value in values)
