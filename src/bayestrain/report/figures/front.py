"""How accurate at which size: all groups of an experiment in one figure, beside the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bayestrain.report.figures.labels import Label, place_labels
from bayestrain.report.figures.marks import log_counts
from bayestrain.report.groups import KINDS, Group
from bayestrain.report.palette import LIGHT
from bayestrain.report.paper import PaperRow
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent, plural, ratio

WIDTH, HEIGHT = 7.4, 4.4
COLOURS = {"dense": "cut", "tensorized": "c2", "low-rank": "kept"}
WHOLE, SHORT, SEVERAL = "o", "s", "^"
"""Marks of single networks, of those that had fewer epochs than their preset has, and of posteriors."""

LONG = len("LR-BTNN, MAP, preset paper")
"""Four columns of a legend fit beside each other if none is longer than this."""

FAR = 1.0
"""A hollow mark further below all full ones than this many times their range stands on the lower edge."""


@dataclass(frozen=True)
class Point:
    """A mark: where, how far its error bars reach, what it is called and how it looks.

    `off` is true of a mark on the lower edge of the figure, whose accuracy lies below that.
    """

    x: float
    y: float
    dx: float
    dy: float
    label: str
    hover: str
    colour: str
    marker: str
    hollow: bool
    legend: str
    off: bool = False


def front_plot(experiment: str, groups: Sequence[Group], paper: PaperRow | None) -> Plot:
    """Test accuracy against parameters, mean and standard deviation over seeds."""
    ours = {group.label: _point(experiment, group) for group in groups}
    points = _within([*_paper_points(paper), *ours.values()])
    lines = {
        style: sorted((ours[group.label].x, ours[group.label].y) for group in members)
        for style, members in lines_through(experiment, groups).items()
    }
    dense = groups[0].settings.dense_params
    name = f"front-{experiment}"
    describe = f"Accuracy against parameters, {experiment}. " + " ".join(f"{point.hover}." for point in points)
    with drawing(HEIGHT, width=WIDTH) as (figure, (axes,)):
        _limits(axes, points)
        for style, line in lines.items():
            axes.plot(*zip(*line, strict=True), style, color=LIGHT["kept"], linewidth=1, alpha=0.35, zorder=1)
        for point in points:
            _draw(axes, point)
        _ratios(axes, dense)
        _legend(figure, points)
        bottom = axes.get_ylim()[0]
        labels = [Label(p.x, max(p.y, bottom), p.label, p.colour, p.dx, p.dy) for p in points]
        place_labels(figure, axes, labels, list(lines.values()))
        svg = inline(figure, name, describe)
    caption = "Right is smaller, up is better; bars are one standard deviation over seeds."
    return Plot(name, "Accuracy against size", caption, describe, svg)


def lines_through(experiment: str, groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Single networks of our preset that found their ranks, by the style of the line that joins them: "-" over weights
    of the prior, ":" over targets, "--" over networks with fewer epochs than the preset has."""
    found: dict[str, list[Group]] = {"-": [], ":": [], "--": []}
    for group in groups:
        settings = group.settings
        if settings.kind == "low-rank" and settings.particles == 1 and settings.preset != "paper":
            found["--" if settings.shortened(experiment) else "-" if settings.by_weight else ":"].append(group)
    return {style: members for style, members in found.items() if len(members) > 1}


def _point(experiment: str, group: Group) -> Point:
    settings = group.settings
    (x, dx), (y, dy), (smaller, _) = (
        group.mean(value) or (0.0, 0.0)
        for value in (lambda run: run.scores.params, lambda run: run.scores.accuracy, lambda run: run.scores.ratio)
    )
    times = ratio(smaller)
    several, paper_preset = settings.particles > 1, settings.preset == "paper"
    model = KINDS[settings.kind]
    name = f"{settings.particles} particles" if several else model if settings.kind == "dense" else ""
    label = ", ".join(part for part in (name, times if settings.kind != "dense" else "") if part)
    label += f"\nweight {settings.prior_weight:g}" if settings.by_weight else ""
    short = settings.shortened(experiment)
    marker = SEVERAL if several else SHORT if short else WHOLE
    part = f", {short} epochs" if short else ""
    sizes = f"{count(x)} ± {count(dx)}" if dx else count(x)
    accuracies = f"{percent(y)} ± {percent(dy)}" if dy else percent(y)
    hover = (
        f"{group.label} ({model}, {settings.how}{part}): {sizes} parameters, {times}, {accuracies}, "
        f"{plural(len(group.runs), 'seed')}"
    )
    legend = (
        f"{model}, {'posterior' if several else 'MAP'}"
        + (", preset paper" if paper_preset else "")
        + part * (not several)
    )
    return Point(x, y, dx, dy, label, hover, LIGHT[COLOURS[settings.kind]], marker, paper_preset, legend)


def _within(points: Sequence[Point]) -> list[Point]:
    """The same points; hollow ones that would flatten the rest go to the lower edge and say so."""
    rest = [point.y for point in points if not point.hollow]
    if not rest:
        return list(points)
    edge = min(rest) - FAR * (max(rest) - min(rest))
    return [
        replace(point, label=f"{point.label}: {percent(point.y, 1)}, below this axis", dy=0.0, off=True)
        if point.hollow and point.y < edge
        else point
        for point in points
    ]


def _paper_points(paper: PaperRow | None) -> list[Point]:
    """The paper's network that found its ranks, and its dense one."""
    if paper is None:
        return []
    colour = LIGHT["paper"]
    hover = f"paper, LR-BTNN: {count(paper.params)} parameters, {ratio(paper.ratio)}, {percent(paper.accuracy, 1)}"
    points = [
        Point(paper.params, paper.accuracy, 0, 0, f"paper, {ratio(paper.ratio)}", hover, colour, "D", False,
              "LR-BTNN of the paper")
    ]  # fmt: skip
    accuracy = paper.dense_accuracy
    if accuracy is None:
        return points
    hover = f"paper, BNN: {count(paper.dense_params)} parameters, {percent(accuracy, 1)}"
    dense = Point(paper.dense_params, accuracy, 0, 0, "paper, BNN", hover, colour, "D", True, "BNN of the paper")
    return [*points, dense]


def _limits(axes: Axes, points: Sequence[Point]) -> None:
    """Room for all marks, their bars and labels; the axis of sizes runs to the left."""
    xs = [x for p in points for x in (p.x + p.dx, max(p.x - p.dx, p.x / 2))]
    room = (max(xs) / min(xs)) ** 0.07 * 1.08
    axes.set_xlim(max(xs) * room, min(xs) / room)
    inside = [p for p in points if not p.off]
    low, high = min(p.y - p.dy for p in inside), max(p.y + p.dy for p in inside)
    margin = 0.13 * (high - low) + 0.001
    axes.set_ylim(low - 1.3 * margin, min(1.0 + 0.2 * margin, high + margin))
    log_counts(axes, "x")
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
    axes.set_xlabel("parameters (log scale, smaller to the right)")
    axes.set_ylabel("test accuracy / %")


def _draw(axes: Axes, point: Point) -> None:
    y = max(point.y, axes.get_ylim()[0])
    if point.dx or point.dy:
        axes.errorbar(point.x, y, point.dy, point.dx, color=point.colour, linewidth=1, capsize=2.5, zorder=2)
    face = LIGHT["card"] if point.hollow else point.colour
    mark = axes.plot(point.x, y, point.marker, color=point.colour, markerfacecolor=face, markersize=7.5,
                     markeredgewidth=1.5 if point.hollow else 0.5, zorder=4, clip_on=False)[0]  # fmt: skip
    tip(mark, point.hover)


def _ratios(axes: Axes, dense: int) -> None:
    """A second axis on top: how many times smaller than the dense network."""
    top = axes.twiny()
    left, right = axes.get_xlim()
    top.set_xlim(dense / left, dense / right)
    log_counts(top, "x")
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    top.set_xlabel("times smaller than dense")
    top.grid(visible=False)
    for spine in top.spines.values():
        spine.set_visible(False)


def _legend(figure: Figure, points: Sequence[Point]) -> None:
    kinds = {point.legend: point for point in sorted(points, key=lambda p: p.marker == "D")}  # the paper's last
    handles = [
        Line2D([], [], color=p.colour, marker=p.marker, linestyle="", markersize=7, label=text,
               markerfacecolor=LIGHT["card"] if p.hollow else p.colour, markeredgewidth=1.5 if p.hollow else 0.5)
        for text, p in kinds.items()
    ]  # fmt: skip
    most = 4 if max(map(len, kinds)) <= LONG else 3
    columns = int(np.ceil(len(handles) / np.ceil(len(handles) / most)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.4, handletextpad=0.2)
