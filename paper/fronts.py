"""Figures of the recorded results in plain matplotlib: fronts, ranks, parameters per layer, uncertainty.

The same results give the same SVG files: ids are salted with a constant, and no date is written. What a figure shows is
also written into its description (the `<dc:description>` of the file), in words and numbers.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox
from safetensors.numpy import load_file

from paper.published import PAPER
from paper.records import KINDS, Group, Layer, Run

INK, MUTED, LINE, CUT, KEPT, TEAL, ORANGE, RED, PURPLE = (
    "#17202b", "#566170", "#d9dde3", "#868f9c", "#1f5fd0", "#0c857a", "#b85a00", "#b3261e", "#8445c2",
)  # fmt: skip
COLOURS = {"dense": CUT, "tensorized": TEAL, "low-rank": KEPT}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "bayestrain", "font.family": "sans-serif", "font.size": 9.5,
    "text.color": INK, "text.parse_math": False, "axes.labelcolor": MUTED, "axes.edgecolor": LINE, "axes.grid": True,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "grid.color": LINE, "grid.linewidth": 0.6, "xtick.color": LINE, "ytick.color": LINE,
    "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip
FEW_BONDS = 24


@dataclass(frozen=True)
class Drawing:
    """One figure of an experiment; `describe` says in words and numbers what it shows."""

    name: str
    title: str
    caption: str
    describe: str
    figure: Figure

    def svg(self) -> str:
        """The file, the same for the same results."""
        buffer = io.BytesIO()
        about = {"Date": None, "Creator": None, "Title": self.title, "Description": self.describe}
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the viewer's own font has it
            self.figure.savefig(buffer, format="svg", metadata=about)
        return buffer.getvalue().decode()


def figures(experiment: str, groups: Sequence[Group]) -> list[Drawing]:
    """All figures of an experiment."""
    with mpl.rc_context(STYLE):
        drawings = [front(experiment, groups)]
        if shown := typical(groups):
            drawings += [rank_figure(experiment, shown), layer_figure(experiment, shown)]
        if answered := evaluated(groups):
            drawings.append(uncertainty_figure(experiment, *answered))
    return drawings


def typical(groups: Sequence[Group]) -> Group | None:
    """Whose ranks are shown: "default", else the smallest of our own single networks that were trained in one go."""
    own = [group for group in groups if group.searches and not group.first.earlier_epochs and not group.shortened]
    return min([g for g in own if g.label == "default"] or own, key=lambda group: group.size, default=None)


def evaluated(groups: Sequence[Group]) -> tuple[Group, Run] | None:
    """A posterior whose predictions were recorded: low-rank before tensorized before dense, more particles first."""
    order = list(KINDS)
    kept = [(group, run) for group in groups if group.first.posterior for run in group.runs if run.predictions]
    return max(
        kept, default=None,
        key=lambda pair: (order.index(pair[1].kind), pair[1].posterior.particles if pair[1].posterior else 0),
    )  # fmt: skip


# --- accuracy against size --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A mark of the front; a hollow one far below all full ones stands on the lower edge."""

    x: float
    y: float
    dx: float
    dy: float
    label: str
    colour: str
    marker: str
    hollow: bool
    legend: str
    describe: str


def front(experiment: str, groups: Sequence[Group]) -> Drawing:
    """Test accuracy against parameters, mean and standard deviation over seeds, beside the paper."""
    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    marks = {group.label: _mark(group) for group in groups}
    everything = [*_published(experiment), *marks.values()]
    full = [mark for mark in everything if not mark.hollow]
    low, high = min(m.y - m.dy for m in full), max(m.y + m.dy for m in full)
    room = 0.13 * (high - low) + 0.001
    inside = [mark for mark in everything if mark.y >= 2 * low - high - room]
    low = min(mark.y - mark.dy for mark in inside)
    axes.set_xscale("log")
    axes.set_xlim(1.5 * max(mark.x for mark in everything), min(mark.x for mark in everything) / 1.5)
    axes.set_ylim(low - 1.3 * room, min(1.0, high + room))
    lines = joined(groups)
    paths = [sorted((marks[group.label].x, marks[group.label].y) for group in members) for members in lines.values()]
    for style, path in zip(lines, paths, strict=True):
        axes.plot(*zip(*path, strict=True), style, color=KEPT, linewidth=1, alpha=0.35, zorder=1)
    bottom = axes.get_ylim()[0]
    for mark in everything:
        off = mark.y < bottom
        if (mark.dx or mark.dy) and not off:
            axes.errorbar(mark.x, mark.y, mark.dy, mark.dx, color=mark.colour, linewidth=1, capsize=2.5, zorder=2)
        axes.plot(mark.x, max(mark.y, bottom), mark.marker, color=mark.colour, markersize=7.5, zorder=4,
                  clip_on=False, markerfacecolor="white" if mark.hollow else mark.colour)  # fmt: skip
    _count_axis(axes)
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
    axes.set(xlabel="parameters (log scale, smaller to the right)", ylabel="test accuracy / %")
    dense = groups[0].first.dense_parameters
    top = axes.secondary_xaxis("top", functions=(lambda x: dense / np.maximum(x, 1e-9),) * 2)
    top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    top.minorticks_off()
    top.set_xlabel("times smaller than dense")
    top.spines["top"].set_visible(False)
    looks = {mark.legend: mark for mark in everything}
    handles = [
        Line2D([], [], color=m.colour, marker=m.marker, linestyle="", label=text,
               markerfacecolor="white" if m.hollow else m.colour) for text, m in looks.items()
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, columnspacing=1.2, handletextpad=0.1)
    _label(figure, axes, everything, paths)
    said = {"-": "weights of the prior (solid)", ":": "targets (dotted)", "--": "short runs (dashed)"}
    caption = "Mean and standard deviation over seeds, labelled by the run's name; diamonds are the paper's figures."
    if lines:
        caption += f" Lines join {', '.join(said[style] for style in lines)}."
    if begun := [f"`{group.label}`" for group in groups if group.first.earlier_epochs]:
        caption += f" Started from larger networks, so with more epochs than the others: {', '.join(begun)}."
    if short := [f"`{group.label}` ({group.shortened})" for group in groups if group.shortened]:
        caption += f" Fewer epochs than their preset has: {', '.join(short)}."
    describe = " ".join(mark.describe for mark in everything)
    return Drawing(f"front-{experiment}", f"Test accuracy against parameters, {experiment}", caption, describe, figure)


def joined(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Our single networks by the style of the line that joins them: over weights, over targets, over short runs."""
    found: dict[str, list[Group]] = {"-": [], ":": [], "--": []}
    for group in (group for group in groups if group.searches):
        found["--" if group.shortened else ":" if group.first.target_ratio else "-"].append(group)
    return {style: members for style, members in found.items() if len(members) > 1}


def _mark(group: Group) -> Mark:
    run, several = group.first, group.first.posterior is not None
    (x, dx), (y, dy) = (
        group.mean(value) or (0.0, 0.0) for value in (lambda r: r.parameters, lambda r: r.metrics["accuracy"])
    )
    preset, hollow = ", preset paper" * (run.preset == "paper"), run.preset == "paper"
    short = bool(group.shortened) and not several
    legend = f"{KINDS[run.kind]}, {'posterior' if several else 'MAP'}{preset}{', short' * short}"
    describe = f"{group.label}: {x:,.0f} ± {dx:,.0f} parameters, {100 * y:.2f} ± {100 * dy:.2f} %."
    marker = "^" if several else "s" if short else "o"
    return Mark(x, y, dx, dy, group.label, COLOURS[run.kind], marker, hollow, legend, describe)


def _published(experiment: str) -> Iterator[Mark]:
    if paper := PAPER.get(experiment):
        for x, y, what in ((paper.parameters, paper.accuracy, "LR-BTNN"), (paper.dense_parameters,
                                                                          paper.dense_accuracy, "BNN")):  # fmt: skip
            who = f"the paper, {what}"
            yield Mark(x, y, 0, 0, who, ORANGE, "D", what == "BNN", who, f"{who}: {x:,} parameters, {100 * y:.1f} %.")


def _label(figure: Figure, axes: Axes, marks: Sequence[Mark], paths: Sequence[list[tuple[float, float]]]) -> None:
    """Write every label at the first place around its mark that covers no mark, bar, line or other label."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    at, frame, bottom = axes.transData.transform, axes.get_window_extent(), axes.get_ylim()[0]
    taken: list[Bbox] = []
    for mark in marks:
        x, y = at((mark.x, max(mark.y, bottom)))
        taken += [Bbox.from_bounds(x - 6, y - 6, 12, 12)]
        taken += [Bbox([at((mark.x, mark.y - mark.dy)), at((mark.x, mark.y + mark.dy))]).padded(3)] * bool(mark.dy)
    for one, other in (pair for path in paths for pair in pairwise(map(at, path))):
        taken += [Bbox.from_bounds(*(one + (other - one) * k / 30 - 1), 2, 2) for k in range(31)]
    for mark in marks:
        text = mark.label if mark.y >= bottom else f"{mark.label}: {100 * mark.y:.1f} %, below"
        note = axes.annotate(text, (mark.x, max(mark.y, bottom)), (0, 0), textcoords="offset points", va="center",
                             fontsize=8.5, color=mark.colour, zorder=6)  # fmt: skip
        places = []
        for radius in (9, 12, 16, 24, 36):
            for across, up in ((0, 1), (0, -1), (1, 0), (-1, 0), (0.8, 0.8), (-0.8, 0.8), (0.8, -0.8), (-0.8, -0.8)):
                look = {"ha": ("center", "left", "right")[int(np.sign(across))],
                        "position": (radius * across, radius * up)}  # fmt: skip
                note.set(**look)
                box = note.get_window_extent()
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 - 8 or box.y1 > frame.y1
                places.append((box.count_overlaps(taken) + 9 * outside + radius / 50, look, box))
        _, look, box = min(places, key=lambda place: place[0])
        note.set(**look)
        taken.append(box)


def _count_axis(axes: Axes) -> None:
    """Ticks such as 1k, 3k, 10k on a logarithmic axis of parameters."""
    low, high = sorted(axes.get_xlim())
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if math.log10(high / low) > 1.6 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k"
                                                 if n >= 1e3 else f"{n:g}"))  # fmt: skip
    axes.xaxis.set_minor_formatter(NullFormatter())


# --- ranks and parameters of one network ------------------------------------------------------------------------------


def rank_figure(experiment: str, group: Group) -> Drawing:
    """Ranks kept of those at the start: bars for a small network, a table of shaded numbers for a deep one."""
    run = group.median
    layers = [layer for layer in run.layers if layer.ranks]
    few = sum(len(layer.ranks) for layer in layers) <= FEW_BONDS
    figure = (_rank_bars if few else _rank_cells)(experiment, layers)
    published = PAPER[experiment].ranks if experiment in PAPER else {}
    caption = f"Ranks that `{group.label}`, seed {run.seed}, kept, of the ranks at the start."
    caption += " Diamonds are the paper's ranks." if published and few else ""
    describe = " ".join(f"{x.name}: {', '.join(map(str, x.ranks))} of {', '.join(map(str, x.max_ranks))}."
                        for x in layers)  # fmt: skip
    return Drawing(f"ranks-{experiment}", f"Ranks per bond, {experiment}", caption, describe, figure)


def _rank_bars(experiment: str, layers: Sequence[Layer]) -> Figure:
    rows = [(layer, bond) for layer in layers for bond in range(len(layer.ranks))]
    figure = Figure(figsize=(5.2, 0.7 + 0.26 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    published = PAPER[experiment].ranks if experiment in PAPER else {}
    for row, (layer, bond) in enumerate(rows):
        rank, most = layer.ranks[bond], layer.max_ranks[bond]
        axes.barh(row, most, 0.66, color=CUT, alpha=0.28)
        axes.barh(row, rank, 0.66, color=KEPT)
        axes.text(most, row, f" {rank} / {most}", va="center", fontsize=8.5)
        if theirs := published.get(layer.name, ()):
            axes.plot(theirs[bond], row, "D", markersize=5, color=ORANGE, zorder=4)
    axes.set_yticks(range(len(rows)), [f"layer {layer.name} · bond {bond + 1}" for layer, bond in rows])
    axes.set(xlabel="rank", ylim=(len(rows) - 0.5, -0.6), xlim=(0, 1.12 * max(max(x.max_ranks) for x in layers)))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="y", visible=False)
    return figure


def _rank_cells(_: str, layers: Sequence[Layer]) -> Figure:
    panels = _panels(layers)
    figure = Figure(figsize=(3.3 * len(panels), 0.9 + 0.17 * len(panels[0])), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        bonds = max(len(layer.ranks) for layer in part)
        shares = np.full((len(part), bonds), np.nan)
        for row, layer in enumerate(part):
            for bond, (rank, most) in enumerate(zip(layer.ranks, layer.max_ranks, strict=True)):
                shares[row, bond] = rank / most
                axes.text(bond, row, str(rank), ha="center", va="center", fontsize=7.5)
        axes.pcolormesh(np.arange(bonds + 1) - 0.5, np.arange(len(part) + 1) - 0.5, shares, cmap="Blues", vmin=0,
                        vmax=1.6)  # fmt: skip
        axes.set_yticks(range(len(part)), [layer.name for layer in part], fontsize=8)
        axes.set_xticks(range(bonds), [str(bond + 1) for bond in range(bonds)])
        axes.set(xlabel="bond (number: rank kept)", ylim=(len(part) - 0.5, -0.5))
        axes.grid(visible=False)
    return figure


def layer_figure(experiment: str, group: Group) -> Drawing:
    """Parameters of every layer: dense, at full rank, and now."""
    run = group.median
    panels = _panels(run.layers)
    figure = Figure(figsize=(4.2 * len(panels), 1.1 + 0.2 * len(panels[0])), layout="constrained")
    limits = 0.7 * min(layer.now for layer in run.layers), 1.5 * max(layer.dense for layer in run.layers)
    for axes, part in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = range(len(part))
        dense, now = [layer.dense for layer in part], [layer.now for layer in part]
        axes.hlines(rows, now, dense, color=CUT, alpha=0.5, linewidth=1.3)
        axes.plot(dense, rows, "o", color=CUT, markersize=5, label="dense")
        starts = [(layer.start, row) for row, layer in enumerate(part) if layer.ranks]
        axes.plot(*zip(*starts, strict=True), "|", color=CUT, markersize=8, markeredgewidth=1.6, label="at full rank")
        axes.plot(now, rows, "o", color=KEPT, markersize=5, label="now")
        axes.set(xscale="log", xlim=limits, ylim=(len(part) - 0.4, -0.6), xlabel="parameters (log scale)")
        axes.set_yticks(rows, [layer.name for layer in part], fontsize=8)
        _count_axis(axes)
        axes.grid(axis="y", visible=False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    caption = f"Parameters of each layer of `{group.label}`, seed {run.seed}: dense, at full rank, and now."
    describe = " ".join(f"{x.name}: {x.dense:,} dense, {x.start:,} at full rank, {x.now:,} now." for x in run.layers)
    return Drawing(f"layers-{experiment}", f"Parameters per layer, {experiment}", caption, describe, figure)


def _panels(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    """Columns of about the same length, of at most 37 rows."""
    number = math.ceil(len(layers) / 37)
    edges = [round(k * len(layers) / number) for k in range(number + 1)]
    return [layers[start:stop] for start, stop in pairwise(edges)]


# --- uncertainty of a posterior ---------------------------------------------------------------------------------------


def uncertainty_figure(experiment: str, group: Group, run: Run) -> Drawing:
    """Histograms of total and epistemic uncertainty: images classified right, wrong, and images of another kind."""
    assert run.predictions is not None
    assert run.posterior is not None
    stored, outside = load_file(run.predictions), run.posterior.outside
    right = stored["probabilities"].argmax(1) == stored["labels"]
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    all_axes, said = figure.subplots(3, 2, sharex=True, sharey="col", squeeze=False), []
    for column, kind in enumerate(("total", "epistemic")):
        parts = {"right": (stored[kind][right], KEPT), "wrong": (stored[kind][~right], RED)}
        if f"ood_{kind}" in stored:
            parts[outside] = stored[f"ood_{kind}"], PURPLE
        edges = np.geomspace(1e-5, max(float(values.max()) for values, _ in parts.values()) * 1.001, 29)
        for axes, (who, (values, colour)) in zip(all_axes[:, column], parts.items(), strict=False):
            shares = np.histogram(np.maximum(values, edges[0]), edges)[0] / len(values)
            axes.stairs(100 * shares, edges, fill=True, color=colour)
            middle = float(np.median(values))
            axes.axvline(max(middle, edges[0]), color=INK, linewidth=1, linestyle=(0, (3, 2)))
            axes.set_title(f"{who} ({len(values):,}): median {middle:.2g} nats", color=colour)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.minorticks_off()
            axes.yaxis.set_major_locator(MaxNLocator(3))
            said.append(f"{kind}, {who}: {len(values):,} images, median {middle:.3g} nats.")
        all_axes[-1, column].set_xlabel(f"{kind} uncertainty / nats")
    figure.supylabel("share of the images / %", fontsize=9.5, color=MUTED)
    beside = f" and on {outside}" if outside else ""
    caption = f"Uncertainty of `{group.label}`, seed {run.seed}, on the test images{beside}; dashed: the median."
    return Drawing(f"uncertainty-{experiment}", f"Uncertainty, {experiment}", caption, " ".join(said), figure)
