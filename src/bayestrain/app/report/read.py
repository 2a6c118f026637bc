"""Reads a run folder into a `Run`: every file is checked, and one that is damaged is named in a `DataError`."""

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
Numbers = dict[str, float]
Ranks = tuple[int, ...]
Spectrum = list[tuple[Array, int]]
"""Per bond, what it held just before the final cut, largest first, and how many of these values it kept."""


@dataclass(frozen=True)
class Layer:
    """One layer; `ranks` has one entry per bond, in the order the run's files list them, and none for a dense layer.

    `sizes` are its numbers of parameters: "dense", "start" and "now", where known.
    """

    name: str
    ranks: Ranks = ()
    start_ranks: Ranks = ()
    format: str = ""
    layout: str = ""
    shape: tuple[int, ...] = ()
    sizes: Numbers = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.sizes["dense"] / self.sizes["now"] if self.sizes.get("now") and "dense" in self.sizes else None


@dataclass(frozen=True)
class Epoch:
    """One line of ``history.jsonl``; its numbers, such as "train_loss" and "parameters", are in `numbers`."""

    number: int
    phase: str
    numbers: Numbers
    validation: Numbers
    diagnostics: Numbers
    ranks: dict[str, Ranks]


@dataclass(frozen=True)
class Classes:
    """Predicted class probabilities of N test inputs; uncertainties are in nats."""

    probabilities: Array
    labels: Array
    total: Array
    aleatoric: Array | None
    epistemic: Array | None
    hardest: Array
    inputs: Array | None
    particles: Array | None

    @property
    def confidence(self) -> Array:
        return np.asarray(self.probabilities.max(1))

    @property
    def right(self) -> Array:
        return np.asarray(self.probabilities.argmax(1) == self.labels)


@dataclass(frozen=True)
class Values:
    """Predictions of N test targets, one column per output; `aleatoric` and `epistemic` are variances."""

    mean: Array
    std: Array
    targets: Array
    aleatoric: Array | None
    epistemic: Array | None

    @property
    def z(self) -> Array:
        """Errors in units of the predicted standard deviation."""
        return np.asarray((self.targets - self.mean) / np.maximum(self.std, 1e-30))


@dataclass(frozen=True)
class Posterior:
    """What a run says of its particles; `own_ranks` has for every layer and bond the rank each particle would keep."""

    method: str
    particles: int
    mean_log_likelihood: float | None
    own_ranks: dict[str, list[Ranks]]
    diagnostics: Numbers
    uncalibrated: Numbers
    ood: dict[str, Any]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """All that the files of a run folder say."""

    folder: Path
    name: str
    task: str
    finished: bool
    parameters: float
    dense_parameters: float | None
    numbers: Numbers
    metrics: Numbers
    calibrated: Numbers
    validation: Numbers
    layers: tuple[Layer, ...]
    history: tuple[Epoch, ...]
    spectra: dict[str, Spectrum]
    posterior: Posterior | None
    predictions: Classes | Values | None
    classes: tuple[str, ...]
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    result: dict[str, Any]
    missing: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """How many times fewer parameters the network has than its dense counterpart."""
        return self.dense_parameters / self.parameters if self.dense_parameters else None

    @property
    def tensor_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.ranks]

    @property
    def finetune_start(self) -> int | None:
        return next((record.number for record in self.history if record.phase == "finetune"), None)

    @property
    def epochs(self) -> int | None:
        """How many epochs the settings ask for."""
        fit = self.config.get("fit", {})
        return fit["epochs"] + fit.get("finetune_epochs", 0) * fit.get("search", True) if "epochs" in fit else None

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


def read_run(folder: Path) -> Run:
    """Read a run folder; without ``result.json`` the run is unfinished and its history is enough for a page."""
    names = ("result.json", "history.jsonl", "config.toml", "environment.json", "predictions.safetensors")
    result, environment, cut = (_json(folder / name) for name in ("result.json", "environment.json", "spectra.json"))
    history = _history(folder / "history.jsonl")
    if not result and not history:
        raise DataError(
            f"{folder} is not a run folder: it has neither result.json nor a history.jsonl with an epoch in it. "
            "Give a folder that `bayestrain train` or fit(folder=) has written."
        )
    with _reading(folder / "config.toml") as path:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        config = tomllib.loads(text)
    with _reading(folder / "spectra.json"):
        spectra = {name: _spectrum(name, about) for name, about in (cut.get("layers") or {}).items()}
    with _reading(folder / "result.json"):
        numbers = _numbers(result) if result else history[-1].numbers
        scores = {key: _numbers(result.get(key)) for key in ("metrics", "calibrated", "validation")}
        if not scores["validation"]:
            scores["validation"] = next((r.validation for r in reversed(history) if r.validation), {})
        known = scores["metrics"] or scores["validation"]
        guess = "classification" if "accuracy" in known else "regression" if "rmse" in known else "other"
        task = str(result.get("task", guess))
        name = str(result.get("name") or config.get("run", {}).get("name") or folder.resolve().name)
        expected = names[1:] if task != "other" else names[1:-1]
        return Run(
            folder, name, task, finished=bool(result) and result.get("status", "finished") == "finished", **scores,
            parameters=numbers["parameters"], dense_parameters=numbers["dense_parameters"] if result else None,
            numbers=numbers, layers=_layers(result, history), history=history, spectra=spectra,
            posterior=_posterior(result), predictions=_predictions(folder / "predictions.safetensors"),
            classes=tuple(map(str, result.get("classes") or ())), config=config, config_text=text,
            environment=environment, result=result,
            missing=tuple(name for name in expected if result and not (folder / name).is_file()),
        )  # fmt: skip


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Turn whatever goes wrong with the content of `path` into an error that names it."""
    try:
        yield path
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{path} is damaged or was not written by bayestrain: {reason}. Restore it, or delete it to leave out what "
            "it holds."
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    with _reading(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__} instead of an object")
        return found


def _history(path: Path) -> tuple[Epoch, ...]:
    """All epochs in order; one written twice counts once, and a last line cut short by a crash is dropped."""
    with _reading(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records: dict[int, Epoch] = {}
    for place, line in enumerate(lines, start=1):
        with _reading(Path(f"{path}, line {place},")):
            try:
                content = json.loads(line)
            except ValueError:
                if place == len(lines):
                    break
                raise
            ranks = {name: _ranks(ranks) for name, ranks in (content.get("ranks") or {}).items()}
            records[content["epoch"]] = Epoch(
                int(content["epoch"]), str(content.get("phase", "train")), _numbers(content),
                _numbers(content.get("validation")), _numbers(content.get("diagnostics")), ranks,
            )  # fmt: skip
    return tuple(records[number] for number in sorted(records))


def _layers(result: Mapping[str, Any], history: tuple[Epoch, ...]) -> tuple[Layer, ...]:
    """All layers in the network's order; an unfinished run knows only the ranks in its history."""
    begins = {name: ranks for record in reversed(history) for name, ranks in record.ranks.items()}
    ends = {name: ranks for record in history for name, ranks in record.ranks.items()}
    if result:
        ends = {name: _ranks(ranks) for name, ranks in (result.get("ranks") or {}).items()}
        begins |= {name: _ranks(ranks) for name, ranks in (result.get("start_ranks") or {}).items()}
    described, layers = result.get("layers") or {}, []
    for name in dict.fromkeys([*described, *ends]):
        about, ranks = described.get(name) or {}, ends.get(name, ())
        start = begins.get(name, ranks)
        if len(start) != len(ranks):
            raise ValueError(f"layer {name!r} has {len(ranks)} ranks but {len(start)} start_ranks")
        form, layout = (str(about.get(key) or "") for key in ("format", "layout"))
        layers.append(Layer(name, ranks, start, form, layout, _ranks(about.get("shape") or ()), _numbers(about)))
    return tuple(layers)


def _spectrum(name: str, about: Mapping[str, Any]) -> Spectrum:
    bonds, kept = [np.asarray(values, dtype=np.float64) for values in about["bonds"]], _ranks(about["kept"])
    if len(bonds) != len(kept) or not all(0 < rank <= len(b) for rank, b in zip(kept, bonds, strict=True)):
        raise ValueError(f"layer {name!r} has {[len(b) for b in bonds]} values at its bonds but kept {list(kept)}")
    return list(zip(bonds, kept, strict=True))


def _posterior(result: Mapping[str, Any]) -> Posterior | None:
    if not (about := result.get("posterior")):
        return None
    own = {name: [_ranks(bond) for bond in bonds] for name, bonds in (about.get("own_ranks") or {}).items()}
    warnings, numbers, ood = tuple(map(str, about.get("warnings") or ())), _numbers(about), about.get("ood") or {}
    return Posterior(
        str(about.get("method", "")), int(numbers["particles"]), numbers.get("mean_log_likelihood"), own,
        _numbers(about.get("diagnostics")), _numbers(about.get("uncalibrated")),
        {"name": str(ood.get("name", "")), **_numbers(ood)}, warnings,
    )  # fmt: skip


def _predictions(path: Path) -> Classes | Values | None:
    if not path.is_file():
        return None
    with _reading(path):
        tensors = {name: np.asarray(tensor) for name, tensor in load_file(path).items()}
        return _classes(tensors) if "probabilities" in tensors else _values(tensors)


def _classes(tensors: dict[str, Array]) -> Classes:
    p, labels = tensors["probabilities"].astype(np.float64), tensors["labels"].astype(np.int64)
    hardest = tensors.get("hardest", np.zeros(0)).astype(np.int64)
    if p.ndim != 2 or labels.shape != p.shape[:1] or not p.size:
        raise ValueError(f"probabilities {p.shape} and labels {labels.shape} do not fit each other")
    if np.abs(p.sum(1) - 1).max() > 1e-2:
        raise ValueError("probabilities has rows that do not add up to 1")
    if len(hardest) and not 0 <= hardest.min() <= hardest.max() < len(labels):
        raise ValueError(f"hardest has indices outside of the {len(labels)} inputs")
    found = {"total": -(p * np.log(np.maximum(p, 1e-300))).sum(1), **tensors}
    inputs, particles = tensors.get("hardest_inputs"), tensors.get("hardest_particle_probabilities")
    if any(found[name].shape != labels.shape for name in ("total", "aleatoric", "epistemic") if name in found):
        raise ValueError(f"total, aleatoric and epistemic uncertainty do not fit {len(labels)} labels")
    if inputs is not None and (inputs.ndim != 4 or len(inputs) != len(hardest)):
        raise ValueError(f"hardest_inputs {inputs.shape} are no pictures of the {len(hardest)} hardest inputs")
    if particles is not None and particles.shape[1:] != (len(hardest), p.shape[1]):
        raise ValueError(f"hardest_particle_probabilities {particles.shape} do not fit {len(hardest)} hardest inputs")
    return Classes(
        p, labels, found["total"], found.get("aleatoric"), found.get("epistemic"), hardest, inputs, particles
    )


def _values(tensors: dict[str, Array]) -> Values:
    names = [name for name in ("mean", "std", "targets", "aleatoric", "epistemic") if name in tensors]
    found = {name: tensors[name].astype(np.float64).reshape(len(tensors[name]), -1) for name in names}
    if len({values.shape for values in found.values()}) > 1 or not found["mean"].size:
        raise ValueError(
            f"{', '.join(f'{name} {values.shape}' for name, values in found.items())} do not fit each other"
        )
    return Values(found["mean"], found["std"], found["targets"], found.get("aleatoric"), found.get("epistemic"))


def _numbers(values: Mapping[str, Any] | None) -> Numbers:
    """The entries that are numbers."""
    found = (values or {}).items()
    return {key: float(v) for key, v in found if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _ranks(values: Any) -> Ranks:
    return tuple(int(value) for value in values)
