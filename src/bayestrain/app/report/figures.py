"""The figures of a run: matplotlib's SVG as an image, which leaks no ids or styles and has an alternative text."""

import base64
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from bayestrain.app.report.facts import covered, percent
from bayestrain.app.report.read import Array, Arrays, Run

BLUE, ORANGE, GREY, INK = "#0072b2", "#d55e00", "#8b929b", "#1b2530"
CURVES = {
    "Size": ("parameters", "parameters", 1, ""),
    "Log likelihood": ("log likelihood per example", "train_loss", -1, "log_likelihood"),
    "Prior": ("the prior’s term of the loss", "prior_loss", 1, ""),
    "Accuracy": ("accuracy (%)", "train_accuracy", 1, "accuracy"),
    "RMSE": ("RMSE", "", 1, "rmse"),
}
"""Of every figure over the epochs: its label, the key and sign of what it shows of training, and a validation score."""

STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "bayestrain", "text.parse_math": False, "font.size": 9.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.formatter.limits": (-4, 9),
    "axes.grid": True, "axes.axisbelow": True, "axes.edgecolor": GREY, "grid.color": "#dfe3e8", "grid.linewidth": 0.6,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "lines.linewidth": 1.7,
    "legend.frameon": False, "legend.fontsize": 9, "legend.borderaxespad": 0.2, "savefig.transparent": True,
}  # fmt: skip


Plot = dict[str, str]  # title, caption, and the figure as a data address: the source of an image


@contextmanager
def drawn(plots: list[Plot], title: str, caption: str, x: str = "", y: str = "", height: float = 3.2) -> Iterator[Axes]:
    """Axes to draw on; then the figure joins `plots`. An axis whose label ends in (%) shows parts as percentages."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's browser has it
        figure = Figure(figsize=(4, height), layout="constrained")  # a phone shows text at nearly its natural size
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for axis, label in ((axes.xaxis, x), (axes.yaxis, y)):
            if label.endswith("(%)"):
                axis.set_major_formatter(PercentFormatter(1, symbol=""))
        yield axes
        if len(axes.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside upper left", ncols=2, columnspacing=1.0, handlelength=1.6)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
    plots.append({"title": title, "caption": caption, "source": source})


def rank_plots(run: Run) -> list[Plot]:
    names, lines, plots = list(run.result["ranks"]), [line for line in run.history if line["ranks"]], list[Plot]()
    if names and len(lines) > 1:
        share = [[sum(line["ranks"][name]) / sum(run.result["start_ranks"][name]) for line in lines] for name in names]
        height, step = 1.3 + min(0.22 * len(names), 6.5), -(-len(names) // 40)
        with drawn(plots, "Ranks over the epochs", "Dark is full rank; lighter is pruned.", height=height) as axes:
            edges = (lines[0]["epoch"] - 0.5, lines[-1]["epoch"] + 0.5, len(names) - 0.5, -0.5)
            image = axes.imshow(share, "Blues", aspect="auto", vmin=0, vmax=1, interpolation="nearest", extent=edges)
            ends = [name if len(name) <= 22 else f"…{name[-21:]}" for name in names[::step]]
            axes.set_yticks(range(0, len(names), step), ends, fontsize=8)
            axes.grid(False)
            _epochs(axes, run)
            percents, about = PercentFormatter(1), "share of the starting rank"
            axes.figure.colorbar(image, location="top", fraction=0.04, aspect=40, format=percents, label=about)
    return [*plots, *curves(run, "Size")]


def curves(run: Run, *titles: str) -> list[Plot]:
    """Values over the epochs: the lines that have at least two points."""
    plots = list[Plot]()
    for title in titles:
        label, key, sign, held = CURVES[title]
        training = [(line["epoch"], sign * line[key]) for line in run.history if key in line]
        scored = [line for line in run.history if held in line["validation"] and line["epoch"]]  # not the untrained one
        validation = [(line["epoch"], line["validation"][held]) for line in scored]
        both = ((training, "-", BLUE, "training"), (validation, "--", ORANGE, "validation"))
        if lines := [line for line in both if len(line[0]) > 1]:
            with drawn(plots, title, "", y=label) as axes:
                for points, look, colour, name in lines:
                    axes.plot(*zip(*points, strict=True), look, color=colour, label=name)
                _epochs(axes, run)
    return plots


def _epochs(axes: Axes, run: Run) -> None:
    """Name the axis of epochs, and mark where fine-tuning begins."""
    start = next((line["epoch"] for line in run.history if line["phase"] == "finetune"), None)
    axes.set_xlabel("epoch" if start is None else "epoch (dotted: fine-tuning begins)")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if start is not None:
        axes.axvline(start - 0.5, color=INK, linewidth=0.9, linestyle=":")


def certainty_plots(run: Run) -> list[Plot]:
    found, plots = run.predictions, list[Plot]()
    if not found:
        return plots
    if "labels" in found:
        sure, right = found["confidence"], found["right"]
        bins = [places for places in np.array_split(np.argsort(sure), 15) if len(places)]
        promised, kept = (np.array([values[places].mean() for places in bins]) for values in (sure, right))
        promise, labels = "answers given with 90% confidence are right", ("confidence (%)", "accuracy (%)")
    else:
        promised = np.linspace(0.05, 0.99, 40)
        kept = np.array([covered(found, share) for share in promised])
        promise, labels = "90% intervals hold the true value", ("interval (%)", "true values inside (%)")
    caption = f"On the dotted line, {promise} 90% of the time; below it, the predictions are overconfident."
    with drawn(plots, "Calibration", caption, *labels) as axes:
        axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
        axes.plot(promised, kept, "o-", color=BLUE, linewidth=1, markersize=3.5)
    (_rejection if "labels" in found else _fit)(plots, found)
    return plots


def _rejection(plots: list[Plot], found: Arrays) -> None:
    hit = found["right"][np.argsort(found["total"], kind="stable")]
    answered = np.arange(1, len(hit) + 1)
    accuracy = np.cumsum(hit) / answered
    at_90, overall = percent(accuracy[round(0.9 * (len(hit) - 1))]), percent(accuracy[-1])
    caption = f"It is right on {at_90} of the 90% of inputs it is most certain of, and on {overall} of all."
    labels = ("inputs answered, most certain first (%)", "accuracy on them (%)")
    with drawn(plots, "Accuracy if it may abstain", caption, *labels) as axes:
        shown = _spread(answered[len(hit) // 10 :] - 1, 150)
        axes.plot(answered[shown] / len(hit), accuracy[shown], color=BLUE)


def _fit(plots: list[Plot], found: Arrays) -> None:
    caption = "With 90% intervals; on the dotted line the prediction is exact."
    for column in range(min(found["mean"].shape[1], 3)):
        target, mean, std = (found[name][:, column] for name in ("targets", "mean", "std"))
        x, ends = _spread(np.argsort(target, kind="stable"), 200), [target.min(), target.max()]
        name = f"true value of output {column + 1}"
        with drawn(plots, "Predicted and true values", caption, name, "predicted") as axes:
            axes.errorbar(target[x], mean[x], 1.645 * std[x], fmt=".", color=BLUE, ecolor=GREY, elinewidth=0.8)
            axes.plot(ends, ends, ":", color=INK, linewidth=1, zorder=3)


def _spread(places: Array, most: int) -> Array:
    return places if len(places) <= most else places[np.linspace(0, len(places) - 1, most).astype(int)]
