"""The particles: how good each is and what their mixture gains, how they lie to each other over the epochs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bayestrain.report.figures.marks import end_labels, epoch_axis, finetune, stacked_height
from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import percent, short, signed

LANES = 5
DASHED = (0, (3, 2))


@dataclass(frozen=True)
class Strip:
    """One score: of each particle, of the posterior, of MAP."""

    label: str
    words: Callable[[float], str]
    tick: Callable[[float], str]
    particles: Sequence[float | None]
    posterior: float | None
    map: float | None


def score_plot(run: Run) -> list[Plot]:
    """Accuracy and log likelihood of each particle, with those of the posterior and of MAP."""
    posterior = run.posterior
    if posterior is None:
        return []
    ours, other = run.scores, run.map.scores if run.map else None
    plain = ours.log_likelihood if posterior.plain_log_likelihood is None else posterior.plain_log_likelihood
    strips = [
        Strip("test accuracy / %", percent, lambda value: f"{100 * value:.4g}", posterior.accuracies, ours.accuracy,
              other.accuracy if other else None),
        Strip("log likelihood per test image", signed, short,
              posterior.log_likelihoods, plain, other.log_likelihood if other else None),
    ]  # fmt: skip
    strips = [strip for strip in strips if sum(value is not None for value in strip.particles) > 1]
    if not strips:
        return []
    with drawing(0.5 + 1.5 * len(strips), len(strips)) as (figure, all_axes):
        texts = [_strip(axes, strip) for axes, strip in zip(all_axes, strips, strict=True)]
        describe = "Scores of the particles. " + " ".join(
            f"{strip.label.partition(' /')[0]}: {text}." for strip, text in zip(strips, texts, strict=True)
        )
        handles = [
            Line2D([], [], marker="o", linestyle="", color=LIGHT["kept"], alpha=0.6, markersize=5.5, label="particle"),
            Line2D([], [], color=LIGHT["muted"], linewidth=1.4, linestyle=DASHED, label="their mean"),
            Line2D([], [], color=LIGHT["kept"], linewidth=2.4, label="posterior"),
            Line2D([], [], marker="D", linestyle="", color=LIGHT["map"], markersize=6, label="MAP"),
        ]
        shown = handles if any(strip.map is not None for strip in strips) else handles[:3]
        figure.legend(handles=shown, loc="outside upper left", ncols=4, columnspacing=1.0, handletextpad=0.4)
        svg = inline(figure, "particle-scores", describe)
    caption = (
        "The posterior answers with the particles’ mean probability: how far it lies from their mean is what "
        "answering together gains."
    ) + (" All are without a temperature here." if posterior.temperature not in (None, 1.0) else "")
    return [Plot("particle-scores", "Each particle, and all together", caption, describe, svg)]


def _strip(axes: Axes, strip: Strip) -> str:
    """Draw one score; the text says what is seen."""
    known = [(place, value) for place, value in enumerate(strip.particles) if value is not None]
    mean = float(np.mean([value for _, value in known]))
    text = f"particles {strip.words(mean)} on average"
    for place, value in known:
        dot = axes.plot(value, place % LANES, "o", markersize=5.5, color=LIGHT["kept"], alpha=0.6,
                        markeredgewidth=0)[0]  # fmt: skip
        tip(dot, f"particle {place + 1}: {strip.words(value)}")
    line = axes.axvline(mean, color=LIGHT["muted"], linewidth=1.4, linestyle=DASHED, zorder=3)
    tip(line, f"mean of the particles: {strip.words(mean)}")
    if strip.posterior is not None:
        line = axes.axvline(strip.posterior, color=LIGHT["kept"], linewidth=2.4, zorder=3)
        tip(line, f"posterior: {strip.words(strip.posterior)}")
        text = f"posterior {strip.words(strip.posterior)}, {text}"
    if strip.map is not None:
        mark = axes.plot(strip.map, (LANES - 1) / 2, "D", markersize=6.5, color=LIGHT["map"], zorder=4)[0]
        tip(mark, f"MAP: {strip.words(strip.map)}")
    axes.set_title(text, fontsize=9, pad=4)
    axes.set_ylim(-1, LANES)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: strip.tick(value)))
    axes.set_xlabel(strip.label)
    return text


def gain_plot(run: Run) -> list[Plot]:
    """Validation log likelihood of the posterior and of the particles on their own, over the epochs."""
    records = [
        (r.epoch, r.validation_log_likelihood, r.validation_mean_log_likelihood)
        for r in run.history
        if r.epoch and r.validation_log_likelihood is not None and r.validation_mean_log_likelihood is not None
    ]
    if run.posterior is None or len(records) < 2:
        return []
    epochs, together, alone = (list(column) for column in zip(*records, strict=True))
    describe = (
        f"Validation log likelihood over the epochs: at the end {signed(together[-1])} for the posterior, "
        f"{signed(alone[-1])} for its particles on average."
    )
    with drawing(3.0) as (figure, (axes,)):
        axes.fill_between(epochs, alone, together, color=LIGHT["kept"], alpha=0.12, linewidth=0)
        axes.plot(epochs, alone, color=LIGHT["muted"], linestyle=DASHED, linewidth=1.4)
        axes.plot(epochs, together, color=LIGHT["kept"])
        epoch_axis(axes, run)
        axes.yaxis.set_major_formatter(FuncFormatter(short))
        axes.set_ylabel("log likelihood per image")
        finetune(axes, run.finetune_start)
        ends = [(together[-1], "posterior", LIGHT["kept"]), (alone[-1], "particles", LIGHT["muted"])]
        end_labels(axes, epochs[-1], ends)
        svg = inline(figure, "mixture-gain", describe)
    caption = "On the validation images. Shaded: what the particles gain by answering together."
    return [Plot("mixture-gain", "The mixture’s gain while training", caption, describe, svg)]


@dataclass(frozen=True)
class Panels:
    """Diagnostics that stand in one figure, with their names."""

    name: str
    title: str
    caption: str
    names: dict[str, str]


FIGURES = (
    Panels(
        "particle-number",
        "Are the particles really many?",
        "Effective particles: how many are really different. The kernel says how much one particle feels of another: "
        "near 1 they are copies, near 0 each is on its own.",
        {"effective_particles": "effective particles", "kernel_mass": "kernel between two particles"},
    ),
    Panels(
        "particle-distance",
        "How far they lie apart",
        "Disagreement: how often a particle’s answer to a validation image is not that of all together. Bandwidth: the "
        "squared distance at which particles count as neighbours.",
        {"disagreement": "disagreement", "bandwidth": "kernel bandwidth"},
    ),
)


def diagnostic_plots(run: Run) -> list[Plot]:
    """How the particles lie to each other, epoch by epoch."""
    return [plot for panels in FIGURES for plot in _diagnostics(run, panels)]


def _diagnostics(run: Run, panels: Panels) -> list[Plot]:
    particles = run.posterior.particles if run.posterior else 0
    known = [(r.epoch, r.diagnostics) for r in run.history if r.diagnostics and r.epoch]  # untrained ones say little
    paths = {
        title: [(epoch, value) for epoch, record in known if (value := getattr(record, key)) is not None]
        for key, title in panels.names.items()
    }
    paths = {title: path for title, path in paths.items() if len(path) > 1}
    if not particles or not paths:
        return []
    describe = f"{panels.title} Over the epochs. " + " ".join(
        f"{title}: from {short(path[0][1])} to {short(path[-1][1])}." for title, path in paths.items()
    )
    with drawing(stacked_height(len(paths)), len(paths), sharex=True) as (figure, all_axes):
        for axes, (title, path) in zip(all_axes, paths.items(), strict=True):
            values = [value for _, value in path]
            text = f"{title}: {short(values[-1])}"
            if title == FIGURES[0].names["effective_particles"]:
                text += f" of {particles}"
                axes.axhline(particles, color=LIGHT["cut"], linewidth=1, linestyle=DASHED)
                values.append(particles)
            tip(axes.plot(*zip(*path, strict=True), color=LIGHT["kept"])[0], text)
            room = 0.12 * (max(values) - min(min(values), 0.0)) or 1.0
            axes.set_ylim(0.0 if min(values) >= 0 else min(values) - room, max(values) + room)
            axes.set_title(text, fontsize=9, pad=3)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_formatter(FuncFormatter(short))
        epoch_axis(all_axes[-1], run)
        for axes in all_axes:
            finetune(axes, run.finetune_start, label=axes is all_axes[0])
        svg = inline(figure, panels.name, describe)
    return [Plot(panels.name, panels.title, panels.caption, describe, svg)]
