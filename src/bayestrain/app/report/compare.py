"""`write_comparison`: several runs on one page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bayestrain.app.report import plots
from bayestrain.app.report.page import Section, Table, render
from bayestrain.app.report.read import Run, read_run, reading
from bayestrain.app.report.words import UNKNOWN, count, duration, join, number, percent, plural, ratio, short_name
from bayestrain.errors import DataError
from bayestrain.files import write_atomically

Runs = dict[str, Run]
DECISIVE = {"classification": ("accuracy", 1, percent), "regression": ("rmse", -1, number)}
"""The score that decides which run is best, whether high or low is good; else it is the log likelihood."""
CLOSE = 0.005
"""Scores that differ by no more than this part count as equally good."""
COLUMNS: dict[str, tuple[Callable[[Run], Any], Callable[[Any], str]]] = {
    "parameters": (lambda r: r.parameters, count),
    "ratio": (lambda r: r.ratio, ratio),
    "accuracy": (lambda r: r.scores("metrics").get("accuracy"), percent),
    "rmse": (lambda r: r.scores("metrics").get("rmse"), number),
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
                   in section.items() if f"{title}.{key}" != "run.name"} for name, run in runs.items()
        }  # fmt: skip
        layers = {name: {layer.name: join(layer.ranks) for layer in run.tensor_layers} for name, run in runs.items()}
        sections = [
            Section("Runs", (), _trade(runs), [_scores(runs)]),
            Section("Settings that differ", (), (), _side_by_side("setting", settings, all_keys=False)),
            Section("Ranks", ("In the order of each layer’s bonds.",), (), _side_by_side("layer", layers)),
        ]
        links = {name: Path(os.path.relpath(run.folder / "report.html", path.parent)).as_posix()
                 for name, run in runs.items() if (run.folder / "report.html").is_file()}  # fmt: skip
        title = f"{plural(len(runs), 'run')} compared"
        html = render("base.html.j2", title=title, lead=verdict(runs), notices=[], links=links, sections=sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)
    return path


def verdict(runs: Runs) -> str:
    """Which run is best, if they can be compared at all."""
    if len({run.task for run in runs.values()}) > 1:
        return "The runs are of different tasks, so their scores cannot be compared."
    key, sign, show, scores = _decisive(runs)
    if len(scores) < 2:
        return "Fewer than two of the runs are finished, so there is nothing to compare yet."
    best = max(scores, key=lambda name: sign * scores[name])
    close = [name for name in scores if abs(scores[best] - scores[name]) <= CLOSE * abs(scores[best])]
    small = min(close, key=lambda name: runs[name].parameters)
    text = f"{best} has the best {key.replace('_', ' ')}, {show(scores[best])}, with {count(runs[best].parameters)} "
    text += "parameters."
    if runs[small].parameters < runs[best].parameters:
        text += f" {small} comes close with {show(scores[small])} and only {count(runs[small].parameters)}."
    return text


def _decisive(runs: Runs) -> tuple[str, int, Callable[[float | None], str], dict[str, float]]:
    """The name of the deciding score, its sign, how it is shown, and the scores of finished runs."""
    key, sign, show = DECISIVE.get(next(iter(runs.values())).task, ("log_likelihood", 1, number))
    return key, sign, show, {name: m[key] for name, run in runs.items() if key in (m := run.scores("metrics"))}


def _scores(runs: Runs) -> Table:
    values = {column: [of(run) for run in runs.values()] for column, (of, _) in COLUMNS.items()}
    shown = [column for column, found in values.items() if any(value is not None for value in found)]
    rows = [
        [name if run.result else f"{name} (unfinished)", *(COLUMNS[column][1](values[column][k]) for column in shown)]
        for k, (name, run) in enumerate(runs.items())
    ]
    return Table("", ("run", *shown), rows)


def _side_by_side(label: str, found: dict[str, dict[str, str]], all_keys: bool = True) -> list[Table]:
    """One column per run; a row per key that any run has, or only those whose values differ."""
    keys = dict.fromkeys(key for entries in found.values() for key in entries)
    rows = [(key, *(entries.get(key, UNKNOWN) for entries in found.values())) for key in keys]
    rows = [row for row in rows if all_keys or len(set(row[1:])) > 1]
    return [Table("", (label, *found), rows)] if rows else []


def _trade(runs: Runs) -> list[plots.Plot]:
    """Score against size."""
    key, _, show, scores = _decisive(runs)
    if len(scores) < 2 or len({run.task for run in runs.values()}) > 1:
        return []
    figure, (axes,) = plots.new(3.4)
    for place, (name, score) in enumerate(scores.items()):
        colour, marker = plots.SERIES[place % 6], "osD^vP"[place % 6]
        axes.plot(runs[name].parameters, score, marker, color=colour, markersize=7, label=short_name(name, 30))
    plots.log_axis(axes.xaxis)
    axes.set_xlabel("parameters (log scale)")
    axes.set_ylabel(key.replace("_", " ") + (" (%)" if show is percent else ""))
    if show is percent:
        plots.percents(axes.yaxis)
    if len(scores) <= 8:
        figure.legend(loc="outside upper left")
    return [plots.finish(figure, "Size and score", "Further left is smaller.")]
