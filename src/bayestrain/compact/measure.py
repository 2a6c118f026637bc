"""Norms of weights and of their changes, without materialising a weight and without the padding of its tensor.

The entries of a weight are a few boxes of the tensor, each a network with smaller modes: their squared norms add up.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layout import Layout


@lru_cache(maxsize=1024)
def boxes(layout: Layout) -> tuple[tuple[Tensor, ...], ...]:
    """Disjoint boxes, per mode the indices inside, that hold all entries of the weight and no padding."""
    found = []
    for parts in product(*map(_axis_boxes, layout.axes, layout.splits)):
        digits = [digit for part in parts for digit in part]
        box = []
        for mode, size in zip(layout.modes, layout.sizes, strict=True):
            index = torch.arange(size).reshape([layout.factors[n] for n in mode])
            box.append(index[tuple(digits[n] for n in mode)].flatten())
        found.append(tuple(box))
    return tuple(found)


def _axis_boxes(size: int, split: Sequence[int]) -> list[list[slice]]:
    """Boxes of digits, one slice per factor of the axis, whose numbers are those below `size`."""
    found: list[list[slice]] = []
    prefix: list[slice] = []
    for k in range(len(split)):
        digit, size = divmod(size, math.prod(split[k + 1 :]))
        if digit:
            found.append([*prefix, slice(digit), *[slice(None)] * len(split[k + 1 :])])
        if not size:
            break
        prefix.append(slice(digit, digit + 1))
    return found


def weight_inner(weight: FactorizedWeight, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two weights given by their cores; `weight` says how they fold."""
    found = []
    for box in boxes(weight.layout):
        pair = [a, b]
        for mode, index in zip(weight.equation.modes, box, strict=True):
            pair = [algebra.keep(weight.equation, cores, mode, index) for cores in pair]
        found.append(float(algebra.inner(weight.equation, *pair)))
    return math.fsum(found)


def relative_change(weight: FactorizedWeight, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The norm of the difference of two weights, relative to the first; precise to about 1e-8 in double precision."""
    own, both, other = (weight_inner(weight, *pair) for pair in ((old, old), (old, new), (new, new)))
    return math.sqrt(max(own - 2 * both + other, 0.0) / own) if own > 0 else 0.0
