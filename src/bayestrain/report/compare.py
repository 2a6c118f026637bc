"""The page that compares runs: a table, accuracy against size, trajectories, ranks side by side."""

import os
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayestrain.report import words
from bayestrain.report.figures.comparison import Entry, path_plots, rank_comparison, scatter_plot
from bayestrain.report.html import render
from bayestrain.report.palette import SERIES
from bayestrain.report.paper import PAPER
from bayestrain.report.run import Run, Scores


@dataclass(frozen=True)
class Row:
    """One line of the table. `kind` is "run", "mean" or "paper"; `link` leads to the run's own report."""

    kind: str
    name: str
    cells: tuple[str, ...]
    colour: str = ""
    link: str = ""


COLUMNS = ("seed", "parameters", "ratio", "accuracy", "log likelihood", "ECE", "time")


def comparison_page(runs: Sequence[Run], beside: Path) -> str:
    """The HTML page for several runs, to be written into the folder `beside`."""
    groups = seed_groups(runs)
    entries = _entries(runs, groups)
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    plots = scatter_plot(entries) + path_plots(entries)
    rank_grids = rank_comparison(entries)
    if len(rank_grids) == 1 and len(rank_grids[0]) == 1:  # a single plot would stand alone on its row
        plots, rank_grids = plots + rank_grids[0], []
    context: dict[str, Any] = {
        "title": f"{' and '.join(experiments)} · BayesTrain comparison",
        "heading": ", ".join(experiments),
        "lead": _lead(runs, groups),
        "notices": [f"{run.folder} has not finished: only its history is shown." for run in runs if not run.finished],
        "columns": COLUMNS,
        "rows": _rows(entries, groups, beside),
        "plots": plots,
        "rank_grids": rank_grids,
    }
    return render("compare.html.j2", context)


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but their seed stand together."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        config = re.sub(r"(?m)^\s*seed\s*=.*$", "", run.config_text)
        groups.setdefault((run.experiment, run.preset, run.kind, config), []).append(run)
    return list(groups.values())


def spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation; None with fewer than two values."""
    known = [value for value in values if value is not None]
    return (statistics.fmean(known), statistics.stdev(known)) if len(known) > 1 else None


def _entries(runs: Sequence[Run], groups: Sequence[Sequence[Run]]) -> list[Entry]:
    """Names and colours: one colour per group where there are several groups of seeds, else one per run."""
    by_group = len(groups) > 1 and len(groups) < len(runs)
    names = [run.folder.resolve().name for run in runs]
    if len(groups) == 1 and len({run.seed for run in runs}) == len(runs):
        names = [f"seed {run.seed}" for run in runs]
    elif max(Counter(names).values()) > 1:
        names = [str(Path(*run.folder.resolve().parts[-2:])) for run in runs]
    entries = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        group = next(k for k, members in enumerate(groups) if any(member is run for member in members))
        number = group if by_group else index
        entries.append(Entry(run, name, number % len(SERIES), group, number // len(SERIES)))
    return entries


def _rows(entries: Sequence[Entry], groups: Sequence[Sequence[Run]], beside: Path) -> list[Row]:
    rows = []
    for number, group in enumerate(groups):
        members = [entry for entry in entries if entry.group == number]
        for entry in members:
            report = entry.run.folder / "report.html"
            link = Path(os.path.relpath(report, beside)).as_posix() if report.is_file() else ""
            seed = "–" if entry.run.seed is None else str(entry.run.seed)
            rows.append(Row("run", entry.name, (seed, *_cells(entry.run.scores)), f"c{entry.colour + 1}", link))
        finished = [run.scores for run in group if run.finished]
        if len(finished) > 1:
            rows.append(Row("mean", f"mean ± sd of {len(finished)} seeds", ("", *_mean_cells(finished))))
    for experiment in dict.fromkeys(entry.run.experiment for entry in entries):
        if paper := PAPER.get(experiment):
            scores = Scores(paper.dense_params, paper.params, paper.accuracy, paper.log_likelihood)
            rows.append(Row("paper", f"paper, {experiment}", ("–", *_cells(scores))))
    return rows


def _cells(scores: Scores) -> tuple[str, ...]:
    return (
        words.count(scores.params),
        words.ratio(scores.ratio),
        words.percent(scores.accuracy),
        words.signed(scores.log_likelihood, 4),
        words.percent(scores.ece),
        words.duration(scores.seconds),
    )


def _mean_cells(scores: Sequence[Scores]) -> tuple[str, ...]:
    def cell(values: Sequence[float | None], text: str, scale: float = 1.0, unit: str = "") -> str:
        known = spread(values)
        if known is None:
            return "–"
        return f"{scale * known[0]:{text}} ± {scale * known[1]:{text}}{unit}".replace("-", "−")

    return (
        cell([s.params for s in scores], ",.0f"),
        cell([s.ratio for s in scores], ".1f", unit="×"),
        cell([s.accuracy for s in scores], ".2f", 100, " %"),
        cell([s.log_likelihood for s in scores], ".4f"),
        cell([s.ece for s in scores], ".2f", 100, " %"),
        cell([s.seconds for s in scores], ".0f", unit=" s"),
    )


def _lead(runs: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    if len(groups) == 1:
        accuracy, params = spread([r.scores.accuracy for r in runs]), spread([r.scores.params for r in runs])
        if accuracy and params:
            return (
                f"{len(runs)} seeds of one experiment: "
                f"{100 * accuracy[0]:.2f}\u00a0±\u00a0{100 * accuracy[1]:.2f}\u00a0% "
                f"test accuracy at {params[0]:,.0f}\u00a0±\u00a0{params[1]:,.0f} parameters."
            )
    finished = [run for run in runs if run.scores.accuracy is not None]
    if not finished:
        return f"{len(runs)} runs, none of them finished."
    best = max(finished, key=lambda run: run.scores.accuracy or 0)
    smallest = min(finished, key=lambda run: run.scores.params or 0)
    return (
        f"{words.plural(len(runs), 'run')}. Most accurate: {best.folder.resolve().name} "
        f"({words.percent(best.scores.accuracy)}). Smallest: {smallest.folder.resolve().name} "
        f"({words.count(smallest.scores.params)} parameters)."
    )
