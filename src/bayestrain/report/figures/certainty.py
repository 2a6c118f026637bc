"""How sure the network is: reliability of its probabilities, and accuracy on the images it is sure of."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from bayestrain.report.figures.marks import end_labels
from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Evaluation, MapRun, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent

BINS = 15


def reliability_bins(evaluation: Evaluation) -> tuple[list[tuple[float, float, int]], float]:
    """(mean confidence, accuracy, images) of each of 15 equal bins, and the expected calibration error over them."""
    confidence = evaluation.probabilities.max(1)
    right = evaluation.right
    places = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins, error = [], 0.0
    for place in range(BINS):
        inside = places == place
        number = int(inside.sum())
        mean = float(confidence[inside].mean()) if number else (place + 0.5) / BINS
        hit = float(right[inside].mean()) if number else 0.0
        bins.append((mean, hit, number))
        error += number * abs(mean - hit) / len(right)
    return bins, error


def reliability_plot(run: Run) -> list[Plot]:
    """Accuracy against confidence; on the diagonal the probabilities mean what they say."""
    if run.evaluation is None:
        return []
    if run.rival and run.rival.evaluation:
        return [_reliability_of_both(run, run.evaluation, run.rival)]
    bins, error = reliability_bins(run.evaluation)
    ece = error if run.scores.ece is None else run.scores.ece
    describe = f"Reliability diagram. Expected calibration error {percent(ece)}."
    width = 1 / BINS
    ratios = {"height_ratios": [3, 1]}
    with drawing(3.5, 2, sharex=True, gridspec_kw=ratios) as (figure, (axes, below)):
        for place, (mean, hit, number) in enumerate(bins):
            if not number:
                continue
            left = place * width
            hover = f"{count(number)} images, mean confidence {percent(mean, 1)}, accuracy {percent(hit, 1)}"
            faint = 0.35 if number < 10 else 1.0
            tip(axes.bar(left, hit, width * 0.9, align="edge", color=LIGHT["kept"], alpha=faint, linewidth=0)[0], hover)
            axes.plot([left, left + width * 0.9], [mean, mean], color=LIGHT["ink"], linewidth=2)
            tip(below.bar(left, number, width * 0.9, align="edge", color=LIGHT["cut"], linewidth=0)[0], hover)
        axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linewidth=1, linestyle=(0, (3, 2)))
        axes.set_title(f"ECE {percent(ece)}", fontsize=11, fontweight="bold", loc="left")
        _reliability_axes(axes, below, max(number for _, _, number in bins))
        svg = inline(figure, "reliability", describe)
    caption = (
        "Bars: accuracy of the test images in each bin of confidence (pale: fewer than 10 images). Lines on them: what "
        "the network promised. Dashed: perfect."
    )
    return [Plot("reliability", "Does 90 % sure mean 90 % right?", caption, describe, svg)]


def _reliability_of_both(run: Run, ours: Evaluation, other: MapRun) -> Plot:
    """The posterior and MAP in one diagram: lines instead of bars, and both histograms below."""
    sides = []
    for who, colour, evaluation, recorded, shift in (
        ("posterior", "kept", ours, run.scores.ece, 0.0),
        ("MAP", "map", other.evaluation or ours, other.scores.ece, 0.45),
    ):
        bins, error = reliability_bins(evaluation)
        sides.append((who, LIGHT[colour], bins, error if recorded is None else recorded, shift))
    eces = ", ".join(f"{who} {percent(ece)}" for who, _, _, ece, _ in sides)
    describe = f"Reliability diagram. Expected calibration error: {eces}."
    width = 1 / BINS
    with drawing(3.5, 2, sharex=True, gridspec_kw={"height_ratios": [3, 1]}) as (figure, (axes, below)):
        axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linewidth=1, linestyle=(0, (3, 2)))
        for who, colour, bins, _, shift in sides:
            filled = [(place, *content) for place, content in enumerate(bins) if content[2]]
            axes.plot([f[1] for f in filled], [f[2] for f in filled], color=colour, linewidth=1.1, alpha=0.5)
            for place, mean, hit, number in filled:
                hover = f"{who}: {count(number)} images, mean confidence {percent(mean, 1)}, accuracy {percent(hit, 1)}"
                faint = 0.35 if number < 10 else 1.0
                dot = axes.plot(mean, hit, "o" if shift == 0 else "D", markersize=6 if shift == 0 else 5, color=colour,
                                alpha=faint, markeredgewidth=0, clip_on=False)[0]  # fmt: skip
                tip(dot, hover)
                bar = below.bar((place + shift) * width, number, width * 0.45, align="edge", color=colour, linewidth=0)
                tip(bar[0], hover)
        handles = [
            Line2D([], [], color=colour, marker="D" if shift else "o", markersize=5, linewidth=1.1,
                   label=f"{who}: ECE {percent(ece)}") for who, colour, _, ece, shift in sides
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper left", ncols=2, columnspacing=1.2)
        _reliability_axes(axes, below, max(number for side in sides for _, _, number in side[2]))
        svg = inline(figure, "reliability", describe)
    caption = (
        "Accuracy of the test images in each bin of confidence (pale: fewer than 10 images). Dashed: perfect; below "
        "it the answers claim too much, above it too little."
    )
    return Plot("reliability", "Does 90 % sure mean 90 % right?", caption, describe, svg)


def _reliability_axes(axes: Axes, below: Axes, most: int) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    percents = FuncFormatter(lambda value, _: f"{100 * value:.0f}")
    axes.yaxis.set_major_formatter(percents)
    axes.xaxis.set_major_formatter(percents)
    axes.set_ylabel("accuracy / %")
    below.set_yscale("symlog", linthresh=1)
    below.set_yticks([1, 100, 10000], ["1", "100", "10k"])
    below.set_ylim(0, most * 3)
    below.set_ylabel("images")
    below.set_xlabel("confidence: probability of the class given / %")
    below.minorticks_off()


def rejection_curve(evaluation: Evaluation) -> NDArray[np.float64]:
    """Accuracy on the surest image, the two surest, .. by the entropy of the answer."""
    right = evaluation.right[np.argsort(evaluation.entropy, kind="stable")]
    return np.asarray(np.cumsum(right) / np.arange(1, len(right) + 1))


def at_share(accuracy: NDArray[np.float64], share: float) -> float:
    """Accuracy on the surest `share` of the images."""
    return float(accuracy[max(round(share * len(accuracy)), 1) - 1])


def rejection_plot(run: Run) -> list[Plot]:
    """Accuracy on the share of test images the network is surest of; beside a posterior that of MAP."""
    if run.evaluation is None:
        return []
    ours = rejection_curve(run.evaluation)
    other = run.rival.evaluation if run.rival else None
    theirs = None if other is None else rejection_curve(other)
    at_90, on_all = at_share(ours, 0.9), float(ours[-1])
    describe = f"Accuracy against the share of images answered: {percent(on_all)} on all, {percent(at_90)} on 90 %."
    if theirs is not None:
        describe += f" MAP: {percent(float(theirs[-1]))} and {percent(at_share(theirs, 0.9))}."
    lowest = 1.0
    with drawing(3.5) as (figure, (axes,)):
        for curve, colour in ((theirs, "map"), (ours, "kept")):
            if curve is None:
                continue
            shown = np.unique(np.linspace(len(curve) * 0.3, len(curve) - 1, 120).astype(int))
            axes.plot((shown + 1) / len(curve), curve[shown], color=LIGHT[colour])
            lowest = min(lowest, float(curve[shown].min()))
            for share in (0.9, 1.0):
                value = at_share(curve, share)
                dot = axes.plot(share, value, "o", color=LIGHT[colour], markersize=6, clip_on=False)[0]
                tip(dot, f"{percent(value)} right on the surest {percent(share, 0)}")
                if theirs is None:
                    axes.annotate(percent(value), (share, value), (-7, -4), textcoords="offset points", ha="right",
                                  va="top", fontsize=9)  # fmt: skip
        axes.set_xlim(0.3, 1.0)
        axes.set_ylim(lowest - 0.2 * (1 - lowest) - 0.001, min(1.0, 1 + 0.02 * (1 - lowest)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
        axes.set_xlabel("images answered, surest first / %")
        axes.set_ylabel("accuracy on them / %")
        if theirs is not None:
            ends = [(on_all, "\u2002posterior", LIGHT["kept"]), (float(theirs[-1]), "\u2002MAP", LIGHT["map"])]
            end_labels(axes, 1.0, ends)
        svg = inline(figure, "rejection", describe)
    who = "network" if theirs is None else "posterior, or MAP,"
    caption = f"Accuracy when the {who} may pass on the images it is least sure of (by the entropy of its answer)."
    if theirs is not None:
        caption += f" On the surest 90 %: {percent(at_90)} against MAP’s {percent(at_share(theirs, 0.9))}."
        caption = caption.replace(" %", "\u00a0%")
    return [Plot("rejection", "Knowing when to pass", caption, describe, svg)]
