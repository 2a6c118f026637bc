"""The rank that each particle would need alone, around the one they share."""

from collections import Counter
from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from bayestrain.report.figures.layers import MOST_BONDS
from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Layer, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count, plural, short_name

Bonds = list[tuple[Layer, tuple[tuple[int, ...], ...]]]
"""Layers with the particles' own ranks at each bond."""


def own_rank_plot(run: Run) -> list[Plot]:
    """Dots per bond for a small network, a histogram of the spreads for a deep one.

    Nothing where the threshold on lambda decided: the own ranks are those of a rounding that was not.
    """
    own = run.posterior.own_ranks if run.posterior and run.rule == "rounding" else {}
    layers = [
        (layer, own[layer.name]) for layer in run.tensor_layers if len(own.get(layer.name, ())) == len(layer.ranks)
    ]
    if not layers:
        return []
    spreads = [max(ranks) - min(ranks) for _, bonds in layers for ranks in bonds]
    return [_dots(layers) if len(spreads) <= MOST_BONDS else _spreads(spreads)]


def _dots(layers: Bonds) -> Plot:
    rows: list[tuple[Layer, int, tuple[int, ...]]] = []
    for layer, bonds in layers:
        rows += [(layer, -1, ()), *((layer, bond, ranks) for bond, ranks in enumerate(bonds))]
    widest = max(max(*layer.max_ranks, *(rank for ranks in bonds for rank in ranks)) for layer, bonds in layers)
    describe = "Ranks that the particles would need alone. " + " ".join(
        f"Layer {layer.name}, bond {bond + 1}: {_range(ranks)}, shared {layer.ranks[bond]}."
        for layer, bond, ranks in rows
        if ranks
    )
    with drawing(0.8 + 0.27 * len(rows)) as (figure, (axes,)):
        ticks, names = [], []
        for row, (layer, bond, ranks) in enumerate(rows):
            if not ranks:
                axes.text(0, row + 0.12, f"layer {short_name(layer.name, 36)}", va="center", fontweight="bold",
                          fontsize=9)  # fmt: skip
                continue
            ticks.append(row)
            names.append(f"bond {bond + 1}")
            colour = LIGHT["kept" if max(ranks) - min(ranks) <= 1 else "warn"]
            axes.plot([min(ranks), max(ranks)], [row, row], color=colour, linewidth=1.4, alpha=0.6, zorder=2)
            for rank, number in sorted(Counter(ranks).items()):
                size = 4 + 7 * (number / len(ranks)) ** 0.5
                dot = axes.plot(rank, row, "o", markersize=size, color=colour, alpha=0.75, markeredgewidth=0)[0]
                tip(dot, f"layer {layer.name}, bond {bond + 1}: {plural(number, 'particle')} of rank {rank}")
            mark = axes.plot(layer.ranks[bond], row, "|", color=LIGHT["ink"], markersize=15, markeredgewidth=2.2,
                             zorder=4)[0]  # fmt: skip
            tip(mark, f"layer {layer.name}, bond {bond + 1}: all share rank {layer.ranks[bond]}")
            axes.text(1.02, row, _range(ranks), transform=axes.get_yaxis_transform(), va="center", fontsize=8.5,
                      color=colour)  # fmt: skip
        axes.set_yticks(ticks, names)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.set_xlim(0, widest * 1.04)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("rank")
        svg = inline(figure, "own-ranks", describe)
    caption = (
        "Dots: the rank that each particle would need alone, larger where several agree; red where they lie more than "
        "one apart. Bar: the rank they share."
    )
    return Plot("own-ranks", "Do the particles want the same ranks?", caption, describe, svg)


def _spreads(spreads: Sequence[int]) -> Plot:
    numbers = Counter(spreads)
    describe = "How far the particles’ own ranks lie apart. " + " ".join(
        f"{number} bonds: {spread}." for spread, number in sorted(numbers.items())
    )
    with drawing(3.0) as (figure, (axes,)):
        for spread, number in sorted(numbers.items()):
            colour = LIGHT["kept" if spread <= 1 else "warn"]
            tip(axes.bar(spread, number, 0.8, color=colour, linewidth=0)[0],
                f"{plural(number, 'bond')} on which the own ranks differ by {spread}")  # fmt: skip
            if len(numbers) <= 10:
                axes.text(spread, number, count(number), ha="center", va="bottom", fontsize=8.5)
        axes.set_xlim(-0.6, max(*spreads, 3) + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(y=0.1)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("largest less smallest own rank of a bond")
        axes.set_ylabel("bonds")
        svg = inline(figure, "own-ranks", describe)
    caption = (
        "The rank that each particle would need alone, bond by bond. Blue: within one of each other. Red: further."
    )
    return Plot("own-ranks", "Do the particles want the same ranks?", caption, describe, svg)


def _range(ranks: Sequence[int]) -> str:
    return f"{min(ranks)}–{max(ranks)}" if min(ranks) < max(ranks) else str(ranks[0])
