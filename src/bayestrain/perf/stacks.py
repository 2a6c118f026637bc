"""Weights of one equation padded with zeros and stacked, in two operations for any number of them; their alignment."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats.align import LIVE, aligning_gauges, change_gauge, tree_grams
from bayestrain.formats.equation import Equation
from bayestrain.nn import FactorizedWeight


def cores_of(weight: FactorizedWeight) -> list[Tensor]:
    """The current cores of a weight; reading them one by one as attributes would be slow."""
    own: Any = weight.cores._parameters
    return list(own.values()) if len(own) == len(weight.equation.cores) else list(weight.cores)


class Stacks:
    """How the cores of weights, as they are shaped now, are stacked and taken apart again."""

    def __init__(self, weights: Mapping[Any, FactorizedWeight]) -> None:
        self.weights, self.equation = weights, next(iter(weights.values())).equation
        cores = self._cores()
        self.shapes = [[core.shape for core in own] for own in cores]
        self.stacked = [(len(own), *map(max, zip(*own, strict=True))) for own in self.shapes]
        self.sizes, places = [math.prod(shape) for shape in self.stacked], []
        for shapes, index in zip(self.shapes, self._split(torch.arange(sum(self.sizes))), strict=True):
            places += [cell.flatten() for cell in _cells(index, shapes)]
        self.places = torch.cat(places).to(cores[0][0].device)

    def __call__(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The stacked cores, perhaps in another type; differentiable."""
        flat = torch.cat([core.reshape(-1) for own in self._cores() for core in own]).to(dtype)
        return self._split(flat.new_zeros(sum(self.sizes)).index_copy(0, self.places, flat))

    def apart(self, stacks: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
        """The cores of every weight from such stacks."""
        cells = [_cells(stack, shapes) for stack, shapes in zip(stacks, self.shapes, strict=True)]
        return dict(zip(self.weights, map(list, zip(*cells, strict=True)), strict=True))

    def _cores(self) -> list[tuple[Tensor, ...]]:
        """The first core of every weight, then the second, and so on."""
        return list(zip(*map(cores_of, self.weights.values()), strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.stacked, strict=True)]


def stacks_of(weights: Mapping[str, FactorizedWeight]) -> list[Stacks]:
    """The weights, stacked by their equations."""
    found: dict[Equation, dict[str, FactorizedWeight]] = {}
    for name, own in weights.items():
        found.setdefault(own.equation, {})[name] = own
    return list(map(Stacks, found.values()))


def align_trees(trees: Sequence[Stacks]) -> dict[str, list[Tensor]]:
    """The cores of every weight as `formats.align.align` returns them, in double precision.

    A change of gauge at one bond leaves the Gram matrices of all others as they are.
    """
    if not trees:
        return {}
    found, results = [(own, own(torch.float64)) for own in trees], dict[str, list[Tensor]]()
    grams = [pair for own, cores in found for pair in torch.vmap(tree_grams, (None, 0))(own.equation, cores).values()]
    widest, counts = max(left.shape[-1] for left, _ in grams), [len(left) for left, _ in grams]
    sides = zip(*grams, strict=True)
    left, right = (torch.cat([F.pad(own, (0, widest - own.shape[-1]) * 2) for own in side]) for side in sides)
    gauge, inverse = aligning_gauges(left, right, LIVE)
    turns = zip(gauge.split(counts), inverse.split(counts), (own.shape[-1] for own, _ in grams), strict=True)
    for own, cores in found:
        for bond in own.equation.bonds:
            turn, back, rank = next(turns)
            change = torch.vmap(change_gauge, (None, 0, None, 0, 0))
            cores = change(own.equation, cores, bond, turn[:, :rank, :rank], back[:, :rank, :rank])
        results |= own.apart(cores)
    return results


def _cells(stack: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """The layers of a stack without their padding."""
    return [layer[tuple(map(slice, shape))] for layer, shape in zip(stack, shapes, strict=True)]
