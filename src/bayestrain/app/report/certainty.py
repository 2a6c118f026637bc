"""Figures of certainty: whether probabilities and intervals mean what they say, and where uncertainty comes from."""

import base64
import io
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np
from PIL import Image

from bayestrain.app.report.plots import BLUE, GREY, INK, ORANGE, Plot, finish, new, percents
from bayestrain.app.report.read import Array, Run
from bayestrain.app.report.words import percent

BINS = 15
SHOWN = 14
"""How many of the hardest inputs a page shows."""


Arrays = Mapping[str, Array]


def certainty_plots(run: Run) -> list[Plot]:
    found = run.predictions
    if "labels" in found:
        return [_reliability(found), _rejection(found), *_sources(found)]
    return [_fit(found), _coverage(found), *_sources(found)] if found else []


def confidence(found: Arrays) -> Array:
    """The probability of the likeliest class."""
    return np.asarray(found["probabilities"].max(1))


def right(found: Arrays) -> Array:
    """Whether the likeliest class is the true one."""
    return np.asarray(found["probabilities"].argmax(1) == found["labels"])


def errors(found: Arrays) -> Array:
    """Errors of values in units of the predicted standard deviation."""
    return np.asarray((found["targets"] - found["mean"]) / np.maximum(found["std"], 1e-30))


def covered(found: Arrays, share: float) -> float:
    """Part of the targets inside the central interval that should hold this share of them."""
    return float((np.abs(errors(found)) <= NormalDist().inv_cdf((1 + share) / 2)).mean())


def _reliability(found: Arrays) -> Plot:
    sure, hit = confidence(found), right(found)
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    inside = [places == place for place in range(BINS) if (places == place).any()]
    figure, (axes,) = new(3.5)
    axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
    axes.plot([sure[i].mean() for i in inside], [hit[i].mean() for i in inside], "-", color=BLUE, linewidth=1)
    for i in inside:
        axes.plot(sure[i].mean(), hit[i].mean(), "o", color=BLUE, markersize=3 if i.sum() < 10 else 6)
    axes.set_xlabel("confidence (%)")
    axes.set_ylabel("accuracy (%)")
    percents(axes.xaxis, axes.yaxis)
    caption = "On the dotted line, answers given with 90% confidence are right 90% of the time. Points below it are "
    return finish(figure, "Reliability", caption + "overconfident. Small points stand for fewer than 10 inputs.")


def _rejection(found: Arrays) -> Plot:
    hit = right(found)[np.argsort(found["total"], kind="stable")]
    accuracy = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    shown = np.unique(np.linspace(max(len(hit) // 10, 1) - 1, len(hit) - 1, 150).astype(int))
    at_90 = float(accuracy[max(round(0.9 * len(hit)), 1) - 1])
    figure, (axes,) = new(3.5)
    axes.plot((shown + 1) / len(hit), accuracy[shown], color=BLUE)
    percents(axes.xaxis, axes.yaxis)
    axes.set_xlabel("inputs answered, most certain first (%)")
    axes.set_ylabel("accuracy on them (%)")
    caption = f"It is right on {percent(at_90)} of the 90% of inputs it is most certain of, and on "
    caption += f"{percent(float(accuracy[-1]))} of all."
    return finish(figure, "Accuracy if it may abstain", caption)


def _sources(found: Arrays) -> list[Plot]:
    """Aleatoric against epistemic uncertainty; a single network has no epistemic part."""
    if not found["epistemic"].any():
        return []
    parts = (found["aleatoric"].ravel(), found["epistemic"].ravel())
    share = float(parts[1].sum() / (parts[0].sum() + parts[1].sum()))
    if "mean" in found:
        good, names, unit = np.abs(errors(found)).ravel() < 1.645, ("in the 90% interval", "outside"), "variance"
    else:
        good, names, unit = right(found), ("right", "wrong"), "nats"
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


def _fit(found: Arrays) -> Plot:
    outputs = min(found["mean"].shape[1], 3)
    figure, all_axes = new(0.4 + 3.3 * outputs, outputs)
    for column, axes in enumerate(all_axes):
        target, mean, std = (found[name][:, column] for name in ("targets", "mean", "std"))
        places, ends = _spread(np.argsort(target, kind="stable"), 200), [float(target.min()), float(target.max())]
        axes.errorbar(target[places], mean[places], 1.645 * std[places], fmt="o", color=BLUE, ecolor=GREY, markersize=3,
                      elinewidth=0.8)  # fmt: skip
        axes.plot(ends, ends, ":", color=INK, linewidth=1, zorder=3)
        axes.set_xlabel("true value" if outputs == 1 else f"true value of output {column + 1}")
        axes.set_ylabel("predicted")
    caption = "With 90% intervals; on the dotted line the prediction is exact."
    if len(found["mean"]) > 200:
        caption += f" 200 of the {len(found['mean']):,} inputs are shown, spread evenly over the true values."
    return finish(figure, "Predicted and true values", caption)


def _coverage(found: Arrays) -> Plot:
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
