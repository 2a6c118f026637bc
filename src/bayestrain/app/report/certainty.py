"""Figures of certainty: whether probabilities and intervals mean what they say, and where uncertainty comes from."""

import base64
import io
from statistics import NormalDist

import numpy as np
from PIL import Image

from bayestrain.app.report.plots import BLUE, GREY, INK, ORANGE, Plot, finish, new, percents
from bayestrain.app.report.read import Array, Classes, Run, Values
from bayestrain.app.report.words import percent

BINS = 15
SHOWN = 14
"""How many of the hardest inputs a page shows."""


def certainty_plots(run: Run) -> list[Plot]:
    found = run.predictions
    if isinstance(found, Classes):
        return [_reliability(found), _rejection(found), *_sources(found)]
    return [] if found is None else [_fit(found), _coverage(found), *_sources(found)]


def reliability(found: Classes) -> tuple[list[tuple[float, float, int]], float]:
    """(mean confidence, accuracy, inputs) of every bin that is not empty, and the expected calibration error."""
    confidence, right = found.confidence, found.right
    places = np.minimum((confidence * BINS).astype(int), BINS - 1)
    inside = [places == place for place in range(BINS)]
    bins = [(float(confidence[i].mean()), float(right[i].mean()), int(i.sum())) for i in inside if i.any()]
    return bins, sum(n * abs(promised - kept) for promised, kept, n in bins) / len(right)


def covered(found: Values, share: float) -> float:
    """Part of the targets inside the central interval that should hold this share of them."""
    return float((np.abs(found.z) <= NormalDist().inv_cdf((1 + share) / 2)).mean())


def _reliability(found: Classes) -> Plot:
    bins, _ = reliability(found)
    figure, (axes, below) = new(3.5, 2, height_ratios=[3, 1], sharex=True)
    promised, kept, numbers = zip(*bins, strict=True)
    axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
    axes.plot(promised, kept, "-", color=BLUE, linewidth=1)
    axes.scatter(promised, kept, [12 if n < 10 else 36 for n in numbers], BLUE)
    axes.set_ylabel("accuracy (%)")
    below.hist(found.confidence, BINS, range=(0, 1), color=GREY)
    below.set_ylabel("inputs")
    below.set_xlabel("confidence (%)")
    percents(axes.xaxis, axes.yaxis)
    caption = "On the dotted line, answers given with 90% confidence are right 90% of the time. Points below it are "
    caption += "overconfident. Small points stand for fewer than 10 inputs."
    return finish(figure, "Reliability", caption)


def _rejection(found: Classes) -> Plot:
    right = found.right[np.argsort(found.total, kind="stable")]
    accuracy = np.cumsum(right) / np.arange(1, len(right) + 1)
    shown = np.unique(np.linspace(max(len(right) // 10, 1) - 1, len(right) - 1, 150).astype(int))
    at_90 = float(accuracy[max(round(0.9 * len(right)), 1) - 1])
    figure, (axes,) = new(3.5)
    axes.plot((shown + 1) / len(right), accuracy[shown], color=BLUE)
    percents(axes.xaxis, axes.yaxis)
    axes.set_xlabel("inputs answered, most certain first (%)")
    axes.set_ylabel("accuracy on them (%)")
    caption = f"It is right on {percent(at_90)} of the 90% of inputs it is most certain of, and on "
    caption += f"{percent(float(accuracy[-1]))} of all."
    return finish(figure, "Accuracy if it may abstain", caption)


def _sources(found: Classes | Values) -> list[Plot]:
    """Aleatoric against epistemic uncertainty; a single network has no epistemic part."""
    if not found.epistemic.any():
        return []
    parts = (found.aleatoric.ravel(), found.epistemic.ravel())
    share = float(parts[1].sum() / (parts[0].sum() + parts[1].sum()))
    good, names, unit = (found.right, ("right", "wrong"), "nats") if isinstance(found, Classes) else (
        np.abs(found.z).ravel() < 1.645, ("in the 90% interval", "outside"), "variance")  # fmt: skip
    figure, (axes,) = new(3.5)
    for inside, name, colour, marker in ((good, names[0], GREY, "o"), (~good, names[1], ORANGE, "x")):
        places = _spread(np.flatnonzero(inside), 600)
        axes.plot(parts[0][places], parts[1][places], marker, color=colour, markersize=3.5, label=name)
    axes.set_xlabel(f"aleatoric ({unit})")
    axes.set_ylabel(f"epistemic ({unit})")
    figure.legend(loc="outside upper left", ncols=2, handletextpad=0.2)
    caption = (
        f"Aleatoric uncertainty is noise in the data. Epistemic uncertainty, {percent(share, 1)} of the total, is "
    )
    caption += "where the particles disagree; more data would reduce it."
    return [finish(figure, "Where uncertainty comes from", caption)]


def _fit(found: Values) -> Plot:
    outputs = min(found.mean.shape[1], 3)
    figure, all_axes = new(0.4 + 3.3 * outputs, outputs)
    for column, axes in enumerate(all_axes):
        target, mean, std = (values[:, column] for values in (found.targets, found.mean, found.std))
        places, ends = _spread(np.argsort(target, kind="stable"), 200), [float(target.min()), float(target.max())]
        axes.errorbar(target[places], mean[places], 1.645 * std[places], fmt="o", color=BLUE, ecolor=GREY, markersize=3,
                      elinewidth=0.8)  # fmt: skip
        axes.plot(ends, ends, ":", color=INK, linewidth=1, zorder=3)
        axes.set_xlabel("true value" if outputs == 1 else f"true value of output {column + 1}")
        axes.set_ylabel("predicted")
    caption = "With 90% intervals; on the dotted line the prediction is exact."
    if len(found.mean) > 200:
        caption += f" 200 of the {len(found.mean):,} inputs are shown, spread evenly over the true values."
    return finish(figure, "Predicted and true values", caption)


def _coverage(found: Values) -> Plot:
    shares = np.linspace(0.05, 0.99, 40)
    figure, (axes,) = new(3.7)
    axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
    axes.plot(shares, [covered(found, float(share)) for share in shares], color=BLUE)
    percents(axes.xaxis, axes.yaxis)
    axes.set_xlabel("width of the interval (%)")
    axes.set_ylabel("true values inside (%)")
    caption = f"The 90% intervals hold {percent(covered(found, 0.9), 1)} of the true values. Below the dotted line, "
    caption += "intervals are too narrow."
    return finish(figure, "Calibration of the intervals", caption)


def _spread(places: Array, most: int) -> Array:
    """At most so many of the places, evenly spread."""
    return places if len(places) <= most else places[np.linspace(0, len(places) - 1, most).astype(int)]


def picture(pixels: Array) -> str:
    """An image (channels, height, width) of any value range as a PNG in a data address."""
    if pixels.dtype != np.uint8:
        low, high = float(pixels.min()), float(pixels.max())
        pixels = np.nan_to_num(255 * (pixels - low) / max(high - low, 1e-30)).astype(np.uint8)
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
