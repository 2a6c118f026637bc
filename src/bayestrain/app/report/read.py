"""Reads a run folder into a `Run`; a file that is damaged is named in a `DataError`."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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

    `sizes` are its numbers of parameters: "dense", "start" and "now", where known. `spectrum` has what each bond held
    just before the final cut, largest first, and how many of these values it kept.
    """

    name: str
    ranks: Ranks = ()
    start_ranks: Ranks = ()
    format: str = ""
    layout: str = ""
    shape: Ranks = ()
    sizes: dict[str, float] = field(default_factory=dict)
    spectrum: tuple[tuple[Array, int], ...] = ()

    @property
    def ratio(self) -> float | None:
        return self.sizes["dense"] / self.sizes["now"] if self.sizes.get("now") and "dense" in self.sizes else None


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
    config_text: str
    environment: Json

    def scores(self, name: str) -> dict[str, float]:
        """The "metrics", "calibrated" or "validation" scores; an unfinished run has those of its last epoch."""
        last: Json = next((line for line in reversed(self.history) if line.get(name)), {})
        return {**(self.result.get(name) or last.get(name) or {})}

    @property
    def name(self) -> str:
        own = self.result.get("name") or self.config.get("run", {}).get("name")
        return str(own or self.folder.resolve().name)

    @property
    def task(self) -> str:
        known = self.scores("metrics") or self.scores("validation")
        guess = "classification" if "accuracy" in known else "regression" if "rmse" in known else "other"
        return str(self.result.get("task") or guess)

    @property
    def parameters(self) -> int:
        return int((self.result or self.history[-1])["parameters"])

    @property
    def ratio(self) -> float | None:
        """How many times fewer parameters the network has than its dense counterpart."""
        return self.result["dense_parameters"] / self.parameters if self.result else None

    @property
    def posterior(self) -> Json:
        """What is known of the particles; empty for one network."""
        return self.result.get("posterior") or {}

    @property
    def tensor_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.ranks]

    @property
    def epochs(self) -> int | None:
        """How many epochs the settings request."""
        fit = self.config.get("fit", {})
        return fit["epochs"] + fit.get("finetune_epochs", 0) * fit.get("search", True) if "epochs" in fit else None

    def class_name(self, label: int) -> str:
        classes = self.result.get("classes") or ()
        return str(classes[label]) if label < len(classes) else str(label)


def read_run(folder: Path) -> Run:
    """Read a run folder; without ``result.json`` the run is unfinished and its history is enough for a page."""
    result, environment, cut = (read_object(folder / f"{name}.json") for name in ("result", "environment", "spectra"))
    history = _history(folder / "history.jsonl")
    if not result and not history:
        raise DataError(
            f"{folder} is not a run folder: it has neither result.json nor a history.jsonl with an epoch in it. "
            "Give a folder that `bayestrain train` or fit(folder=) has written."
        )
    with reading(folder / "config.toml") as path:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        config = tomllib.loads(text)
    with reading(folder / "spectra.json"):
        spectra = {
            name: tuple(zip((np.asarray(bond, float) for bond in about["bonds"]), _ranks(about["kept"]), strict=True))
            for name, about in (cut.get("layers") or {}).items()
        }
    with reading(folder / "predictions.safetensors") as path:
        predictions = _predictions(path)
    with reading(folder / "result.json"):
        run = Run(folder, result, history, _layers(result, history, spectra), predictions, config, text, environment)
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


def read_object(path: Path) -> Json:
    """The object in a JSON file; empty if there is no such file."""
    with reading(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__} instead of an object")
        return found


def _history(path: Path) -> list[Json]:
    """A record for each epoch, in order; one written twice counts once, and a last line cut short is dropped."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records: dict[int, Json] = {}
    for place, line in enumerate(lines, start=1):
        with reading(Path(f"{path}, line {place},")):
            try:
                content = json.loads(line)
            except ValueError:
                if place == len(lines):
                    break
                raise
            usual = {"phase": "train", "ranks": {}, "validation": {}}
            records[int(content["epoch"])] = {**usual, **{key: v for key, v in content.items() if v is not None}}
    return [records[number] for number in sorted(records)]


def _layers(result: Json, history: list[Json], spectra: Mapping[str, Any]) -> list[Layer]:
    """All layers in the network's order; an unfinished run knows only the ranks in its history."""
    begins = {name: ranks for record in reversed(history) for name, ranks in record["ranks"].items()}
    ends = {name: ranks for record in history for name, ranks in record["ranks"].items()}
    begins |= result.get("start_ranks") or {}
    ends = result.get("ranks") or ends
    described, layers = result.get("layers") or {}, []
    for name in dict.fromkeys([*described, *ends]):
        about, ranks = described.get(name) or {}, _ranks(ends.get(name, ()))
        start = _ranks(begins.get(name, ranks))
        if len(start) != len(ranks):
            raise ValueError(f"layer {name!r} has {len(ranks)} ranks but {len(start)} start_ranks")
        form, layout = (str(about.get(key) or "") for key in ("format", "layout"))
        sizes = {key: float(about[key]) for key in ("dense", "start", "now") if key in about}
        shape = _ranks(about.get("shape") or ())
        layers.append(Layer(name, ranks, start, form, layout, shape, sizes, spectra.get(name, ())))
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
