"""Where the paper's rule cut: lambda of every rank index at the end of the search, against the threshold."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.marks import log_powers, stacked_height
from bayestrain.report.figures.training import examples
from bayestrain.report.palette import LIGHT
from bayestrain.report.run import Layer, Run
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.words import count

DASHED = (0, (3, 2))
SMALLEST = 1e-12

Bonds = Sequence[Sequence[float]]


def threshold_plots(run: Run) -> list[Plot]:
    """Nothing for a rounded network. Bars per bond; for a deep network all in one histogram, and a few layers."""
    if run.rule != "lambda" or run.spectra is None:
        return []
    last = next((record.lambdas for record in reversed(run.history) if record.lambdas), {})
    found = {
        layer: [sorted((max(value, SMALLEST) for value in bond), reverse=True) for bond in last[layer.name]]
        for layer in run.tensor_layers
        if len(last.get(layer.name, ())) == len(layer.ranks) and all(last[layer.name])
    }
    tol = run.spectra.tol
    plots = [_histogram(found, tol)] if len(found) > FEW_LAYERS else []
    return plots + [_bars(layer, found[layer], tol, k) for k, layer in enumerate(examples(list(found)))]


def _bars(layer: Layer, bonds: Bonds, tol: float, index: int) -> Plot:
    name = f"threshold-{index + 1}"
    describe = (
        f"Lambda of each rank index of layer {layer.name} at the end of the search, against the threshold {tol:g}; "
        f"kept: {', '.join(map(str, layer.ranks))}."
    )
    everything = [value for values in bonds for value in values]
    floor, top = min(*everything, tol or 1.0) / 3, max(*everything, tol) * 1.8
    with drawing(stacked_height(len(bonds)), len(bonds), sharex=True) as (figure, all_axes):
        for bond, (axes, values, rank) in enumerate(zip(all_axes, bonds, layer.ranks, strict=True)):
            for place, value in enumerate(values, start=1):
                fate = "kept" if place <= rank else "cut"
                bar = axes.bar(place, value - floor, 0.72, bottom=floor, color=LIGHT[fate], linewidth=0)[0]
                tip(bar, f"λ number {place}: {value:.2g} ({fate})")
            if tol:
                line = axes.axhline(tol, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
                tip(line, f"the threshold: {tol:g}")
            log_powers(axes, "y", ticks=4)
            axes.set_ylim(floor, top)
            axes.grid(axis="x", visible=False)
            axes.set_title(f"bond {bond + 1}: {rank} of {len(values)} kept", fontsize=9, pad=3)
        all_axes[-1].set_xlim(0.4, max(map(len, bonds)) + 0.6)
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        all_axes[-1].set_xlabel("rank index, by its λ")
        figure.supylabel("λ", fontsize=9.5, color=LIGHT["muted"])
        svg = inline(figure, name, describe)
    caption = f"Dashed: the threshold, {tol:g}. Blue: kept. Grey: cut."
    if any(max(values) <= tol for values in bonds):
        caption += " Where no λ is above it, the largest one stays."
    return Plot(name, f"λ of layer {layer.name} at the end", caption, describe, svg)


def _histogram(found: Mapping[Layer, Bonds], tol: float) -> Plot:
    pairs = [pair for layer, bonds in found.items() for pair in zip(layer.ranks, bonds, strict=True)]
    kept = [value for rank, values in pairs for value in values[:rank]]
    cut = [value for rank, values in pairs for value in values[rank:]]
    describe = (
        f"Histogram of lambda of all rank indices against the threshold {tol:g}: {len(kept)} kept, {len(cut)} cut."
    )
    with drawing(2.75) as (figure, (axes,)):
        low, high = min(*kept, *cut, tol or 1.0) / 1.5, max(*kept, *cut, tol) * 1.5
        axes.hist([kept, cut], bins=np.geomspace(low, high, 37).tolist(), stacked=True, linewidth=0,
                  color=[LIGHT["kept"], LIGHT["cut"]],
                  label=[f"kept ({count(len(kept))})", f"cut ({count(len(cut))})"])  # fmt: skip
        log_powers(axes, "x")
        if tol:
            axes.axvline(tol, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
        axes.set_xlabel("λ at the end of the search")
        axes.set_ylabel("rank indices")
        axes.grid(axis="x", visible=False)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        svg = inline(figure, "threshold-all", describe)
    return Plot("threshold-all", "All λ", f"Dashed: the threshold, {tol:g}.", describe, svg)
