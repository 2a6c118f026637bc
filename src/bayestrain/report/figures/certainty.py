"""How sure the network is: reliability of its probabilities, and accuracy on the images it is sure of."""

import numpy as np
from matplotlib.ticker import FuncFormatter

from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Evaluation, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent

BINS = 15


def reliability_bins(evaluation: Evaluation) -> tuple[list[tuple[float, float, int]], float]:
    """(mean confidence, accuracy, images) of each of 15 equal bins, and the expected calibration error over them."""
    confidence = evaluation.probabilities.max(1)
    right = evaluation.probabilities.argmax(1) == evaluation.labels
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
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        percents = FuncFormatter(lambda value, _: f"{100 * value:.0f}")
        axes.yaxis.set_major_formatter(percents)
        axes.xaxis.set_major_formatter(percents)
        axes.set_ylabel("accuracy / %")
        below.set_yscale("symlog", linthresh=1)
        below.set_yticks([1, 100, 10000], ["1", "100", "10k"])
        below.set_ylim(0, max(number for _, _, number in bins) * 3)
        below.set_ylabel("images")
        below.set_xlabel("confidence: probability of the class given / %")
        below.minorticks_off()
        svg = inline(figure, "reliability", describe)
    caption = (
        "Bars: accuracy of the test images in each bin of confidence (pale: fewer than 10 images). Lines on them: what "
        "the network promised. Dashed: perfect."
    )
    return [Plot("reliability", "Does 90 % sure mean 90 % right?", caption, describe, svg)]


def rejection_plot(run: Run) -> list[Plot]:
    """Accuracy on the share of test images the network is surest of."""
    if run.evaluation is None:
        return []
    p = run.evaluation.probabilities
    entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(1)
    right = (p.argmax(1) == run.evaluation.labels)[np.argsort(entropy, kind="stable")]
    answered = np.arange(1, len(right) + 1) / len(right)
    accuracy = np.cumsum(right) / np.arange(1, len(right) + 1)
    shown = np.unique(np.linspace(len(right) * 0.3, len(right) - 1, 120).astype(int))
    at_90 = float(accuracy[int(0.9 * len(right)) - 1])
    describe = (
        f"Accuracy against the share of images answered: {percent(accuracy[-1])} on all, {percent(at_90)} on 90 %."
    )
    with drawing(3.5) as (figure, (axes,)):
        axes.plot(answered[shown], accuracy[shown], color=LIGHT["kept"])
        for share, value in ((0.9, at_90), (1.0, float(accuracy[-1]))):
            axes.plot(share, value, "o", color=LIGHT["kept"], markersize=6, clip_on=False)
            axes.annotate(percent(value), (share, value), (-7, -4), textcoords="offset points", ha="right", va="top",
                          fontsize=9)  # fmt: skip
        axes.set_xlim(0.3, 1.0)
        low = float(accuracy[shown].min())
        axes.set_ylim(low - 0.2 * (1 - low) - 0.001, min(1.0, 1 + 0.02 * (1 - low)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
        axes.set_xlabel("images answered, surest first / %")
        axes.set_ylabel("accuracy on them / %")
        svg = inline(figure, "rejection", describe)
    caption = "Accuracy when the network may pass on the images it is least sure of (by the entropy of its answer)."
    return [Plot("rejection", "Knowing when to pass", caption, describe, svg)]
