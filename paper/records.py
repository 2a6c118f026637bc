"""Recorded results, `RESULTS/EXPERIMENT/LABEL/seed-N/`: read from files alone, checked against their summaries.

Results recorded before the rewrite of the package keep the schema they were written with. `read_run` is the only
function that knows the two schemas.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paper.published import PAPER

KINDS = {"dense": "BNN", "tensorized": "BTNN", "low-rank": "LR-BTNN"}
"""The three networks in the paper's words: no tensors, all ranks kept, ranks found; in the order of the table."""

IMMATERIAL = ("experiment.from_run", "experiment.seed", "data.folder", "fit.checkpoint_every", "fit.tensorboard",
              "fit.threads", "run.from_run", "run.name", "run.seed")  # fmt: skip
"""Settings in which the seeds of one group may differ."""

OUTSIDE = {"patches": "shuffled patches", "fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}

Json = dict[str, Any]


class RecordError(Exception):
    """A recorded file is missing, damaged, or contradicts another one."""


@dataclass(frozen=True)
class Layer:
    """One layer: ranks kept and ranks at the start, empty if dense; parameters dense, at full rank and now."""

    name: str
    ranks: tuple[int, ...]
    max_ranks: tuple[int, ...]
    dense: int
    start: int
    now: int


@dataclass(frozen=True)
class Posterior:
    """What a run of several particles records besides its metrics. `point` is the single network of its settings."""

    method: str
    particles: int
    around: bool
    mean_log_likelihood: float
    uncalibrated: Json
    outside: str
    ood: Json
    point: Json
    within_one_rank: float | None = None

    @property
    def how(self) -> str:
        """For example "SVGD, 20 particles around MAP"."""
        method = {"svgd": "SVGD", "sgld": "SGLD", "ensemble": "deep ensemble"}.get(self.method, self.method)
        return f"{method}, {self.particles} particles" + " around MAP" * self.around


@dataclass(frozen=True)
class Run:
    """One seed. `metrics` are those of the test set, for a posterior at its temperature."""

    folder: Path
    experiment: str
    seed: int
    kind: str
    preset: str
    dense_parameters: int
    parameters: int
    metrics: Json
    validation: Json
    temperature: float | None
    calibrated: Json
    layers: tuple[Layer, ...]
    posterior: Posterior | None
    seconds: float
    device: str
    epochs: int | None
    earlier_epochs: int | None
    iterations: int | None
    prior_weight: float | None
    target_ratio: float | None
    settings: Json
    commits: tuple[str, ...]
    evaluated_on: str = ""
    searched_accuracy: float | None = None
    """Accuracy on held-out images when the search for ranks ended, before the final cut."""
    before_rewrite: bool = False

    @property
    def predictions(self) -> Path | None:
        """The predictions on the test images, which are recorded of one seed of a posterior."""
        found = (self.folder / name for name in ("predictions.safetensors", "evaluation.safetensors"))
        return next((path for path in found if path.is_file()), None)

    @property
    def ratio(self) -> float:
        """How many times smaller than the dense network."""
        return self.dense_parameters / self.parameters


@dataclass(frozen=True)
class Group:
    """The seeds of one label; they differ in their seed alone."""

    label: str
    folder: Path
    runs: tuple[Run, ...]
    summary: Json = field(repr=False)

    @property
    def first(self) -> Run:
        """The first seed, for what all have in common."""
        return self.runs[0]

    @property
    def size(self) -> float:
        """Mean number of parameters."""
        return statistics.fmean(run.parameters for run in self.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def median(self) -> Run:
        """The seed with the median number of parameters; the smaller of two in the middle."""
        middle = statistics.median_low(run.parameters for run in self.runs)
        return next(run for run in self.runs if run.parameters == middle)

    @property
    def searches(self) -> bool:
        """Whether it is a single network of our own preset that found its ranks."""
        return self.first.kind == "low-rank" and self.first.posterior is None and self.first.preset != "paper"

    @property
    def shortened(self) -> str:
        """ "12 of 200" if its runs had fewer epochs than their preset; else "". What began elsewhere counts its own."""
        run, paper = self.first, PAPER.get(self.first.experiment)
        planned = paper.epochs.get(run.preset) if paper else None
        elsewhere = run.earlier_epochs or (run.posterior and run.posterior.around)
        if elsewhere or run.epochs is None or planned is None or run.epochs >= planned:
            return ""
        return f"{run.epochs} of {planned}"

    def mean(self, value: Callable[[Run], float | None]) -> tuple[float, float] | None:
        """Mean and sample standard deviation over the seeds, 0 for one seed. None if a seed lacks the value."""
        found = [number for run in self.runs if (number := value(run)) is not None]
        if len(found) < len(self.runs):
            return None
        return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def gather(results: Path) -> dict[str, list[Group]]:
    """All groups by experiment, the paper's experiments first; groups by kind, single networks first, then by size."""
    if not results.is_dir():
        raise RecordError(f"There is no folder {results}. Give the one that paper.seeds records into.")
    names = [*PAPER, *sorted(path.name for path in results.iterdir() if path.is_dir() and path.name not in PAPER)]
    found = {}
    for name in names:
        labels = sorted(path.parent for path in (results / name).glob("*/summary.json"))
        groups = [group for folder in labels if (group := read_group(folder, name)) is not None]
        order = list(KINDS)
        groups.sort(key=lambda g: (order.index(g.first.kind), g.first.posterior is not None, -g.size, g.label))
        if groups:
            found[name] = groups
    if not found:
        raise RecordError(f"{results} holds no results: there is no EXPERIMENT/LABEL/summary.json in it.")
    return found


def read_group(folder: Path, experiment: str) -> Group | None:
    """A checked group of seeds, or None if all of its seeds failed."""
    summary = read_json(folder / "summary.json")
    seeds = sorted(int(path.name[5:]) for path in folder.iterdir() if re.fullmatch(r"seed-\d+", path.name))
    wanted = sorted({*summary.get("seeds", ())} - {*summary.get("failed", ())})
    if seeds != wanted:
        raise RecordError(f"{folder} holds seeds {seeds}, but its summary.json lists {wanted}. Record it again.")
    if not seeds:
        return None
    runs = tuple(read_run(folder / f"seed-{seed}", summary) for seed in seeds)
    for run, seed in zip(runs, seeds, strict=True):
        if (run.experiment, run.seed) != (experiment, seed):
            raise RecordError(f"{run.folder}/result.json is of {run.experiment}, seed {run.seed}. Record it again.")
        if run.kind not in KINDS:
            raise RecordError(f"{run.folder} has the kind {run.kind!r}; there are {', '.join(KINDS)}.")
        ours, first = ({**r.settings, "kind": r.kind, "preset": r.preset} for r in (run, runs[0]))
        if changed := sorted(key for key in {**ours, **first} if ours.get(key) != first.get(key)):
            raise RecordError(
                f"{run.folder} and {runs[0].folder} differ in {', '.join(changed)}, so they are not seeds of one "
                "group. Record them under labels of their own."
            )
    check_summary(folder / "summary.json", summary, runs)
    if strange := {commit for run in runs for commit in run.commits} - {*summary.get("commits", ())}:
        raise RecordError(f"{folder / 'summary.json'} lacks commits that its seeds were trained at: {sorted(strange)}.")
    for run in runs:
        check_predictions(run)
    return Group(folder.name, folder, runs, summary)


# --- the statistics of a summary --------------------------------------------------------------------------------------


def figures(run: Run) -> dict[str, float]:
    """What is summarised of one seed."""
    found: dict[str, float | None] = {
        "params": run.parameters, "ratio": run.ratio, **{key: run.metrics[key] for key in METRICS[:3]},
        "seconds": run.seconds,
    }  # fmt: skip
    if (posterior := run.posterior) is None:
        found |= {f"calibrated_{key}": run.calibrated.get(key) for key in ("log_likelihood", "ece")}
        if run.searched_accuracy is not None:
            found |= {"searched_accuracy": run.searched_accuracy}
            found |= {"validation_accuracy": run.validation.get("accuracy")}
    else:
        point, suited = posterior.point, posterior.point.get("calibrated") or {}
        found |= {"mean_log_likelihood": posterior.mean_log_likelihood, "temperature": run.temperature}
        found |= {"within_one_rank": posterior.within_one_rank}
        found |= {f"uncalibrated_{key}": posterior.uncalibrated.get(key) for key in ("log_likelihood", "ece")}
        found |= {key: posterior.ood.get(key) for key in ("auroc", "auroc_epistemic")}
        found |= {f"map_{key}": point.get(key) for key in ("params", *METRICS[:3], "seconds")}
        found |= {f"map_calibrated_{key}": suited.get(key) for key in ("log_likelihood", "ece")}
        found |= {"map_auroc": point.get("ood_auroc")}
    return {key: float(value) for key, value in found.items() if value is not None}


METRICS = ("accuracy", "log_likelihood", "ece", "brier")


def summarise(each: Sequence[dict[str, float]]) -> dict[str, Json]:
    """Mean, sample standard deviation and the single values of all figures that every seed has."""
    return {
        key: {
            "mean": statistics.fmean(figures[key] for figures in each),
            "spread": statistics.stdev(figures[key] for figures in each) if len(each) > 1 else 0.0,
            "each": [figures[key] for figures in each],
        }
        for key in (each[0] if each else ())
        if all(key in figures for figures in each)
    }


def check_summary(path: Path, summary: Json, runs: Sequence[Run]) -> None:
    """Compute the statistics again from the seeds' own results, and refuse a summary that says otherwise."""
    order = {run.seed: figures(run) for run in runs}
    again = summarise([order[seed] for seed in summary["seeds"] if seed in order])
    told = {key: value for key, value in summary.items() if isinstance(value, dict) and "mean" in value}
    if odd := sorted(set(again) ^ set(told)):
        raise RecordError(f"{path} and the results of its seeds do not have the same figures: {', '.join(odd)}.")
    for key, value in told.items():
        for part in ("each", "mean", "spread"):
            ours, theirs = (one[part] if part == "each" else [one[part]] for one in (again[key], value))
            if len(ours) != len(theirs) or not all(map(_close, ours, theirs)):
                raise RecordError(
                    f'{path} says {value[part]} for the {part} of "{key}", but the results of its seeds give '
                    f"{again[key][part]}. Record it again."
                )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


FITTED = 1e-3
"""Relative accuracy to which a temperature is fitted: the fit ends when it is known to about half of this."""

TINY = 1e-38


def check_predictions(run: Run) -> None:
    """Compute the metrics again from the recorded predictions, and check which images the temperature was fitted to.

    A temperature fitted to some images makes their log likelihood stationary in 1 / temperature. So it has to be
    stationary for the held-out images, where their predictions are recorded, and must not be for the test images.
    """
    if run.predictions is not None:
        stored = load_file(run.predictions)
        probabilities, labels = stored["probabilities"].astype(np.float64), stored["labels"]
        for key, value in metrics_of(probabilities, labels).items():
            moved = 2 / len(labels) if key == "ece" else 0.0  # one image that rounding moves to the next bin
            if not math.isclose(value, run.metrics[key], abs_tol=1e-5 + moved):
                raise RecordError(f"{run.folder} records {key} {run.metrics[key]}, but its predictions give {value}.")
        step = newton_step(probabilities, labels)
        if run.temperature is not None and abs(step) < FITTED:
            raise RecordError(
                f"The temperature of {run.folder}, {run.temperature:.6g}, is the best one for the test images to "
                f"{abs(step):.1g}, so it was fitted to them. Fit it to held-out images."
            )
    if (file := run.folder / "validation.safetensors").is_file() and run.temperature is not None:
        stored = load_file(file)
        step = newton_step(stored["probabilities"].astype(np.float64) ** (1 / run.temperature), stored["labels"])
        if abs(step) > FITTED:
            raise RecordError(
                f"The temperature of {run.folder}, {run.temperature:.6g}, is not the best one for the held-out images "
                f"(Newton step {step:.2g}), so it was not fitted to them."
            )


def metrics_of(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The `METRICS` of these probabilities; the calibration error has 15 bins (Guo et al. 2017)."""
    its, right = probabilities[np.arange(len(labels)), labels], probabilities.argmax(1) == labels
    confidence = probabilities.max(1)
    gaps = np.bincount(np.minimum((15 * confidence).astype(int), 14), confidence - right)
    return {
        "accuracy": right.mean(), "log_likelihood": np.log(np.maximum(its, TINY)).mean(),
        "ece": np.abs(gaps).sum() / len(labels), "brier": ((probabilities**2).sum(1) - 2 * its + 1).mean(),
    }  # fmt: skip


def newton_step(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The step to the best 1 / temperature for these images, in units of the present one: 0 at the optimum."""
    probabilities = probabilities / probabilities.sum(1, keepdims=True)
    logs = np.log(np.maximum(probabilities, TINY))
    mean = (probabilities * logs).sum(1)
    slope = (logs[np.arange(len(labels)), labels] - mean).mean()
    return float(slope / ((probabilities * logs**2).sum(1) - mean**2).mean())


# --- one seed: the two schemas of result.json -------------------------------------------------------------------------


def read_run(folder: Path, summary: Json) -> Run:
    """One seed, in whichever of the two schemas it was recorded."""
    result = read_json(folder / "result.json")
    environment = read_json(folder / "environment.json")
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder / 'config.toml'} cannot be read: {error}.") from error
    if result.get("status") != "finished":
        raise RecordError(f"{folder / 'result.json'} is of a run that has not finished.")
    try:
        run = (_old_run if "params" in result else _new_run)(folder, result, config, environment, summary)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{folder / 'result.json'} or config.toml is malformed ({error!r}).") from error
    for key, value in figures(run).items():
        if not math.isfinite(value):
            raise RecordError(f'{folder / "result.json"} has {value} for "{key}". Record it again.')
    return run


def _old_run(folder: Path, result: Json, config: Json, environment: Json, summary: Json) -> Run:
    """A run of the package before its rewrite (commit a19cf68 and earlier)."""
    fit, about = config["fit"], result["posterior"] or {}
    posterior = None
    if about.get("particles", 1) > 1:
        posterior = Posterior(
            about["method"], about["particles"], about["start"] == "jitter", about["mean_log_likelihood"],
            about["uncalibrated"], OUTSIDE.get((about["ood"] or {}).get("name", ""), ""), about["ood"] or {},
            about["map"] or {}, about.get("within_one_rank"),
        )  # fmt: skip
    around = posterior is not None and posterior.around
    epochs = config["posterior"]["jitter_epochs"] if around else fit["epochs"] + fit["finetune_epochs"]
    calibrated, ranks = result.get("calibrated") or {}, result["ranks"]
    layers = tuple(
        Layer(name, *(tuple(chains.get(name, ()))[1:-1] for chains in (ranks, result["max_ranks"])),
              *(count[key] for key in ("dense", "start", "now")))
        for name, count in result["layer_params"].items()
    )  # fmt: skip
    good = [seed for seed in summary["seeds"] if seed not in summary["failed"]]
    searched = summary.get("searched_accuracy")  # from histories, which were not recorded
    return Run(
        folder=folder, experiment=result["experiment"], seed=result["seed"], kind=result.get("kind", "low-rank"),
        preset=result["preset"], dense_parameters=result["dense_params"], parameters=result["params"],
        metrics={key: result[key] for key in METRICS}, validation=result["validation"],
        temperature=about["temperature"] if posterior else calibrated.get("temperature"),
        calibrated={} if posterior else calibrated, layers=layers, posterior=posterior, seconds=result["seconds"],
        device=result["device"], epochs=epochs, earlier_epochs=(result.get("from_run") or {}).get("epochs"),
        iterations=_iterations(result["experiment"], epochs, fit["batch_size"]), prior_weight=config["prior"]["weight"],
        target_ratio=fit.get("target_ratio") or None, settings=_flat(config), commits=_commits(environment, result),
        evaluated_on=(result.get("evaluated_again") or {}).get("device", ""),
        searched_accuracy=searched["each"][good.index(result["seed"])] if searched else None, before_rewrite=True,
    )  # fmt: skip


def _new_run(folder: Path, result: Json, config: Json, environment: Json, summary: Json) -> Run:  # noqa: ARG001
    """A run of the package since its rewrite, with the `paper.json` that `paper.experiment` adds."""
    fit, about, extra = config["fit"], result["posterior"], read_json(folder / "paper.json")
    posterior, calibrated = None, result["calibrated"] or {}
    around = bool(about and config["run"]["from_run"])
    if about is not None:
        ood = about["ood"] or {}
        posterior = Posterior(
            about["method"], about["particles"], around, about["mean_log_likelihood"], about["uncalibrated"],
            OUTSIDE.get(ood.get("name", ""), ""), ood, extra["point"] or {},
        )  # fmt: skip
    layers = tuple(
        Layer(name, *(tuple(ranks.get(name, ())) for ranks in (result["ranks"], result["start_ranks"])),
              *(count[key] for key in ("dense", "start", "now")))
        for name, count in result["layers"].items()
    )  # fmt: skip
    epochs = fit["epochs"] + (fit["finetune_epochs"] if fit["search"] else 0)
    again = result.get("evaluated_again")
    return Run(
        folder=folder, experiment=extra["experiment"], seed=result["seed"], kind=extra["kind"], preset=extra["preset"],
        dense_parameters=result["dense_parameters"], parameters=result["parameters"], metrics=result["metrics"],
        validation=result["validation"], temperature=about["temperature"] if about else calibrated.get("temperature"),
        calibrated={} if about else calibrated, layers=layers, posterior=posterior, seconds=result["seconds"],
        device=result["device"], epochs=epochs,
        earlier_epochs=None if around else (result["from_run"] or {}).get("epochs"),
        iterations=_iterations(extra["experiment"], epochs, fit["batch_size"]), prior_weight=config["prior"]["weight"],
        target_ratio=fit["target_ratio"] or None, settings=_flat(config), commits=_commits(environment, result),
        evaluated_on=(again["gpu"] or "cpu") if again else "", searched_accuracy=extra["searched_accuracy"],
    )  # fmt: skip


def _iterations(experiment: str, epochs: int, batch_size: int) -> int | None:
    """Epochs times steps per epoch, on the images that are not held out."""
    if (paper := PAPER.get(experiment)) is None:
        return None
    return epochs * math.ceil((paper.train_images - round(paper.held_out * paper.train_images)) / batch_size)


def _flat(config: Json) -> Json:
    """Every setting by its full name, except those in which seeds may differ."""
    flat = {f"{section}.{key}": value for section, table in config.items() for key, value in table.items()}
    return {key: value for key, value in flat.items() if key not in IMMATERIAL}


def _commits(environment: Json, result: Json) -> tuple[str, ...]:
    """The commits a run was trained at, and those of the run that it started from; "+": with uncommitted changes."""
    parts, started = [*environment.get("earlier", ()), environment], result.get("from_run") or {}
    own = (part["commit"] + "+" * bool(part.get("dirty")) for part in parts if part.get("commit"))
    return tuple(dict.fromkeys((*started.get("commits", ()), *own)))


def read_json(path: Path) -> Json:
    """A JSON object, or a `RecordError` that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"{path} is missing. Record the group again with paper.seeds, or remove it.") from error
    except ValueError as error:
        raise RecordError(f"{path} is damaged: {error}. Record the group again with paper.seeds.") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content
