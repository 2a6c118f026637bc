"""How ranks and parameters would change with the tolerance of the rounding, from the singular values alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bayestrain.report.run import Layer, Spectra

LEAST, MOST = 1e-4, 0.5


def tolerances(spectra: Spectra) -> NDArray[np.float64]:
    """The tolerances that are looked at, the one used well among them."""
    if spectra.change is not None:  # no tolerance decided
        return np.geomspace(LEAST, MOST, 60)
    low = min(LEAST, spectra.tol / 2) if spectra.tol > 0 else LEAST
    return np.geomspace(low, max(MOST, min(2 * spectra.tol, 1.0)), 60)


def kept_rank(values: Sequence[float], tol: float, bonds: int) -> int:
    """Rank that TT rounding keeps at one bond: what is dropped has a norm within an equal share of the tolerance.

    Every bond's values have the norm of the whole weight, and errors of the bonds add in squares.
    """
    squares = np.square(np.asarray(values, dtype=np.float64))
    budget = tol**2 * squares.sum() / max(bonds, 1)
    dropped = np.cumsum(squares[::-1])  # dropping the smallest, the two smallest, ..
    return max(len(squares) - int((dropped <= budget).sum()), 1)


def ranks_at(spectra: Spectra, name: str, tol: float) -> tuple[int, ...]:
    """Ranks of one layer at another tolerance. Cutting one bond hardly moves the others, which is left out here."""
    bonds = spectra.all_values(name)
    return tuple(kept_rank(values, tol, len(bonds)) for values in bonds)


def core_parameters(sizes: Sequence[int], ranks: Sequence[int]) -> int:
    """Parameters in cores of these sizes with these inner ranks between them."""
    ends = (1, *ranks, 1)
    return sum(ends[k] * size * ends[k + 1] for k, size in enumerate(sizes))


def parameters_at(spectra: Spectra, layers: Sequence[Layer], params: int) -> NDArray[np.float64] | None:
    """Parameters of the whole network at each of `tolerances`; None if some layer's core sizes are unknown."""
    cut = [layer for layer in layers if layer.name in spectra.bonds]
    if not cut or not all(layer.sizes and len(layer.sizes) == len(spectra.bonds[layer.name]) + 1 for layer in cut):
        return None
    others = params - sum(core_parameters(layer.sizes, layer.ranks) for layer in cut)
    totals = [
        others + sum(core_parameters(layer.sizes, ranks_at(spectra, layer.name, float(tol))) for layer in cut)
        for tol in tolerances(spectra)
    ]
    return np.array(totals, dtype=np.float64)


def plateau(spectra: Spectra) -> tuple[float, float] | None:
    """The range of tolerances around the one used over which no rank changes; None if it is hardly one."""

    def all_ranks(tol: float) -> list[tuple[int, ...]]:
        return [ranks_at(spectra, name, tol) for name in spectra.bonds]

    here = all_ranks(spectra.tol)
    same = [float(tol) for tol in tolerances(spectra) if all_ranks(float(tol)) == here]
    below = [tol for tol in same if tol <= spectra.tol]
    above = [tol for tol in same if tol >= spectra.tol]
    low, high = min(below, default=spectra.tol), max(above, default=spectra.tol)
    return (low, high) if high > 1.5 * low else None
