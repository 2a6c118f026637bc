"""Norms of weights and of their changes, without materialising a weight.

Padded modes hold entries that a weight does not have, and tolerances are those of weights. The entries that a weight
does have are a few boxes of the tensor, each of which is a network with smaller modes: their squared norms add up.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from bayestrain.formats import Equation, algebra
from bayestrain.nn.layout import Layout

Box = tuple[Tensor, ...]
"""Per mode the indices that are inside."""


@lru_cache(maxsize=1024)
def boxes(layout: Layout) -> tuple[Box, ...]:
    """Disjoint boxes of a layout's tensor that hold all entries of the weight, and no padding."""
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


def weight_inner(layout: Layout, equation: Equation, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two weights given by their cores."""

    def inside(cores: Sequence[Tensor], box: Box) -> Sequence[Tensor]:
        for mode, index in zip(equation.modes, box, strict=True):
            cores = algebra.keep(equation, cores, mode, index)
        return cores

    return math.fsum(float(algebra.inner(equation, inside(a, box), inside(b, box))) for box in boxes(layout))


def weight_norm(layout: Layout, equation: Equation, cores: Sequence[Tensor]) -> float:
    """The norm of the weight that these cores stand for."""
    return math.sqrt(max(weight_inner(layout, equation, cores, cores), 0.0))


def relative_change(layout: Layout, equation: Equation, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The norm of the difference of two weights, relative to the first; precise to about 1e-8 in double precision."""
    own, both, other = (weight_inner(layout, equation, *pair) for pair in ((old, old), (old, new), (new, new)))
    return math.sqrt(max(own - 2 * both + other, 0.0) / own) if own > 0 else 0.0
