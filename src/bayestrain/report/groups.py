"""From a folder of results to its groups of seeds: ``RESULTS/EXPERIMENT/LABEL/seed-N/``, every file checked."""

import math
import re
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayestrain.errors import ReportError
from bayestrain.report import words
from bayestrain.report.load import load_run
from bayestrain.report.paper import PAPER
from bayestrain.report.reading import as_number, read_json
from bayestrain.report.run import Run

KINDS = {"dense": "BNN", "tensorized": "BTNN", "low-rank": "LR-BTNN"}
"""What is trained, in the paper's words and in the order of the table."""

IMMATERIAL = ("data.folder", "fit.checkpoint_every", "fit.tensorboard")
"""Settings that seeds of one group may differ in: those of `bayestrain.train.config`."""

AGAIN = "Gather it again with tools/run_seeds.py, or remove the folder."
SCRATCH = re.compile(
    r"\s+(?:--(?:results|runs|jobs)(?:\s+|=)|--set(?:\s+|=)data\.folder=)(?:'[^']*'|\"[^\"]*\"|\S+)"
)  # where one machine had its files, and how many runs it took at a time


@dataclass(frozen=True)
class Settings:
    """What the seeds of a group have in common. A posterior has `iterations`: epochs times steps per epoch."""

    kind: str
    preset: str
    method: str
    particles: int
    start: str
    dense_params: int
    prior_weight: float | None
    target_ratio: float | None
    epochs: int | None
    earlier_epochs: int | None
    """Those of the run that a network came from, if it began with that of another run."""
    iterations: int | None

    @property
    def how(self) -> str:
        """How it was inferred: "MAP", "SVGD, 20 particles" or "SVGD, 20 particles around MAP"."""
        if self.particles == 1:
            return "MAP"
        return f"{words.method(self.method)}, {self.particles} particles" + " around MAP" * (self.start == "jitter")

    @property
    def by_weight(self) -> bool:
        """Whether it is a single network of our preset whose size only the weight of the prior decided."""
        ours = self.kind == "low-rank" and self.particles == 1 and self.preset != "paper"
        return ours and self.prior_weight is not None and not self.target_ratio

    def shortened(self, experiment: str) -> str:
        """ "12 of 200", if it had fewer epochs than its preset has; else "". What began elsewhere counts its own."""
        paper = PAPER.get(experiment)
        all_of_them = paper.epochs.get(self.preset) if paper else None
        began_elsewhere = self.earlier_epochs or self.start == "jitter"
        if began_elsewhere or self.epochs is None or all_of_them is None or self.epochs >= all_of_them:
            return ""
        return f"{self.epochs} of {all_of_them}"


@dataclass(frozen=True)
class Group:
    """The seeds of one label, and the command that made them.

    `cut`: held-out accuracy when the search for ranks ended and when all was done, where the summary has them.
    """

    label: str
    folder: Path
    settings: Settings
    runs: tuple[Run, ...]
    command: str
    cut: tuple[float, float] | None = None

    def mean(self, value: Callable[[Run], float | None]) -> tuple[float, float] | None:
        """Mean and sample standard deviation over the seeds, 0 for a single one. None if some seed lacks it."""
        found = [number for run in self.runs if (number := value(run)) is not None]
        if len(found) < len(self.runs):
            return None
        return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0

    @property
    def size(self) -> float:
        """Mean number of parameters."""
        return statistics.fmean(run.scores.params or 0 for run in self.runs)

    @property
    def median(self) -> Run:
        """The seed with the median number of parameters; the lower one of two in the middle."""
        middle = statistics.median_low(run.scores.params or 0 for run in self.runs)
        return next(run for run in self.runs if run.scores.params == middle)


@dataclass(frozen=True)
class Experiment:
    """The groups of an experiment in the table's order, and the seeds that failed, by label."""

    name: str
    groups: tuple[Group, ...]
    failed: dict[str, tuple[int, ...]]


def gather(results: Path) -> list[Experiment]:
    """The paper's experiments in its order, then others; those without results are left out."""
    if not results.is_dir():
        raise ReportError(f"There is no folder {results}. Give the folder of results that tools/run_seeds.py filled.")
    others = sorted(folder.name for folder in results.iterdir() if folder.is_dir() and folder.name not in PAPER)
    found = [(name, _labels(results / name)) for name in (*PAPER, *others)]
    experiments = [_experiment(name, labels) for name, labels in found if labels]
    if not experiments:
        raise ReportError(f"{results} holds no results: there is no EXPERIMENT/LABEL/seed-N/result.json below it.")
    return experiments


def _labels(folder: Path) -> list[Path]:
    """The folders of groups: those with a seed or a summary in them."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [path for path in inside if (path / "summary.json").is_file() or _seeds(path)]


def _seeds(folder: Path) -> dict[int, Path]:
    found = {int(path.name[5:]): path for path in folder.iterdir() if re.fullmatch(r"seed-\d+", path.name)}
    return {seed: found[seed] for seed in sorted(found)}


def _experiment(name: str, labels: list[Path]) -> Experiment:
    groups, failed = [], {}
    for folder in labels:
        runs = [_run(path, name, seed) for seed, path in _seeds(folder).items()]
        command, lost, cut = _summary(folder, [run.seed or 0 for run in runs])
        if lost:
            failed[folder.name] = lost
        if runs:
            groups.append(Group(folder.name, folder, _settings(runs), tuple(runs), command, cut))
    order = list(KINDS)
    groups.sort(key=lambda g: (order.index(g.settings.kind), g.settings.particles > 1, -g.size, g.label))
    return Experiment(name, tuple(groups), failed)


def _run(folder: Path, experiment: str, seed: int) -> Run:
    for name in ("result.json", "config.toml"):
        if not (folder / name).is_file():
            raise ReportError(f"{folder} has no {name}. {AGAIN}")
    where = folder / "result.json"
    read_json(where, AGAIN)  # in a table no part of it can be left out
    run = load_run(folder)
    if not run.finished:
        raise ReportError(f"{where} is of a run that has not finished. {AGAIN}")
    if (run.experiment, run.seed) != (experiment, seed):
        raise ReportError(f"{where} is of {run.experiment}, seed {run.seed}, by what it says itself. {AGAIN}")
    if run.kind not in KINDS:
        raise ReportError(f"{where} has the kind {run.kind!r}, which is none of {', '.join(KINDS)}.")
    for key in ("params", "dense_params", "accuracy", "log_likelihood"):
        if getattr(run.scores, key) is None:
            raise ReportError(f'{where} has no "{key}", or one that is no finite number. {AGAIN}')
    return run


def _summary(folder: Path, seeds: list[int]) -> tuple[str, tuple[int, ...], tuple[float, float] | None]:
    """The command without what was scratch, the seeds that failed, and accuracies before and after ranks were cut."""
    path = folder / "summary.json"
    content = read_json(path, AGAIN)
    if content is None:
        raise ReportError(f"{folder} has no summary.json, which says what command made it. {AGAIN}")
    command, asked, failed = (content.get(key) for key in ("command", "seeds", "failed"))
    lists = isinstance(asked, list) and isinstance(failed, list) and all(isinstance(s, int) for s in asked + failed)
    if not isinstance(command, str) or not lists:
        raise ReportError(f'{path} lacks its "command", or its lists "seeds" and "failed" of whole numbers. {AGAIN}')
    good = sorted(set(asked or ()) - set(failed or ()))
    if good != seeds:
        there, told = (", ".join(map(str, some)) or "none" for some in (seeds, good))
        raise ReportError(f"{folder} has seeds {there}, but its summary.json tells of {told}. {AGAIN}")
    try:
        before, after = (
            as_number(_setting(content, key, "mean"), f"{key}.mean")
            for key in ("searched_accuracy", "validation_accuracy")
        )
    except ValueError as error:
        raise ReportError(f"{path}: {error}. {AGAIN}") from error
    cut = None if before is None or after is None else (before, after)
    return SCRATCH.sub("", command).strip(), tuple(failed or ()), cut


def _settings(runs: list[Run]) -> Settings:
    """What all seeds have in common; it is an error if they have not."""
    first, config = _settings_of(runs[0]), _config(runs[0])
    for run in runs[1:]:
        ours, own = {**vars(first), **config}, {**vars(_settings_of(run)), **_config(run)}
        if changed := sorted(key for key in {**ours, **own} if ours.get(key) != own.get(key)):
            raise ReportError(
                f"{run.folder} and {runs[0].folder} differ in {', '.join(changed)}, so they are no seeds of one group. "
                "Give them labels of their own."
            )
    return first


def _config(run: Run) -> dict[str, Any]:
    """Every setting by its name, but for the seed, the run that it went on from, and what is immaterial."""
    config = {
        f"{section}.{key}": value
        for section, table in tomllib.loads(run.config_text).items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
    apart = ("experiment.seed", "experiment.from_run", *IMMATERIAL)
    return {key: value for key, value in config.items() if key not in apart}


def _settings_of(run: Run) -> Settings:
    config = tomllib.loads(run.config_text)
    try:
        weight = as_number(_setting(config, "prior", "weight"), "prior.weight")
        target = as_number(_setting(config, "fit", "target_ratio"), "fit.target_ratio")
        iterations = _iterations(run.total_epochs, config) if run.posterior else None
    except ValueError as error:
        raise ReportError(f"{run.folder / 'config.toml'}: {error}.") from error
    return Settings(
        kind=run.kind,
        preset=run.preset,
        method=run.posterior.method if run.posterior else "map",
        particles=run.posterior.particles if run.posterior else 1,
        start=run.posterior.start if run.posterior else "",
        dense_params=run.scores.dense_params or 0,
        prior_weight=weight,
        target_ratio=target or None,  # 0: none
        epochs=run.total_epochs,
        earlier_epochs=run.begun.epochs if run.begun else None,
        iterations=iterations,
    )


def _iterations(epochs: int | None, config: dict[str, Any]) -> int | None:
    """Epochs times steps per epoch, on the images not held out; None where the config does not tell."""
    from bayestrain.data.datasets import SPECS

    spec = SPECS.get(str(_setting(config, "data", "name")))
    batch = as_number(_setting(config, "fit", "batch_size"), "fit.batch_size")
    held_out = as_number(_setting(config, "data", "validation_fraction"), "data.validation_fraction") or 0.0
    if spec is None or not batch or epochs is None:
        return None
    return epochs * math.ceil((spec.train_size - round(held_out * spec.train_size)) / batch)


def _setting(config: dict[str, Any], section: str, key: str) -> Any:
    table = config.get(section)
    return table.get(key) if isinstance(table, dict) else None
