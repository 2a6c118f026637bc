"""Marks that several figures share: heat maps, end labels, epochs and the fine-tuning phase, axes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Layer, Run
from bayestrain.report.words import power, short_count, short_name

LEVELS = 12
FAINTEST = 0.06


def opacity(share: float) -> float:
    """Opacity that stands for a share between 0 and 1; even 0 stays visible."""
    return FAINTEST + (1 - FAINTEST) * round(share * (LEVELS - 1)) / (LEVELS - 1)


def heat(axes: Axes, shares: NDArray[np.float64], edges: Sequence[float], colour: str) -> None:
    """A heat map whose cell (row, column) has the opacity of ``shares[row, column]``; NaN is left empty.

    Opacity instead of a colour map suits a light and a dark page alike. Equal neighbours in a row become one rectangle
    and each of the few levels one path, which keeps even large maps small.
    """
    boxes: dict[int, list[tuple[float, float, float]]] = {}
    for row, values in enumerate(shares):
        levels = [-1 if np.isnan(v) else round(float(v) * (LEVELS - 1)) for v in values]
        start = 0
        for column in range(1, len(levels) + 1):
            if column == len(levels) or levels[column] != levels[start]:
                boxes.setdefault(levels[start], []).append((edges[start], edges[column], row))
                start = column
    for level, rectangles in sorted(boxes.items()):
        if level < 0:
            continue
        paths = [Path([(a, r - 0.5), (b, r - 0.5), (b, r + 0.5), (a, r + 0.5), (a, r - 0.5)], closed=True)
                 for a, b, r in rectangles]  # fmt: skip
        patch = PathPatch(Path.make_compound_path(*paths), facecolor=colour, linewidth=0)
        patch.set_alpha(opacity(level / (LEVELS - 1)))
        axes.add_patch(patch)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.grid(False)


def heat_key(axes: Axes, colour: str, low: str, high: str) -> None:
    """The key of a heat map, above its right end."""
    for k in range(5):
        box = axes.transAxes
        axes.add_patch(
            PathPatch(
                Path(
                    [(0.55 + 0.05 * k, 1.02), (0.6 + 0.05 * k, 1.02), (0.6 + 0.05 * k, 1.05), (0.55 + 0.05 * k, 1.05)]
                ),
                transform=box,
                facecolor=colour,
                linewidth=0,
                alpha=opacity(k / 4),
                clip_on=False,
            )
        )
    style = {"transform": axes.transAxes, "va": "center", "fontsize": 8.5, "color": LIGHT["muted"]}
    axes.text(0.53, 1.035, low, ha="right", **style)  # type: ignore[arg-type]
    axes.text(0.82, 1.035, high, ha="left", **style)  # type: ignore[arg-type]


def end_labels(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels (y, text, colour) at the right end of lines, pushed apart where they would overlap."""
    axes.figure.canvas.draw()
    gap = 11.0 * axes.figure.dpi / 72
    points = sorted(
        ((axes.transData.transform((x, y))[1], text, colour) for y, text, colour in ends), key=lambda p: p[0]
    )
    heights: list[float] = []
    for height, _, _ in points:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    middle = sum(p[0] for p in points) / max(len(points), 1) - sum(heights) / max(len(heights), 1)
    low, high = axes.transAxes.transform((0, 0))[1], axes.transAxes.transform((0, 1))[1]
    if heights:
        middle = min(max(middle, low - heights[0]), max(high - heights[-1], low - heights[0]))
    for (_, text, colour), height in zip(points, heights, strict=True):
        y = axes.transAxes.inverted().transform((0, height + middle))[1]
        axes.text(1.02, y, text, transform=axes.transAxes, color=colour, va="center", fontsize=9)


def finetune(axes: Axes, start: int | None, label: bool = True) -> None:
    """Shade the epochs after the ranks were fixed."""
    if start is None:
        return
    end = axes.get_xlim()[1]
    axes.axvspan(start, end, facecolor=LIGHT["cut"], alpha=0.13, linewidth=0)
    axes.set_xlim(right=end)
    if label:
        axes.text(end, 1.01, "fine-tune", transform=axes.get_xaxis_transform(), ha="right", va="bottom",
                  fontsize=8.5, color=LIGHT["muted"])  # fmt: skip


def epoch_axis(axes: Axes, run: Run, last: int | None = None) -> None:
    """The epochs of a run from left to right, up to `last` where it is given."""
    axes.set_xlim(run.history[0].epoch, max(last or run.history[-1].epoch, run.history[0].epoch + 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch")


def log_counts(axes: Axes, which: str) -> None:
    """A logarithmic axis of counts, with ticks such as 1k, 3k, 10k where decades are few."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    low, high = min(low, high), max(low, high)
    decades = np.log10(high / low)
    subs = [1.0] if decades > 2.5 else [1.0, 3.0] if decades > 1.6 else [1.0, 2.0, 5.0]
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(short_count))
    axis.set_minor_formatter(NullFormatter())


def log_powers(axes: Axes, which: str, ticks: int = 6) -> None:
    """A logarithmic axis of small numbers, ticks as powers of ten."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(numticks=ticks))
    axis.set_major_formatter(FuncFormatter(power))
    axis.set_minor_formatter(NullFormatter())


def stacked_height(bonds: int) -> float:
    """Height of a figure with one small plot per bond."""
    return max(3.0, 0.7 + 1.03 * bonds)


def layer_ticks(axes: Axes, layers: Sequence[Layer], names: int = 12) -> None:
    """About so many names of layers, so that they do not overlap."""
    step = max(1, round(len(layers) / names))
    rows = list(range(0, len(layers), step))
    axes.set_yticks(rows, [short_name(layers[row].name) for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
