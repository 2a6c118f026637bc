"""The table of a comparison: one row per run, the mean of seeds, the paper's row."""

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayestrain.report import words
from bayestrain.report.figures.comparison import Entry
from bayestrain.report.paper import PAPER, Published
from bayestrain.report.run import Run


@dataclass(frozen=True)
class Row:
    """One line of the table. `kind` is "run", "mean" or "paper"; `link` leads to the run's own report."""

    kind: str
    name: str
    cells: tuple[str, ...]
    colour: str = ""
    link: str = ""


@dataclass(frozen=True)
class Column:
    """Figures of one kind: how a run's is found and written, and how a mean and a deviation of them are."""

    name: str
    value: Callable[[Run], float | None]
    text: Callable[[float | None], str]
    spread: str
    scale: float = 1.0
    unit: str = ""


def particle_likelihood(run: Run) -> float | None:
    """Mean of the particles' log likelihoods; a single network is its own mean."""
    return run.posterior.mean_log_likelihood if run.posterior else run.scores.log_likelihood


def ood_auroc(run: Run) -> float | None:
    """How well total uncertainty tells another data set."""
    return run.ood.auroc if run.ood else None


def likelihood(value: float | None) -> str:
    """With the digits that seeds differ in."""
    return words.signed(value, 4)


ALONE = Column("particle mean", particle_likelihood, likelihood, ".4f")
STRANGERS = Column("OOD AUROC", ood_auroc, words.area, ".3f")
COLUMNS = (
    Column("parameters", lambda run: run.scores.params, words.count, ",.0f"),
    Column("ratio", lambda run: run.scores.ratio, words.ratio, ".1f", unit="×"),
    Column("accuracy", lambda run: run.scores.accuracy, words.percent, ".2f", 100, " %"),
    Column("log likelihood", lambda run: run.scores.log_likelihood, likelihood, ".4f"),
    ALONE,
    Column("ECE", lambda run: run.scores.ece, words.percent, ".2f", 100, " %"),
    STRANGERS,
    Column("time", lambda run: run.scores.seconds, words.duration, ".0f", unit=" s"),
)


@dataclass(frozen=True)
class Table:
    """Names of the columns after the run's own, and the rows."""

    columns: tuple[str, ...]
    rows: list[Row]


def comparison_table(entries: Sequence[Entry], groups: Sequence[Sequence[Run]], beside: Path) -> Table:
    """All runs by groups of seeds; links are relative to the folder `beside`.

    Posteriors bring columns of their own, and so do networks that did not find their ranks.
    """
    runs = [entry.run for entry in entries]
    kinds = any(run.kind != "low-rank" for run in runs)
    several = any(run.posterior for run in runs)
    told = any(ood_auroc(run) is not None for run in runs)
    columns = [c for c in COLUMNS if (several or c is not ALONE) and (told or c is not STRANGERS)]
    first = (*(["kind"] if kinds else []), *(["posterior"] if several else []), "seed")
    rows = []
    for number, group in enumerate(groups):
        for entry in (entry for entry in entries if entry.group == number):
            report = entry.run.folder / "report.html"
            link = Path(os.path.relpath(report, beside)).as_posix() if report.is_file() else ""
            seed = "–" if entry.run.seed is None else str(entry.run.seed)
            about = {"kind": entry.run.kind, "posterior": _posterior(entry.run), "seed": seed}
            cells = (*(about[name] for name in first), *(column.text(column.value(entry.run)) for column in columns))
            rows.append(Row("run", entry.name, cells, f"c{entry.colour + 1}", link))
        finished = [run for run in group if run.finished]
        if len(finished) > 1:
            cells = (*("" for _ in first), *(_mean_cell(column, finished) for column in columns))
            rows.append(Row("mean", f"mean ± sd of {len(finished)} seeds", cells))
    for experiment, kind in dict.fromkeys((run.experiment, run.kind) for run in runs):
        if (row := PAPER.get(experiment)) and (paper := row.of(kind)):
            figures = _paper_cells(paper, several)
            about = {"kind": kind}
            cells = (*(about.get(name, "–") for name in first), *(figures.get(c.name, "–") for c in columns))
            rows.append(Row("paper", f"paper, {experiment}", cells))
    return Table((*first, *(column.name for column in columns)), rows)


def spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation; None with fewer than two values."""
    known = [value for value in values if value is not None]
    return (statistics.fmean(known), statistics.stdev(known)) if len(known) > 1 else None


def _posterior(run: Run) -> str:
    return f"{run.posterior.particles} × {words.method(run.posterior.method)}" if run.posterior else "MAP"


def _mean_cell(column: Column, runs: Sequence[Run]) -> str:
    known = spread([column.value(run) for run in runs])
    if known is None:
        return "–"
    mean, deviation = (f"{column.scale * value:{column.spread}}" for value in known)
    return f"{mean} ± {deviation}{column.unit}".replace("-", "−")


def _paper_cells(paper: Published, several: bool) -> dict[str, str]:
    """The paper averages the particles' log likelihoods: its figure is of that kind."""
    return {
        "parameters": words.count(paper.params),
        "ratio": words.ratio(paper.ratio),
        "accuracy": words.percent(paper.accuracy),
        ALONE.name if several else "log likelihood": likelihood(paper.log_likelihood),
    }
