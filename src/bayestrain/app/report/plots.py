"""Figures of a network: ranks, sizes, spectra, training curves. Matplotlib's own SVG, embedded as an image.

As an image a figure cannot leak matplotlib's ids and styles into the page, and has an alternative text.
"""

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bayestrain.app.report.read import Epoch, Layer, Run
from bayestrain.app.report.words import count, join, number, ratio, short_count, short_name

BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0072b2", "#d55e00", "#009e73", "#a4508b", "#8b929b", "#1b2530"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, "#b8860b", INK)
"""After Okabe and Ito: colours that colour-blind readers can tell apart. Lines differ in their dashes, too."""
DASHES = ("-", "--", "-.", (0, (1, 1)))
WIDTH = 4.0
"""Inches: narrow enough that a phone shows the text at nearly its natural size."""
FEW_BONDS, FEW_LAYERS, MANY_LAYERS = 30, 6, 24

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "bayestrain", "text.parse_math": False, "font.size": 9.5,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "axes.edgecolor": GREY, "grid.color": "#dfe3e8", "grid.linewidth": 0.6,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "lines.linewidth": 1.7,
    "legend.frameon": False, "legend.fontsize": 9, "legend.borderaxespad": 0.2, "savefig.transparent": True,
}  # fmt: skip


Line = Callable[[Epoch], float | None]
Panel = tuple[str, dict[str, Line], Callable[..., str] | None]


@dataclass(frozen=True)
class Plot:
    """One figure: `alt` tells those who do not see it what it shows."""

    title: str
    caption: str
    alt: str
    source: str
    width: int
    height: int


@contextmanager
def style() -> Iterator[None]:
    """Draw in the report's style. A glyph that matplotlib's font lacks is left to the reader's browser."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def new(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def finish(figure: Figure, title: str, caption: str, alt: str) -> Plot:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    width, height = (round(96 * size) for size in figure.get_size_inches())
    source = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return Plot(title, caption, alt, source, width, height)


def in_percent(value: float, _position: object = None) -> str:
    return f"{100 * value:.4g}"


def percents(*axes: Axis) -> None:
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(in_percent))


def log_axis(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value) if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def rows(axes: Axes, names: Sequence[str]) -> None:
    """One named row after the other, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def rank_plot(run: Run) -> list[Plot]:
    """Ranks now and at the start, where there are few enough bonds for a bar each; the table has those of all."""
    bonds = [(layer, bond) for layer in run.tensor_layers for bond in range(len(layer.ranks))]
    if not 0 < len(bonds) <= FEW_BONDS:
        return []
    figure, (axes,) = new(0.6 + 0.22 * len(bonds))
    widest = max(layer.start_ranks[bond] for layer, bond in bonds)
    for row, (layer, bond) in enumerate(bonds):
        start, now = layer.start_ranks[bond], layer.ranks[bond]
        axes.barh(row, start, 0.68, color=GREY, alpha=0.3)
        axes.barh(row, now, 0.68, color=BLUE)
        axes.text(start + 0.015 * widest, row, f"{now} of {start}", va="center", fontsize=8.5)
    rows(axes, [f"{'' if bond else short_name(layer.name)}  bond {bond + 1}" for layer, bond in bonds])
    axes.set_xlim(0, widest * 1.25)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("rank")
    alt = join((f"{x.name}: {join(x.ranks)} of {join(x.start_ranks)}." for x in run.tensor_layers), " ")
    caption = "Blue: the rank each bond has now. Grey: the rank it started with."
    return [finish(figure, "Ranks", caption, f"Ranks per bond. {alt}")]


def rank_paths(run: Run) -> list[Plot]:
    """Ranks over the epochs: lines per layer, or a map where the layers are many."""
    layers = [layer for layer in run.tensor_layers if sum(layer.name in record.ranks for record in run.history) > 1]
    if len(layers) > FEW_LAYERS:
        return [_rank_map(run, layers)]

    def of(layer: Layer, bond: int) -> Line:
        return lambda record: record.ranks[layer.name][bond] if layer.name in record.ranks else None

    return [
        plot
        for layer in layers
        for lines in [{f"bond {k + 1}: {rank} now": of(layer, k) for k, rank in enumerate(layer.ranks)}]
        for plot in _curves(run, f"Ranks of {layer.name}", "", [("rank", lines, short_count)])
    ]


def _rank_map(run: Run, layers: list[Layer]) -> Plot:
    records = [record for record in run.history if all(layer.name in record.ranks for layer in layers)]
    shares = [[sum(record.ranks[x.name]) / sum(x.start_ranks) for record in records] for x in layers]
    figure, (axes,) = new(1.3 + min(0.17 * len(layers), 6.5))
    first, last = records[0].number - 0.5, records[-1].number + 0.5
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest",
                        extent=(first, last, len(layers) - 0.5, -0.5))  # fmt: skip
    step = -(-len(layers) // 40)
    axes.set_yticks(range(0, len(layers), step), [short_name(layer.name) for layer in layers[::step]], fontsize=8)
    axes.grid(False)
    _epochs([axes], run)
    bar = figure.colorbar(image, ax=axes, location="top", fraction=0.04, aspect=40, format=FuncFormatter(in_percent))
    bar.set_label("% of the ranks at the start", fontsize=8.5)
    caption = "Sum of each layer’s ranks as a share of the start: dark is full rank, light is pruned."
    return finish(figure, "Ranks over the epochs", caption, f"Map of the ranks of {len(layers)} layers. {caption}")


def size_plot(run: Run) -> list[Plot]:
    """Parameters of every layer: dense, at the start, now; the smallest of many in one row."""
    known = sorted((x for x in run.layers if x.ratio), key=lambda layer: -layer.sizes["dense"])
    shown, rest = known[:MANY_LAYERS], known[MANY_LAYERS:]
    if not known:
        return []
    if rest:
        sums = {key: sum(layer.sizes.get(key, 0.0) for layer in rest) for key in ("dense", "start", "now")}
        shown.append(Layer(f"{len(rest)} smaller layers", sizes=sums))
    figure, (axes,) = new(0.9 + 0.28 * len(shown))
    for row, layer in enumerate(shown):
        dense, now = layer.sizes["dense"], layer.sizes["now"]
        axes.plot([now, dense], [row, row], color=GREY, linewidth=1.2, zorder=1)
        axes.plot(dense, row, "o", color=GREY, markersize=6, label="" if row else "dense")
        axes.plot(layer.sizes.get("start", dense), row, "|", color=INK, markersize=10, label="" if row else "start")
        axes.plot(now, row, "D", color=BLUE, markersize=5.5, label="" if row else "now")
        axes.text(1.02, row, ratio(layer.ratio), transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    log_axis(axes.xaxis)
    rows(axes, [short_name(layer.name) for layer in shown])
    axes.set_xlabel("parameters (log scale)")
    figure.legend(loc="outside upper left", ncols=3, columnspacing=1.0, handletextpad=0.2)
    alt = join((f"{x.name}: {count(x.sizes['now'])} of {count(x.sizes['dense'])}." for x in shown), " ")
    caption = "On the right, how many times smaller each layer is than its dense form."
    return [finish(figure, "Parameters per layer", caption, f"Parameters per layer. {alt}")]


def spectrum_plots(run: Run) -> list[Plot]:
    """What every bond held before the final cut, and how much of it was kept; only the largest layers of many."""
    sizes = {layer.name: layer.sizes.get("dense", 0) for layer in run.layers}
    largest, plots = sorted(run.spectra, key=lambda name: -sizes.get(name, 0))[:FEW_LAYERS], []
    for name in (name for name in run.spectra if name in largest):
        spectrum, texts = run.spectra[name], list[str]()
        columns = min(2, len(spectrum))
        figure, all_axes = new(0.3 + 1.4 * -(-len(spectrum) // columns), -(-len(spectrum) // columns), columns)
        for axes in all_axes[len(spectrum) :]:
            axes.set_visible(False)
        for axes, (values, kept) in zip(all_axes, spectrum, strict=False):
            relative, places = np.maximum(values / max(values.max(), 1e-30), 1e-8), np.arange(1, len(values) + 1)
            axes.plot(places[:kept], relative[:kept], "o", color=BLUE, markersize=4)
            axes.plot(places[kept:], relative[kept:], "x", color=ORANGE, markersize=4)
            log_axis(axes.yaxis)
            axes.set_ylim(min(float(relative.min()) / 2, 0.05), 2)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            texts.append(f"bond {len(texts) + 1}: {kept} of {len(values)} kept")
            axes.set_title(texts[-1])
        caption = "Value of each rank index, relative to the bond’s largest. Blue dots were kept, orange crosses cut."
        plots.append(finish(figure, f"Spectra of {name}", caption, f"Spectra of layer {name}. {join(texts, '; ')}."))
    return plots


def training_plots(run: Run) -> list[Plot]:
    """Likelihood and prior apart, the headline score and the size, over the epochs."""

    def of(key: str, sign: int = 1) -> Line:
        return lambda record: sign * record.numbers[key] if key in record.numbers else None

    def held_out(key: str) -> Line:
        return lambda record: record.validation.get(key)

    likelihood = {"training": of("train_loss", -1), "validation": held_out("log_likelihood")}
    accuracy = {"training": of("train_accuracy"), "validation": held_out("accuracy")}
    caption = "Above, the mean log likelihood per example: higher is better. Below, the prior’s term of the loss."
    return [
        *_curves(run, "Likelihood and prior", caption, [("log likelihood", likelihood, None),
                                                        ("prior term", {"prior": of("prior_loss")}, None)]),
        *_curves(run, "Accuracy", "", [("accuracy / %", accuracy, in_percent)]),
        *_curves(run, "RMSE", "", [("RMSE", {"validation": held_out("rmse")}, None)]),
        *_curves(run, "Size", "", [("parameters", {"parameters": of("parameters")}, short_count)]),
    ]  # fmt: skip


def diagnostic_plots(run: Run) -> list[Plot]:
    """Whatever the inference method reports of its particles, over the epochs."""

    def of(name: str) -> Line:
        return lambda record: record.diagnostics.get(name)

    names = dict.fromkeys(name for record in run.history for name in record.diagnostics)
    panels: list[Panel] = [(name.replace("_", " "), {name: of(name)}, None) for name in list(names)[:4]]
    return _curves(run, "Particles while training", "", panels)


def _curves(run: Run, title: str, caption: str, panels: list[Panel]) -> list[Plot]:
    """Values over the epochs: a panel for each that has a line of at least two points."""
    found, texts = [], []
    for label, lines, ticks in panels:
        points = {name: [(r.number, y) for r in run.history if (y := of(r)) is not None] for name, of in lines.items()}
        if points := {name: path for name, path in points.items() if len(path) > 1}:
            found.append((label, points, ticks))
    if not found:
        return []
    figure, all_axes = new(1.1 + 1.5 * len(found), len(found), sharex=True)
    for axes, (label, points, ticks) in zip(all_axes, found, strict=True):
        for place, (name, path) in enumerate(points.items()):
            axes.plot(*zip(*path, strict=True), linestyle=DASHES[place % 4], color=SERIES[place % 6], label=name)
            texts.append(f"{label}, {name}: from {number(path[0][1])} to {number(path[-1][1])}")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=ticks is short_count))
        axes.set_ylabel(label)
        if ticks:
            axes.yaxis.set_major_formatter(FuncFormatter(ticks))
        if ticks is short_count:
            axes.set_ylim(bottom=0)
    _epochs(all_axes, run)
    if 1 < max(len(points) for _, points, _ in found) <= 12 or title.startswith("Ranks"):
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, handlelength=1.8)
    return [finish(figure, title, caption, f"{title} over the epochs. {join(texts, '; ')}.")]


def _epochs(all_axes: list[Axes], run: Run) -> None:
    """Name the common axis of epochs, and mark where fine-tuning begins."""
    all_axes[-1].set_xlabel("epoch" if run.finetune_start is None else "epoch (dotted: fine-tuning begins)")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in all_axes if run.finetune_start is not None else ():
        axes.axvline((run.finetune_start or 0) - 0.5, color=INK, linewidth=0.9, linestyle=":")
