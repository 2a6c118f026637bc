"""How the particles' probabilities of an image's two leading classes spread (the paper's figure of uncertainty)."""

import numpy as np
from numpy.typing import NDArray

from bayestrain.report.palette import LIGHT
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import percent, short_name

SHARES = (0.95, 0.75, 0.5, 0.25)
"""Shares of the density's mass below the diagonal that the nested regions hold, the outermost first."""

GRID = 81


def density_plot(
    name: str, particles: NDArray[np.float64], classes: tuple[str, ...], single: NDArray[np.float64] | None
) -> Plot:
    """The joint density for one image with `particles` (particles, classes); `single` is what MAP says of it."""
    import torch

    from bayestrain.predict import ClassPrediction

    joint = ClassPrediction(torch.from_numpy(particles)[:, None]).joint_density(0, grid=GRID)
    first, second = joint.classes
    axis, density, points = joint.axis.numpy(), joint.density.numpy(), joint.points.numpy()
    names = [short_name(classes[label] if label < len(classes) else str(label), 12) for label in (first, second)]
    split = int((particles.argmax(1) == first).sum())
    describe = (
        f"Joint density of the probabilities of {names[0]} and {names[1]} over {len(particles)} particles; "
        f"{split} of them say {names[0]}."
    )
    with drawing(2.35, width=2.55) as (figure, (axes,)):
        possible = np.where(axis[:, None] + axis <= 1 + 1e-9, density, 0.0)
        for level in mass_levels(possible, SHARES):
            axes.contourf(axis, axis, density.T, levels=[level, float(density.max()) * 2], colors=[LIGHT["kept"]],
                          alpha=0.17)  # fmt: skip
        axes.fill([0, 1, 1], [1, 1, 0], color=LIGHT["card"], linewidth=0)  # the two sum to at most 1
        axes.plot([0, 1], [1, 0], color=LIGHT["cut"], linewidth=1)
        axes.grid(False)
        axes.plot([0, 0.5], [0, 0.5], color=LIGHT["cut"], linewidth=1, linestyle=(0, (3, 2)))
        for place, (x, y) in enumerate(points.tolist(), start=1):
            dot = axes.plot(x, y, "o", markersize=4.2, color=LIGHT["kept"], markeredgecolor=LIGHT["card"],
                            markeredgewidth=0.5, clip_on=False)[0]  # fmt: skip
            tip(dot, f"particle {place}: {percent(x, 0)} {names[0]}, {percent(y, 0)} {names[1]}")
        if single is not None:
            x, y = float(single[first]), float(single[second])
            mark = axes.plot(x, y, "D", markersize=5.5, color=LIGHT["map"], markeredgecolor=LIGHT["card"],
                             markeredgewidth=0.6, clip_on=False, zorder=4)[0]  # fmt: skip
            tip(mark, f"MAP: {percent(x, 0)} {names[0]}, {percent(y, 0)} {names[1]}")
        x, y = points.mean(0).tolist()
        mark = axes.plot(x, y, "o", markersize=8, markerfacecolor="none", markeredgecolor=LIGHT["ink"],
                         markeredgewidth=1.6, clip_on=False, zorder=5)[0]  # fmt: skip
        tip(mark, f"posterior: {percent(x, 0)} {names[0]}, {percent(y, 0)} {names[1]}")
        axes.set_aspect("equal")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        ticks = [0, 0.5, 1]
        axes.set_xticks(ticks, ["0", "50", "100"])
        axes.set_yticks(ticks, ["0", "50", "100"])
        axes.set_xlabel(f"P({names[0]}) / %")
        axes.set_ylabel(f"P({names[1]}) / %")
        svg = inline(figure, name, describe)
    return Plot(name, f"{names[0]} or {names[1]}", "", describe, svg)


def mass_levels(density: NDArray[np.float64], shares: tuple[float, ...]) -> list[float]:
    """Heights above which the density holds these shares of its mass: its regions of highest density."""
    heights = np.sort(density, axis=None)[::-1]
    mass = np.cumsum(heights) / heights.sum()
    return [float(heights[min(int(np.searchsorted(mass, share)), len(heights) - 1)]) for share in shares]
