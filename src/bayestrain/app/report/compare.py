"""`write_comparison`: several runs on one page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.ticker import NullFormatter

from bayestrain.app.report.facts import Table, join, number, percent, plural, tiles
from bayestrain.app.report.figures import SERIES, Plot, drawn, short
from bayestrain.app.report.page import Section, render
from bayestrain.app.report.read import Run, read_run, reading
from bayestrain.errors import DataError
from bayestrain.files import write_atomically

Runs = dict[str, Run]
DECISIVE = {"classification": ("accuracy", 1, percent), "regression": ("rmse", -1, number)}
"""The score that decides which run is best, whether high or low is good; else it is the log likelihood."""
CLOSE = 0.005
"""Scores that differ by no more than this part count as equally good."""


def write_comparison(folders: Sequence[Path | str], out: Path | str) -> Path:
    """Write one page that compares several runs, and return its path."""
    places, path = list(dict.fromkeys(Path(folder).resolve() for folder in folders)), Path(out)
    if not places:
        raise DataError("There is no run to compare. Give at least one run folder.")
    base, runs = Path(os.path.commonpath([place.parent for place in places])), Runs()
    for place in places:
        run = read_run(place)
        runs[place.relative_to(base).as_posix() + ("" if run.finished else " (unfinished)")] = run
    with reading(base):
        links = {name: Path(os.path.relpath(run.folder / "report.html", path.parent)).as_posix()
                 for name, run in runs.items() if (run.folder / "report.html").is_file()}  # fmt: skip
        scores = [{label: value for label, value, _ in tiles(run)} for run in runs.values()]
        ranks = [{name: join(each) for name, each in run.result["ranks"].items()} for run in runs.values()]
        settings = [
            {f"{title}.{key}": str(value) for title, section in run.config.items() for key, value in section.items()}
            for run in runs.values()
        ]
        sections = [
            Section("Runs", (), _trade(runs), _side_by_side("score", runs, scores)),
            Section("Settings that differ", (), (), _side_by_side("setting", runs, settings, all_keys=False)),
            Section("Ranks", ("In the order of each layer’s bonds.",), (), _side_by_side("layer", runs, ranks)),
        ]
        title = f"{plural(len(runs), 'run')} compared"
        page = render("base.html.j2", title=title, lead=verdict(runs), links=links, sections=sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def verdict(runs: Runs) -> str:
    """Which run is best, if they can be compared at all."""
    if len({run.result["task"] for run in runs.values()}) > 1:
        return "The runs are of different tasks, so their scores cannot be compared."
    key, sign, show, scores = _decisive(runs)
    if len(scores) < 2:
        return "Fewer than two of the runs are finished, so there is nothing to compare yet."
    best = max(scores, key=lambda name: sign * scores[name])
    close = [name for name in scores if abs(scores[best] - scores[name]) <= CLOSE * abs(scores[best])]
    small = min(close, key=lambda name: runs[name].result["parameters"])
    text = f"{best} has the best {key}, {show(scores[best])}, with {runs[best].result['parameters']:,} parameters."
    if runs[small].result["parameters"] < runs[best].result["parameters"]:
        text += f" {small} comes close with {show(scores[small])} and only {runs[small].result['parameters']:,}."
    return text


def _decisive(runs: Runs) -> tuple[str, int, Callable[[float], str], dict[str, float]]:
    """The name of the deciding score, its sign, how it is shown, and the scores of finished runs."""
    key, sign, show = DECISIVE.get(next(iter(runs.values())).result["task"], ("log_likelihood", 1, number))
    found = {name: m[key] for name, run in runs.items() if key in (m := run.result["metrics"])}
    return key.replace("_", " "), sign, show, found


def _side_by_side(label: str, runs: Runs, found: list[dict[str, str]], all_keys: bool = True) -> list[Table]:
    """One column per run; a row per key that any run has, or only those whose values differ."""
    keys = dict.fromkeys(key for entries in found for key in entries)
    rows = [(key, *(entries.get(key, "–") for entries in found)) for key in keys]
    rows = [row for row in rows if all_keys or len(set(row[1:])) > 1]
    return [Table("", (label, *runs), rows)] if rows else []


def _trade(runs: Runs) -> list[Plot]:
    """Score against size."""
    key, _, show, scores = _decisive(runs)
    plots = list[Plot]()
    if len(scores) < 2 or len({run.result["task"] for run in runs.values()}) > 1:
        return plots
    title, y = f"Size and {key}", f"{key} (%)" if show is percent else key
    with drawn(plots, title, "Further left is smaller.", "parameters (log scale)", y) as axes:
        axes.set_xscale("log")
        axes.xaxis.set(major_formatter="{x:,g}", minor_formatter=NullFormatter())
        for place, (name, score) in enumerate(scores.items()):
            label = short(name) if len(scores) <= 8 else ""
            marker, colour = "osD^vP"[place % 6], SERIES[place % 6]
            axes.plot(runs[name].result["parameters"], score, marker, color=colour, markersize=7, label=label)
    return plots
