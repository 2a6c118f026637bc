"""`write_comparison`: several runs on one page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bayestrain.app.report import plots
from bayestrain.app.report.page import Section, Table, render
from bayestrain.app.report.read import Run, read_run, reading
from bayestrain.app.report.words import UNKNOWN, count, duration, join, number, percent, plural, ratio, short_name
from bayestrain.errors import DataError
from bayestrain.files import write_atomically

DECISIVE = {"classification": "accuracy", "regression": "rmse"}
"""The score that decides which run is best; for other tasks it is the log likelihood."""
CLOSE_ACCURACY, CLOSE = 0.005, 0.02
"""Accuracies that differ by no more than this, and other scores by no more than this part, count as equally good."""
COLUMNS: dict[str, tuple[Callable[[Run], Any], Callable[[Any], str]]] = {
    "parameters": (lambda r: r.parameters, count),
    "ratio": (lambda r: r.ratio, ratio),
    "accuracy": (lambda r: r.scores("metrics").get("accuracy"), percent),
    "RMSE": (lambda r: r.scores("metrics").get("rmse"), number),
    "log likelihood": (lambda r: r.scores("metrics").get("log_likelihood"), number),
    "calibration error": (lambda r: r.scores("metrics").get("ece"), percent),
    "particles": (lambda r: r.posterior.get("particles", 1), count),
    "training time": (lambda r: r.result.get("seconds"), duration),
}


def write_comparison(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write one page that compares several runs, and return its path."""
    places, path = list(dict.fromkeys(Path(folder).resolve() for folder in folders)), Path(out)
    if not places:
        raise DataError("There is no run to compare. Give at least one run folder.")
    base = Path(os.path.commonpath([place.parent for place in places]))
    runs = {place.relative_to(base).as_posix(): read_run(place) for place in places}
    with reading(base), plots.style():
        settings = {
            name: {f"{title}.{key}": str(value) for title, section in run.config.items() for key, value
                   in section.items() if f"{title}.{key}" not in ("run.name", "run.seed")} for name, run in runs.items()
        }  # fmt: skip
        layers = {name: {layer.name: join(layer.ranks) for layer in run.tensor_layers} for name, run in runs.items()}
        differing = _side_by_side("setting", settings, all_keys=False)
        sections = [
            Section("Runs", (), _trade(runs), [_scores(runs, seeds=not differing)]),
            Section("Settings that differ", (), (), differing),
            Section("Ranks", ("In the order of each layer’s bonds.",), (), _side_by_side("layer", layers)),
        ]
        links = {name: Path(os.path.relpath(run.folder / "report.html", path.parent)).as_posix()
                 for name, run in runs.items() if (run.folder / "report.html").is_file()}  # fmt: skip
        title = f"{plural(len(runs), 'run')} compared"
        html = render("base.html.j2", title=title, lead=verdict(runs), notices=[], links=links, sections=sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)
    return path


def scored(runs: dict[str, Run]) -> tuple[str, dict[str, float]]:
    """The decisive score and the runs that have it; none if the runs are of different tasks."""
    tasks = {run.task for run in runs.values()}
    key = DECISIVE.get(next(iter(tasks)), "log_likelihood")
    found = {name: run.scores("metrics") for name, run in runs.items()} if len(tasks) == 1 else {}
    return key, {name: scores[key] for name, scores in found.items() if key in scores}


def verdict(runs: dict[str, Run]) -> str:
    """Which run is best, if they can be compared at all."""
    key, scores = scored(runs)
    if len({run.task for run in runs.values()}) > 1:
        return "The runs are of different tasks, so their scores cannot be compared."
    if len(scores) < 2:
        return "Fewer than two of the runs are finished, so there is nothing to compare yet."
    sign, show = -1 if key == "rmse" else 1, percent if key == "accuracy" else number
    best = max(scores, key=lambda name: sign * scores[name])
    margin = CLOSE_ACCURACY if key == "accuracy" else CLOSE * abs(scores[best])
    close = [name for name in scores if sign * (scores[best] - scores[name]) <= margin]
    small = min(close, key=lambda name: runs[name].parameters)
    text = f"{best} has the best {_label(key)}, {show(scores[best])}, with {count(runs[best].parameters)} parameters."
    if runs[small].parameters < runs[best].parameters:
        text += f" {small} comes close with {show(scores[small])} and only {count(runs[small].parameters)}."
    return text


def _label(key: str) -> str:
    return "RMSE" if key == "rmse" else key.replace("_", " ")


def _scores(runs: dict[str, Run], seeds: bool) -> Table:
    """A row per run; if only their seeds differ, also their mean and standard deviation."""
    values = {column: [of(run) for run in runs.values()] for column, (of, _) in COLUMNS.items()}
    values = {column: found for column, found in values.items() if any(value is not None for value in found)}
    summaries = {"mean over seeds": mean, "standard deviation": stdev} if seeds and len(runs) > 1 else {}
    rows = [[name if run.result else f"{name} (unfinished)"] for name, run in runs.items()] + [[s] for s in summaries]
    for column, found in values.items():
        all_of_them = [*found, *(None if None in found else summary(found) for summary in summaries.values())]
        for row, value in zip(rows, all_of_them, strict=True):
            row.append(UNKNOWN if value is None else COLUMNS[column][1](value))
    return Table("", ("run", *values), rows)


def _side_by_side(label: str, found: dict[str, dict[str, str]], all_keys: bool = True) -> list[Table]:
    """One column per run; a row per key that any run has, or only those whose values differ."""
    keys = dict.fromkeys(key for entries in found.values() for key in entries)
    cells = {key: [entries.get(key, UNKNOWN) for entries in found.values()] for key in keys}
    rows = [(key, *values) for key, values in cells.items() if all_keys or len(set(values)) > 1]
    return [Table("", (label, *found), rows)] if rows else []


def _trade(runs: dict[str, Run]) -> list[plots.Plot]:
    """Score against size."""
    key, scores = scored(runs)
    if len(scores) < 2:
        return []
    figure, (axes,) = plots.new(3.4)
    for place, (name, score) in enumerate(scores.items()):
        colour, marker = plots.SERIES[place % 6], "osD^vP"[place % 6]
        axes.plot(runs[name].parameters, score, marker, color=colour, markersize=7, label=short_name(name, 30))
    plots.log_axis(axes.xaxis)
    axes.set_xlabel("parameters (log scale)")
    axes.set_ylabel(_label(key) + (" (%)" if key == "accuracy" else ""))
    if key == "accuracy":
        plots.percents(axes.yaxis)
    if len(scores) <= 8:
        figure.legend(loc="outside upper left")
    return [plots.finish(figure, f"Size and {_label(key)}", "Further left is smaller.")]
