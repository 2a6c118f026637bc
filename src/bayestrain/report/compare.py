"""The page that compares runs: a table, accuracy against size, trajectories, ranks side by side."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayestrain.report import words
from bayestrain.report.agreement import agreement_sentence, within_one
from bayestrain.report.figures.comparison import Entry, path_plots, rank_comparison, scatter_plot
from bayestrain.report.html import render
from bayestrain.report.palette import SERIES
from bayestrain.report.run import Run
from bayestrain.report.table import comparison_table, spread


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
        "notices": [
            *(f"{run.folder} has not finished: only its history is shown." for run in runs if not run.finished),
            *(f"{run.folder}: {run.begun.sentence}" for run in runs if run.begun),
        ],
        "agreements": agreements(groups),
        "table": comparison_table(entries, groups, beside),
        "several": any(run.posterior for run in runs),
        "many": any(run.posterior or run.kind != "low-rank" for run in runs),
        "left_out": any(run.kind == "tensorized" for run in runs),
        "plots": plots,
        "rank_grids": rank_grids,
    }
    return render("compare.html.j2", context)


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but their seed stand together."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        config = re.sub(r"(?m)^[ \t]*(seed|from_run)[ \t]*=.*\n?", "", run.config_text)
        before = run.begun.epochs if run.begun else None
        groups.setdefault((run.experiment, run.preset, run.kind, config, before), []).append(run)
    return list(groups.values())


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


def agreements(groups: Sequence[Sequence[Run]]) -> list[str]:
    """For each group of seeds that found ranks, on how many bonds they agree."""
    sentences = []
    for group in groups:
        seeds = [run for run in group if run.finished and run.tensor_layers and run.kind != "tensorized"]
        shapes = {tuple((layer.name, len(layer.ranks)) for layer in run.tensor_layers) for run in seeds}
        if len({run.seed for run in seeds}) < 2 or len(shapes) > 1:
            continue
        chains = [[rank for layer in run.tensor_layers for rank in layer.ranks] for run in seeds]
        found = list(zip(*chains, strict=True))
        most = [rank for layer in seeds[0].tensor_layers for rank in layer.max_ranks]
        uncut = sum(min(ranks) >= limit for ranks, limit in zip(found, most, strict=True))
        who = f"The {len(seeds)} seeds"
        if len(groups) > 1:
            about = f" ({_kind(seeds[0])})" if any(run.posterior for others in groups for run in others) else ""
            who += f" of {seeds[0].experiment}{about}"
        sentences.append(agreement_sentence(*within_one(found), who, "their ranks", uncut))
    return sentences


def _kind(run: Run) -> str:
    return f"{run.posterior.particles} particles" if run.posterior else "MAP"


def _lead(runs: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    if len(groups) == 1:
        accuracy, params = spread([r.scores.accuracy for r in runs]), spread([r.scores.params for r in runs])
        if accuracy and params:
            kind = "" if runs[0].kind == "low-rank" else f" ({runs[0].kind})"
            size = f"{params[0]:,.0f}\u00a0±\u00a0{params[1]:,.0f}" if params[1] else f"{params[0]:,.0f}"
            mean = f"{100 * accuracy[0]:.2f}\u00a0±\u00a0{100 * accuracy[1]:.2f}\u00a0%"
            return f"{len(runs)} seeds of one experiment{kind}: {mean} test accuracy at {size} parameters."
    finished = [run for run in runs if run.scores.accuracy is not None]
    if not finished:
        return f"{len(runs)} runs, none of them finished."
    best = max(finished, key=lambda run: run.scores.accuracy or 0)
    text = f"{words.plural(len(runs), 'run')}. Most accurate: {_name(best)} ({words.percent(best.scores.accuracy)})."
    smallest = min(finished, key=lambda run: run.scores.params or 0)
    if len({run.scores.params for run in finished}) > 1:
        text += f" Smallest: {_name(smallest)} ({words.count(smallest.scores.params)} parameters)."
    return text


def _name(run: Run) -> str:
    return run.folder.resolve().name
