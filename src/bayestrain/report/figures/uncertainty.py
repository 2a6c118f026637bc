"""What kind of doubt it is: uncertainty of the right, the wrong and the strange images, one histogram each."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from bayestrain.report.figures.marks import log_powers
from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, percent, power

BINS = 28
LOWEST, HIGHEST_FLOOR = 1e-5, 1e-2
KINDS = {
    "total": (
        "Total uncertainty",
        "Entropy of the answer. Bars: share of each group, on one scale of doubt; dashed: the group’s median.",
    ),
    "epistemic": (
        "Epistemic uncertainty",
        "The part of it on which the particles disagree: it can shrink with more data, and should be large where an "
        "image is unlike the training images.",
    ),
}

Group = tuple[str, str, NDArray[np.float64]]
"""Name, colour and uncertainties of some images."""


def uncertainty_plots(run: Run) -> list[Plot]:
    """Total and epistemic uncertainty of the images classified right, those classified wrong, those of other data."""
    return [_histograms(kind, groups) for kind in KINDS if len(groups := uncertainty_groups(run, kind)) > 1]


def uncertainty_groups(run: Run, kind: str) -> list[Group]:
    """The groups that have images, with one kind of their uncertainty."""
    evaluation = run.evaluation
    if evaluation is None:
        return []
    if evaluation.uncertainty is not None:
        ours = getattr(evaluation.uncertainty, kind)
    elif evaluation.ood is not None and kind == "total":  # of a single network
        ours = evaluation.entropy
    else:
        return []
    right = evaluation.right
    groups = [("right", "kept", ours[right]), ("wrong", "warn", ours[~right])]
    if evaluation.ood is not None:
        groups.append((run.ood.name if run.ood else "another data set", "ood", getattr(evaluation.ood, kind)))
    return [group for group in groups if len(group[2])]


def bin_edges(values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Logarithmic bins for all groups; the first takes in all that is smaller than nine in ten of the surest group."""
    low = min(float(np.quantile(group, 0.1)) for group in values)
    floor = float(np.clip(10.0 ** np.floor(np.log10(max(low, LOWEST))), LOWEST, HIGHEST_FLOOR))
    return np.geomspace(floor, max(max(float(group.max()) for group in values) * 1.001, 2 * floor), BINS + 1)


def _histograms(kind: str, groups: Sequence[Group]) -> Plot:
    title, caption = KINDS[kind]
    name = f"uncertainty-{kind}"
    edges = bin_edges([values for _, _, values in groups])
    medians = [float(np.median(values)) for _, _, values in groups]
    describe = f"Histograms of the {kind} uncertainty. " + " ".join(
        f"{who}: {count(len(values))} images, median {middle:.2g} nats."
        for (who, _, values), middle in zip(groups, medians, strict=True)
    )
    with drawing(0.8 + 0.95 * len(groups), len(groups), sharex=True, sharey=True) as (figure, all_axes):
        for axes, (who, colour, values), middle in zip(all_axes, groups, medians, strict=True):
            numbers = np.histogram(np.maximum(values, edges[0]), edges)[0]
            for place, number in enumerate(numbers):
                if not number:
                    continue
                low, high = float(edges[place]), float(edges[place + 1])
                width = (high - low) * 0.94
                bar = axes.bar(low, number / len(values), width, align="edge", color=LIGHT[colour], linewidth=0)[0]
                below = "up to" if place == 0 else f"{low:.2g} to"
                tip(
                    bar,
                    f"{who}: {count(number)} images ({percent(number / len(values), 1)}) at {below} {high:.2g} nats",
                )
            shown = max(middle, float(edges[0]))
            axes.axvline(shown, color=LIGHT["ink"], linewidth=1, linestyle=(0, (3, 2)))
            axes.set_title(f"{who} ({count(len(values))}): median {middle:.2g} nats", fontsize=9, pad=3,
                           color=LIGHT[colour])  # fmt: skip
            log_powers(axes, "x")
            axes.grid(axis="x", visible=False)
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}"))
        last = all_axes[-1]
        last.set_xlim(float(edges[0]), float(edges[-1]))
        floor = float(edges[0])
        last.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: ("≤ " if value <= floor * 1.01 else "") + power(value))
        )
        last.set_xlabel(f"{kind} uncertainty / nats (log scale)")
        figure.supylabel("share of the images / %", fontsize=9.5, color=LIGHT["muted"])
        svg = inline(figure, name, describe)
    return Plot(name, title, caption, describe, svg)
