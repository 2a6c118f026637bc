"""Norms of weights and of their changes, without materialising a weight.

Padded modes hold entries that a weight does not have, and tolerances are those of weights. The entries that a weight
does have are a few boxes of the tensor, each of which is a network with smaller modes: their squared norms add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from bayestrain.formats import Equation, algebra
from bayestrain.nn.layout import Layout

Box = tuple[Tensor | None, ...]
"""Per mode the indices that are inside; None if all are."""


@lru_cache(maxsize=1024)
def boxes(layout: Layout) -> tuple[Box, ...]:
    """Disjoint boxes of a layout's tensor that hold all entries of the weight, and no padding."""
    found = []
    for parts in product(*map(_axis_boxes, layout.axes, layout.splits)):
        digits = [digit for part in parts for digit in part]
        found.append(tuple(_mode_indices(layout, mode, digits) for mode in layout.modes))
    return tuple(found)


def _axis_boxes(size: int, split: Sequence[int]) -> list[list[range]]:
    """Boxes of digits, one range per factor of the axis, whose numbers are those below `size`."""
    found: list[list[range]] = []
    prefix: list[range] = []
    for k in range(len(split)):
        digit, size = divmod(size, math.prod(split[k + 1 :]))
        if digit:
            found.append([*prefix, range(digit), *map(range, split[k + 1 :])])
        if not size:
            break
        prefix.append(range(digit, digit + 1))
    return found


def _mode_indices(layout: Layout, mode: Sequence[int], digits: Sequence[range]) -> Tensor | None:
    """The indices of a mode at which all of its factors are in range."""
    sizes = [layout.factors[n] for n in mode]
    if all(len(digits[n]) == size for n, size in zip(mode, sizes, strict=True)):
        return None
    index = torch.arange(math.prod(sizes)).reshape(sizes)
    for axis, n in enumerate(mode):
        index = index.narrow(axis, digits[n].start, len(digits[n]))
    return index.flatten()


def _inside(equation: Equation, cores: Sequence[Tensor], box: Box) -> list[Tensor]:
    """The cores of one box of the tensor."""
    for mode, index in zip(equation.modes, box, strict=True):
        if index is not None:
            cores = algebra.keep(equation, cores, mode, index)
    return list(cores)


def weight_inner(layout: Layout, equation: Equation, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two weights given by their cores."""
    pairs = ((_inside(equation, a, box), _inside(equation, b, box)) for box in boxes(layout))
    return math.fsum(float(algebra.inner(equation, *pair)) for pair in pairs)


def weight_norm(layout: Layout, equation: Equation, cores: Sequence[Tensor]) -> float:
    """The norm of the weight that these cores stand for."""
    return math.sqrt(max(weight_inner(layout, equation, cores, cores), 0.0))


def relative_change(layout: Layout, equation: Equation, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """The norm of the difference of two weights, relative to the first; precise to about 1e-8 in double precision."""
    own, both, other = (weight_inner(layout, equation, *pair) for pair in ((old, old), (old, new), (new, new)))
    return math.sqrt(max(own - 2 * both + other, 0.0) / own) if own > 0 else 0.0
