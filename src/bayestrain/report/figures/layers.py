"""What is left of each layer: its ranks against the maximum, its parameters before and after."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bayestrain.report.figures import FEW_LAYERS, PANEL_ROWS
from bayestrain.report.figures.marks import log_counts, opacity
from bayestrain.report.palette import LIGHT
from bayestrain.report.paper import PaperRow
from bayestrain.report.run import Layer, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, plural, ratio, short_count, short_name

MOST_BONDS = 24
SPILL = 3
"""So many layers too many make the figures a little longer instead of one more."""


@dataclass(frozen=True)
class RankTexts:
    """What to say of ranks: the title, captions of bars and of a map, the label of the map's axis."""

    title: str
    bars: str
    map: str
    axis: str


FOUND = RankTexts(
    "Inferred ranks",
    "Blue: the rank the training kept. Grey: the maximum.",
    "Each number is the rank kept at that bond; the deeper the blue, the more of the maximum was kept.",
    "bond (number: rank kept)",
)
FULL = RankTexts(
    "Ranks",
    "Every bond has its maximal rank and keeps it.",
    "Each number is the rank of that bond, the maximal one.",
    "bond (number: rank)",
)


def rank_plots(run: Run, paper: PaperRow | None) -> list[Plot]:
    """Inferred ranks against the maximal ones: bars for a small network, a map of numbers for a deep one."""
    layers = run.tensor_layers
    if not layers:
        return []
    full = run.kind == "tensorized"
    texts = FULL if full else FOUND
    if sum(len(layer.ranks) for layer in layers) <= MOST_BONDS:
        return [_rank_bars(layers, None if full else paper, texts)]
    panels = _panels(layers)
    return [_rank_map(panel, k, len(panels), texts) for k, panel in enumerate(panels)]


def _rank_bars(layers: Sequence[Layer], paper: PaperRow | None, texts: RankTexts) -> Plot:
    rows: list[tuple[Layer, int | None]] = []
    for layer in layers:
        rows += [(layer, None), *((layer, bond) for bond in range(len(layer.ranks)))]
    published = paper.ranks if paper else {}
    shown = {layer.name: published.get(layer.name, ()) for layer in layers}
    shown = {name: ranks for name, ranks in shown.items() if ranks}
    widest = max(max(layer.max_ranks) for layer in layers)
    describe = "Ranks per bond. " + " ".join(
        f"Layer {layer.name}: {_list(layer.ranks)} of at most {_list(layer.max_ranks)}." for layer in layers
    )
    with drawing(0.55 + 0.235 * len(rows)) as (figure, (axes,)):
        ticks, names = [], []
        for row, (layer, bond) in enumerate(rows):
            if bond is None:
                axes.text(
                    0, row + 0.12, f"layer {short_name(layer.name, 36)}", va="center", fontweight="bold", fontsize=9
                )
                continue
            rank, maximum = layer.ranks[bond], layer.max_ranks[bond]
            ticks.append(row)
            names.append(f"bond {bond + 1}")
            hover = f"layer {layer.name}, bond {bond + 1}: rank {rank} of at most {maximum}"
            for length, colour, alpha in ((maximum, LIGHT["cut"], 0.28), (rank, LIGHT["kept"], None)):
                bar = axes.barh(row, length, 0.66, color=colour, alpha=alpha, linewidth=0)[0]
                tip(bar, hover)
            theirs = shown.get(layer.name, ())
            if len(theirs) == len(layer.ranks):
                mark = axes.plot(theirs[bond], row, "D", markersize=5, color=LIGHT["paper"], zorder=4)[0]
                tip(mark, f"paper: rank {theirs[bond]}")
            axes.text(maximum + 0.015 * widest, row, f"{rank} / {maximum}", va="center", fontsize=8.5)
        axes.set_yticks(ticks, names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_xlim(0, widest * 1.18)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("rank")
        svg = inline(figure, "ranks", describe)
    caption = texts.bars + (" Diamonds: the paper’s ranks." if shown else "")
    return Plot("ranks", texts.title, caption, describe, svg)


def _rank_map(layers: Sequence[Layer], panel: int, panels: int, texts: RankTexts) -> Plot:
    columns = max(len(layer.ranks) for layer in layers)
    part = f" ({panel + 1} of {panels})" if panels > 1 else ""
    describe = (
        f"Map of the ranks of {plural(len(layers), 'layer')} by bond, from {layers[0].name} to {layers[-1].name}."
    )
    name = f"ranks-{panel + 1}"
    with drawing(0.6 + 0.175 * len(layers)) as (figure, (axes,)):
        for row, layer in enumerate(layers):
            for bond, (rank, maximum) in enumerate(zip(layer.ranks, layer.max_ranks, strict=True)):
                share = rank / maximum
                cell = Rectangle((bond + 0.53, row - 0.44), 0.94, 0.88, facecolor=LIGHT["kept"], linewidth=0)
                cell.set_alpha(opacity(share) * 0.62)
                tip(cell, f"layer {layer.name}, bond {bond + 1}: rank {rank} of at most {maximum}")
                label = axes.text(bond + 1, row, str(rank), ha="center", va="center_baseline", fontsize=8)
                for artist in (axes.add_patch(cell), label):
                    artist.set_in_layout(False)  # inside the axes; measuring hundreds of them takes seconds
        axes.set_xlim(0.5, columns + 0.5)
        axes.set_ylim(len(layers) - 0.5, -0.5)
        axes.set_xticks(range(1, columns + 1))
        axes.set_yticks(range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=8)
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel(texts.axis)
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        svg = inline(figure, name, describe)
    return Plot(name, f"{texts.title}{part}", texts.map, describe, svg)


def parameter_plots(run: Run) -> list[Plot]:
    """Parameters of every layer, dense against now, on a logarithmic axis."""
    known = [layer for layer in run.layers if layer.dense and layer.now]
    if not known:
        return []
    if run.kind == "dense":
        panels = _panels(known)
        return [_dense_panel(panel, k, len(panels), max(layer.now or 1 for layer in known))
                for k, panel in enumerate(panels)]  # fmt: skip
    left = [layer for layer in known if not layer.ranks]
    if len(known) > 2 * FEW_LAYERS and len(left) > 1:  # a deep network: those left dense share one row
        total = sum(layer.dense or 0 for layer in left)
        known = [layer for layer in known if layer.ranks]
        known.append(Layer(f"{len(left)} left dense", dense=total, start=total, now=total))
    panels = _panels(known)
    values = [value for layer in known for value in (layer.dense, layer.start, layer.now) if value]
    limits = (min(values) / 1.6, max(values) * 1.6)
    full = run.kind == "tensorized"
    return [_parameter_panel(panel, k, len(panels), limits, full) for k, panel in enumerate(panels)]


def _dense_panel(layers: Sequence[Layer], panel: int, panels: int, most: int) -> Plot:
    """Nothing to compare with: where the parameters are."""
    many = len(layers) > 2 * FEW_LAYERS
    part = f" ({panel + 1} of {panels})" if panels > 1 else ""
    name = f"parameters-{panel + 1}"
    describe = f"Parameters per layer, {plural(len(layers), 'layer')}, {count(sum(x.now or 0 for x in layers))} in all."
    with drawing(0.65 + (0.175 if many else 0.42) * len(layers)) as (figure, (axes,)):
        for row, layer in enumerate(layers):
            bar = axes.barh(row, layer.now or 0, 0.62, color=LIGHT["kept"], linewidth=0)[0]
            tip(bar, f"{layer.name}: {count(layer.now)} parameters")
            axes.text((layer.now or 0) + 0.015 * most, row, count(layer.now), va="center", fontsize=8 if many else 9)
        axes.set_yticks(range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=8 if many else 9)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        axes.set_xlim(0, most * 1.25)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(short_count))
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("parameters")
        svg = inline(figure, name, describe)
    return Plot(name, f"Parameters per layer{part}", "Every layer is an ordinary one.", describe, svg)


def _parameter_panel(layers: Sequence[Layer], panel: int, panels: int, limits: tuple[float, float], full: bool) -> Plot:
    many = len(layers) > 2 * FEW_LAYERS
    part = f" ({panel + 1} of {panels})" if panels > 1 else ""
    describe = "Parameters per layer. " + (
        f"{plural(len(layers), 'layer')}, {count(sum(layer.dense or 0 for layer in layers))} before, "
        f"{count(sum(layer.now or 0 for layer in layers))} after."
        if many
        else " ".join(f"{layer.name}: {count(layer.dense)} before, {count(layer.now)} after." for layer in layers)
    )
    name = f"parameters-{panel + 1}"
    step = 0.175 if many else 0.42
    with drawing(0.95 + step * len(layers)) as (figure, (axes,)):
        axes.set_xlim(*limits)
        log_counts(axes, "x")
        label = 8 if many else 9
        for row, layer in enumerate(layers):
            dense, start, now = layer.dense or 1, layer.start, layer.now or 1
            first = "" if full else f"{count(start)} with all ranks, "
            hover = f"{layer.name}: {count(dense)} dense, {first}{count(now)} now"
            line = axes.plot([now, dense], [row, row], color=LIGHT["cut"], alpha=0.55, linewidth=1.4, zorder=1)[0]
            tip(line, hover)
            axes.plot(dense, row, "o", color=LIGHT["cut"], markersize=4.2 if many else 7, zorder=2)
            if start and layer.ranks and not full:
                axes.plot(start, row, "|", color=LIGHT["cut"], markersize=6 if many else 11, markeredgewidth=1.6)
            point = axes.plot(now, row, "o", color=LIGHT["kept"], markersize=4.2 if many else 7, zorder=3)[0]
            tip(point, hover)
            if layer.ranks:
                axes.text(1.01, row, ratio(dense / now), transform=axes.get_yaxis_transform(), fontsize=label,
                          va="center", color=LIGHT["kept"])  # fmt: skip
        axes.set_yticks(range(len(layers)), [short_name(layer.name) for layer in layers], fontsize=label)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("parameters (log scale)")
        handles = [
            axes.plot([], [], marker, color=LIGHT[colour], linestyle="", markersize=6, label=text)[0]
            for marker, colour, text in (("o", "cut", "dense"), ("|", "cut", "with all ranks"), ("o", "kept", "now"))
            if not (full and marker == "|")
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=3, columnspacing=1.0, handletextpad=0.1)
        svg = inline(figure, name, describe)
    caption = "From the ordinary layer (grey) to what is left (blue). The bar is the tensor train with all its ranks."
    if full:
        caption = "From the ordinary layer (grey) to the tensor train of all its ranks (blue)."
    return Plot(name, f"Parameters per layer{part}", caption, describe, svg)


def _panels(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    """Equally long parts of about `PANEL_ROWS` layers."""
    number = max(1, math.ceil((len(layers) - SPILL) / PANEL_ROWS))
    rows = math.ceil(len(layers) / number)
    return [layers[k : k + rows] for k in range(0, len(layers), rows)]


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
