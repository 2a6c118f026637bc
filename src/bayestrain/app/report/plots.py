"""Figures of a network: ranks, sizes, spectra, training curves. Matplotlib's own SVG, embedded as an image.

As an image a figure cannot leak matplotlib's ids and styles into the page, and has an alternative text.
"""

import base64
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bayestrain.app.report.read import Run
from bayestrain.app.report.words import short_count, short_name

BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0072b2", "#d55e00", "#009e73", "#a4508b", "#8b929b", "#1b2530"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, "#b8860b", INK)
"""After Okabe and Ito: colours that colour-blind readers can tell apart."""
WIDTH = 4.0
"""Inches: narrow enough that a phone shows the text at nearly its natural size."""
FEW_BONDS, FEW_LAYERS = 30, 6

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "bayestrain", "text.parse_math": False, "font.size": 9.5,
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "axes.edgecolor": GREY, "grid.color": "#dfe3e8", "grid.linewidth": 0.6,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "lines.linewidth": 1.7,
    "legend.frameon": False, "legend.fontsize": 9, "legend.borderaxespad": 0.2, "savefig.transparent": True,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One figure as a data address."""

    title: str
    caption: str
    source: str


@contextmanager
def style() -> Iterator[None]:
    """Draw in the report's style. A glyph that matplotlib's font lacks is left to the reader's browser."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def new(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def finish(figure: Figure, title: str, caption: str) -> Plot:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return Plot(title, caption, source)


def percents(*axes: Axis) -> None:
    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))


def log_axis(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(numticks=5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value) if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def rank_plot(run: Run) -> list[Plot]:
    """Ranks over the epochs as a map: a row for each bond, or for each layer where there are many."""
    layers, lines = run.tensor_layers, [line for line in run.history if line["ranks"]]
    few = sum(len(layer.ranks) for layer in layers) <= FEW_BONDS
    kept = (
        [(x, slice(k, k + 1)) for x in layers for k in range(len(x.ranks))]
        if few
        else [(x, slice(None)) for x in layers]
    )
    if not kept or len(lines) < 2:
        return []
    share = [[sum(line["ranks"][x.name][part]) / sum(x.start_ranks[part]) for line in lines] for x, part in kept]
    names = [f"{short_name(x.name)}{f'  bond {part.start + 1}' if few else ''}" for x, part in kept]
    figure, (axes,) = new(1.3 + min(0.22 * len(names), 6.5))
    edges = (lines[0]["epoch"] - 0.5, lines[-1]["epoch"] + 0.5, len(names) - 0.5, -0.5)
    image = axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest", extent=edges)
    step = -(-len(names) // 40)
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
    axes.grid(False)
    for row, (layer, part) in enumerate(kept if few else []):
        text = f"{layer.ranks[part][0]} of {layer.start_ranks[part][0]}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    _epochs([axes], run)
    bar = figure.colorbar(image, ax=axes, location="top", fraction=0.04, aspect=40)
    bar.set_label("share of the starting rank (%)", fontsize=8.5)
    percents(bar.ax.xaxis)
    caption = "Dark is full rank; lighter is pruned." + " On the right, the ranks left." * few
    return [finish(figure, "Ranks over the epochs", caption)]


def spectrum_plots(run: Run) -> list[Plot]:
    """What every bond held before the final cut, and how much of it was kept; only the largest layers of many."""
    known = sorted((x for x in run.layers if x.spectrum), key=lambda layer: -layer.sizes.get("dense", 0))
    plots = []
    for layer in known[:FEW_LAYERS]:
        figure, (axes,) = new(2.6)
        for bond, (values, kept) in enumerate(layer.spectrum):
            relative, places = np.maximum(values / max(values.max(), 1e-30), 1e-8), np.arange(1, len(values) + 1)
            style: Any = {"color": SERIES[bond % 6], "markersize": 4, "linewidth": 0.8}
            axes.plot(
                places[:kept], relative[:kept], "o-", **style, label=f"bond {bond + 1}: {kept} of {len(values)} kept"
            )
            axes.plot(places[kept:], relative[kept:], "x", **style)
        log_axis(axes.yaxis)
        axes.set_ylim(min(axes.get_ylim()[0], 0.05), 2)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("rank index")
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1.0, handlelength=1.2)
        caption = "Size of each rank index relative to the bond’s largest. Dots were kept, crosses were cut."
        plots.append(finish(figure, f"Spectra of {layer.name}", caption))
    return plots


def training_plots(run: Run) -> list[Plot]:
    """Likelihood and prior apart, the headline score and the size, over the epochs."""

    def of(key: str, part: str = "", sign: int = 1) -> list[tuple[int, float]]:
        found = [(line["epoch"], (line[part] if part else line).get(key)) for line in run.history]
        return [(epoch, sign * value) for epoch, value in found if value is not None]

    likelihood = {"training": of("train_loss", sign=-1), "validation": of("log_likelihood", "validation")}
    accuracy = {"training": of("train_accuracy"), "validation": of("accuracy", "validation")}
    caption = "Above, the mean log likelihood per example: higher is better. Below, the prior’s term of the loss."
    return [
        *_curves(run, "Likelihood and prior", caption,
                 {"log likelihood": likelihood, "prior term": {"prior": of("prior_loss")}}),
        *_curves(run, "Accuracy", "", {"accuracy (%)": accuracy}, lambda value, _: f"{100 * value:.4g}"),
        *_curves(run, "RMSE", "", {"RMSE": {"validation": of("rmse", "validation")}}),
        *_curves(run, "Size", "", {"parameters": {"parameters": of("parameters")}}, short_count),
    ]  # fmt: skip


def _curves(
    run: Run, title: str, caption: str, panels: dict[str, dict[str, list[tuple[int, float]]]],
    ticks: Callable[..., str] | None = None,
) -> list[Plot]:  # fmt: skip
    """Values over the epochs: a panel for each group of lines that have at least two points."""
    long = {label: {name: path for name, path in lines.items() if len(path) > 1} for label, lines in panels.items()}
    found = {label: lines for label, lines in long.items() if lines}
    if not found:
        return []
    figure, all_axes = new(1.1 + 1.5 * len(found), len(found), sharex=True)
    for axes, (label, lines) in zip(all_axes, found.items(), strict=True):
        for place, (name, path) in enumerate(lines.items()):
            axes.plot(*zip(*path, strict=True), linestyle="--" if place else "-", color=SERIES[place], label=name)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylabel(label)
        if ticks:
            axes.yaxis.set_major_formatter(FuncFormatter(ticks))
    _epochs(all_axes, run)
    if max(map(len, found.values())) > 1:
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, handlelength=1.8)
    return [finish(figure, title, caption)]


def _epochs(all_axes: list[Axes], run: Run) -> None:
    """Name the common axis of epochs, and mark where fine-tuning begins."""
    start = next((line["epoch"] for line in run.history if line["phase"] == "finetune"), None)
    all_axes[-1].set_xlabel("epoch" if start is None else "epoch (dotted: fine-tuning begins)")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in all_axes if start else ():
        axes.axvline(float(start or 0) - 0.5, color=INK, linewidth=0.9, linestyle=":")
