"""Where the cut fell: singular values per bond, and what another tolerance would have kept."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from bayestrain.report.figures import FEW_LAYERS
from bayestrain.report.figures.marks import (
    end_labels,
    heat,
    heat_key,
    layer_ticks,
    log_counts,
    log_powers,
    stacked_height,
)
from bayestrain.report.figures.training import examples
from bayestrain.report.palette import LIGHT, series
from bayestrain.report.run import Layer, Run, Spectra
from bayestrain.report.svg import Plot, drawing, inline, tip
from bayestrain.report.tolerance import parameters_at, plateau, ranks_at, tolerances
from bayestrain.report.words import count, tolerance

SMALLEST = 1e-7
DASHED = (0, (3, 2))


def spectrum_plots(run: Run) -> list[Plot]:
    """Singular values per bond with the cut; for a deep network all of them in one histogram, and a few layers."""
    spectra = run.spectra
    if spectra is None:
        return []
    layers = [layer for layer in run.tensor_layers if layer.name in spectra.bonds]
    by_lambda = run.rule == "lambda"
    plots = [_histogram(spectra, by_lambda)] if len(layers) > FEW_LAYERS else []
    return plots + [_spectrum(spectra, layer, k, by_lambda) for k, layer in enumerate(examples(layers))]


def _spectrum(spectra: Spectra, layer: Layer, index: int, by_lambda: bool) -> Plot:
    """Rounding drops the smallest values. The threshold on lambda changes all of them: those before have one colour."""
    name = f"spectrum-{index + 1}"
    bonds, cuts = _relative(spectra, layer.name), spectra.cut[layer.name]
    early = any(spectra.earlier[layer.name])
    describe = f"Singular values at the bonds of layer {layer.name}; kept: {', '.join(map(str, cuts))}."
    smallest = min(value for values in bonds for value in values)
    floor = min(max(smallest / 3, SMALLEST / 2), 0.05)
    with drawing(stacked_height(len(bonds)), len(bonds), sharex=True) as (figure, all_axes):
        for bond, (axes, values, cut) in enumerate(zip(all_axes, bonds, cuts, strict=True)):
            relative = np.maximum(np.array(values), SMALLEST)
            places = np.arange(1, len(values) + 1)
            end = len(spectra.bonds[layer.name][bond]) if by_lambda else cut
            for part, colour in ((slice(0, end), "kept"), (slice(end, None), "cut")):
                for bar, place in zip(
                    axes.bar(
                        places[part], relative[part] - floor, 0.72, bottom=floor, color=LIGHT[colour], linewidth=0
                    ),
                    places[part],
                    strict=True,
                ):
                    fate = "" if by_lambda else f" ({colour})"
                    tip(bar, f"singular value {place}: {relative[place - 1]:.2g} of the largest{fate}")
            if cut < len(values):
                axes.axvline(cut + 0.5, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
            log_powers(axes, "y", ticks=4)
            axes.set_ylim(floor, 1.8)
            axes.grid(axis="x", visible=False)
            kept = f"rank {cut} left of {len(values)}" if by_lambda else f"{cut} of {len(values)} kept"
            axes.set_title(f"bond {bond + 1}: {kept}", fontsize=9, pad=3)
        longest = max(len(values) for values in bonds)
        all_axes[-1].set_xlim(0.4, longest + 0.6)
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        all_axes[-1].set_xlabel("singular value number")
        figure.supylabel("value / largest", fontsize=9.5, color=LIGHT["muted"])
        svg = inline(figure, name, describe)
    cause = "for the size asked for" if spectra.change is not None else f"at a tolerance of {tolerance(spectra.tol)}"
    caption = f"Dashed: the cut {cause}. What is grey was dropped"
    caption += ", most of it during training: shown with the size it had then." if early else "."
    if by_lambda:
        caption = "Before the cut. Dashed: the rank that the threshold on λ left; it does not look at these values."
        caption += " Grey: cut during training, with the size it had then." if early else ""
    return Plot(name, f"Spectrum of layer {layer.name}", caption, describe, svg)


def _relative(spectra: Spectra, name: str) -> list[list[float]]:
    """A layer's singular values per bond relative to the largest."""
    return [[value / max(values[0], 1e-300) for value in values] for values in spectra.all_values(name)]


def _histogram(spectra: Spectra, by_lambda: bool) -> Plot:
    kept, dropped = [], []
    for name, bonds in spectra.bonds.items():
        ends = [len(values) for values in bonds] if by_lambda else spectra.cut[name]
        for values, cut in zip(_relative(spectra, name), ends, strict=True):
            relative = np.maximum(np.array(values), 1e-6)
            kept += list(relative[:cut])
            dropped += list(relative[cut:])
    first, second = ("before the cut", "cut in training") if by_lambda else ("kept", "cut")
    describe = f"Histogram of all singular values: {len(kept)} {first}, {len(dropped)} {second}."
    with drawing(2.75) as (figure, (axes,)):
        bins = np.geomspace(1e-6, 1, 37)
        axes.hist([kept, dropped], bins=bins.tolist(), stacked=True, color=[LIGHT["kept"], LIGHT["cut"]], linewidth=0,
                  label=[f"{first} ({count(len(kept))})", f"{second} ({count(len(dropped))})"])  # fmt: skip
        log_powers(axes, "x")
        axes.set_xlabel("singular value / largest of its bond")
        axes.set_ylabel("singular values")
        axes.grid(axis="x", visible=False)
        shown = 2 if dropped or not by_lambda else 1
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[:shown], labels[:shown], loc="outside upper left", ncols=2)
        svg = inline(figure, "spectrum-all", describe)
    caption = (
        "The threshold on λ does not look at these values."
        if by_lambda
        else "A gap between the two heaps means that the prior decided clearly and the tolerance hardly matters."
    )
    return Plot("spectrum-all", "All singular values", caption, describe, svg)


def tolerance_plots(run: Run) -> list[Plot]:
    """Parameters and ranks as functions of the tolerance of the rounding; where none was, the size it would give."""
    spectra = run.spectra
    if spectra is None:
        return []
    if run.rule == "lambda":
        return _instead(run, spectra, "the threshold on λ left", "Size if it had been rounded")
    layers = [layer for layer in run.tensor_layers if layer.name in spectra.bonds]
    if spectra.change is None:
        plots = _size_curve(run, spectra)
    else:
        plots = _instead(run, spectra, "the cut to a size left", "Size with one tolerance for all layers")
    if len(layers) > FEW_LAYERS:
        return [*plots, _tolerance_map(spectra, layers)]
    return plots + [_rank_curve(spectra, layer, k) for k, layer in enumerate(layers)]


def _size_curve(run: Run, spectra: Spectra) -> list[Plot]:
    totals = parameters_at(spectra, run.layers, run.scores.params or 0)
    if totals is None:
        return []
    flat = plateau(spectra)
    describe = _in_words(spectra, totals)
    with drawing(2.75) as (figure, (axes,)):
        if flat:
            axes.axvspan(*flat, facecolor=LIGHT["kept"], alpha=0.1, linewidth=0)
        _draw_sizes(axes, spectra, totals, describe)
        axes.axvline(spectra.tol, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
        svg = inline(figure, "tolerance", describe)
    caption = f"Dashed: the tolerance used, {tolerance(spectra.tol)}. "
    caption += f"Shaded: from {tolerance(flat[0])} to {tolerance(flat[1])} no rank changes." if flat else ""
    return [Plot("tolerance", "Size at another tolerance", caption, describe, svg)]


def _instead(run: Run, spectra: Spectra, left: str, title: str) -> list[Plot]:
    """What rounding would have left of a network that was cut in another way, and what is `left`."""
    params = run.scores.params or 0
    totals = parameters_at(spectra, run.layers, params)
    if totals is None:
        return []
    describe = f"{_in_words(spectra, totals)} Dashed: what {left.replace('λ', 'lambda')}, {count(params)}."
    with drawing(2.75) as (figure, (axes,)):
        _draw_sizes(axes, spectra, totals, describe)
        axes.set_ylim(min(totals.min(), params) / 2, max(totals.max(), params) * 2)
        log_counts(axes, "y")
        tip(axes.axhline(params, color=LIGHT["ink"], linewidth=1, linestyle=DASHED), f"left: {count(params)}")
        svg = inline(figure, "tolerance", describe)
    caption = f"What rounding would have left, by its tolerance. Dashed: what {left}, {count(params)}."
    return [Plot("tolerance", title, caption, describe, svg)]


def _in_words(spectra: Spectra, totals: NDArray[np.float64]) -> str:
    low, high = (tolerance(float(tol)) for tol in tolerances(spectra)[[0, -1]])
    return f"Parameters against the tolerance: {count(totals[0])} at {low}, {count(totals[-1])} at {high}."


def _draw_sizes(axes: Axes, spectra: Spectra, totals: NDArray[np.float64], describe: str) -> None:
    tols = tolerances(spectra)
    tip(axes.plot(tols, totals, color=LIGHT["kept"])[0], describe)
    axes.set_ylim(totals.min() / 2, totals.max() * 2)
    log_counts(axes, "y")
    log_powers(axes, "x")
    axes.set_xlim(tols[0], tols[-1])
    axes.set_xlabel("tolerance (relative error per layer)")
    axes.set_ylabel("parameters (log scale)")


def _rank_curve(spectra: Spectra, layer: Layer, index: int) -> Plot:
    name = f"tolerance-{index + 1}"
    tols = tolerances(spectra)
    ranks = np.array([ranks_at(spectra, layer.name, float(tol)) for tol in tols])
    describe = f"Ranks of layer {layer.name} against the tolerance of the rounding."
    with drawing(2.75) as (figure, (axes,)):
        for bond in range(ranks.shape[1]):
            axes.plot(tols, ranks[:, bond], color=series(bond), drawstyle="steps-mid")
        log_powers(axes, "x")
        axes.set_xlim(tols[0], tols[-1])
        axes.set_ylim(0, ranks.max() * 1.06 + 0.2)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        if spectra.change is None:
            axes.axvline(spectra.tol, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
        axes.set_xlabel("tolerance (relative error per layer)")
        axes.set_ylabel("rank")
        end_labels(axes, tols[-1], [(float(ranks[-1, b]), f"bond {b + 1}", series(b)) for b in range(ranks.shape[1])])
        svg = inline(figure, name, describe)
    return Plot(name, f"Ranks of layer {layer.name} at another tolerance", "", describe, svg)


def _tolerance_map(spectra: Spectra, layers: list[Layer]) -> Plot:
    tols = tolerances(spectra)
    shares = np.array([
        [sum(ranks_at(spectra, layer.name, float(tol))) / sum(layer.max_ranks) for tol in tols]
        for layer in layers
    ])  # fmt: skip
    describe = f"Map of the ranks of {len(layers)} layers against the tolerance, as a share of the maximum."
    ratio = tols[1] / tols[0]
    edges = [float(tols[0] / ratio**0.5), *(float(tol * ratio**0.5) for tol in tols)]
    with drawing(0.8 + 0.062 * len(layers)) as (figure, (axes,)):
        heat(axes, shares.clip(0, 1), edges, LIGHT["kept"])
        heat_key(axes, LIGHT["kept"], "0", "100 %")
        log_powers(axes, "x")
        if spectra.change is None:
            axes.axvline(spectra.tol, color=LIGHT["ink"], linewidth=1, linestyle=DASHED)
        layer_ticks(axes, layers)
        axes.set_xlabel("tolerance (relative error per layer)")
        svg = inline(figure, "tolerance-map", describe)
    caption = "Sum of a layer’s ranks as a share of the maximum"
    caption += "; dashed: the tolerance used." if spectra.change is None else "."
    return Plot("tolerance-map", "Ranks at another tolerance", caption, describe, svg)
