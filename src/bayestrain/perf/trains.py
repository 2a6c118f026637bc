"""How a layer can use a weight that is a train: as a whole, as two factors, or as a chain. Torch only.

In a chain, neighbouring cores are merged into a few factors, which act from the right end. Every factor is one batched
matrix product on a state ``(inputs left to do, rank, outputs done)``, whose result has the layout that the next one
needs, so nothing is permuted on the way. The batch is the last axis of the state, which makes products larger and
fewer, or for few rows the first, which needs no copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bayestrain.nn.layout import Layout
from bayestrain.perf.planner import HalvesShape, PairedShape, Plan

FEW_ROWS = 16
"""With fewer rows than this a chain keeps the batch as its first axis."""

MANY_ROWS, ROWS_AT_ONCE = 1024, 256
"""With more rows than the first a chain on a CPU takes so many at a time: what lies between products stays in cache."""


class Factor(NamedTuple):
    """One product of a chain: `matrix` ``(n, K)`` times each of `batch` slices ``(K, any)`` of the state."""

    matrix: Tensor
    batch: int


@dataclass(frozen=True)
class Paired:
    """A train whose mode k fuses factor k of the outputs with factor k of the inputs."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    features: tuple[int, int]
    """Outputs and inputs without padding."""

    def shape(self, cores: Collection[Tensor]) -> PairedShape:
        """What the planner needs to know of these cores."""
        return PairedShape(self.outs, self.ins, _ranks(cores))

    def factors(self, cores: Collection[Tensor], plan: Plan, dtype: torch.dtype) -> list[Factor]:
        """The factors of a chain for products of this type, in the order in which they act."""
        four_way, batch, found = self._four_way(cores), math.prod(self.ins), []
        for a, b in reversed(list(pairwise((0, *plan.cuts, len(four_way))))):
            run = _merged(four_way[a:b])
            batch //= run.shape[2]  # a factor acts once for each input that is left to do
            found.append(Factor(run.reshape(run.shape[0] * run.shape[1], -1).to(dtype), batch))
        return found

    def dense(self, cores: Collection[Tensor]) -> Tensor:
        """The whole weight."""
        return _cut(_merged(self._four_way(cores)).squeeze((0, 3)), *self.features)

    def _four_way(self, cores: Collection[Tensor]) -> list[Tensor]:
        """The cores as ``(left, out, in, right)``."""
        own = zip(_three_way(cores), self.outs, self.ins, strict=True)
        return [core.reshape(core.shape[0], m, j, core.shape[2]) for core, m, j in own]


@dataclass(frozen=True)
class Halves:
    """A train with all modes of the outputs on one side of a bond: a convolution's, or one of the split layout."""

    cut: int
    outputs_first: bool
    weight_shape: tuple[int, ...]

    def shape(self, cores: Collection[Tensor]) -> HalvesShape:
        """What the planner needs to know of these cores."""
        return HalvesShape(tuple(c.shape[1] for c in _three_way(cores)), _ranks(cores), self.cut, self.outputs_first)

    def factors(self, cores: Collection[Tensor]) -> tuple[Tensor, Tensor]:
        """The weight as two thin ones, ``(rank, taps * inputs)`` and ``(outputs, rank)``, without padding."""
        four_way = [core[:, :, None] for core in _three_way(cores)]
        first, second = _merged(four_way[: self.cut])[0, :, 0], _merged(four_way[self.cut :])[:, :, 0, 0]
        (outputs, inputs, *taps), rank = self.weight_shape, first.shape[1]
        if self.outputs_first:
            return _cut(second, rank, inputs), _cut(first, outputs, rank)
        rows = rank * math.prod(taps)
        return _cut(first.mT.reshape(rows, -1), rows, inputs).reshape(rank, -1), _cut(second.mT, outputs, rank)

    def dense(self, cores: Collection[Tensor]) -> Tensor:
        """The whole weight; a kernel lies channels-last in memory."""
        inner, outer = self.factors(cores)
        return self.as_kernel(outer @ inner)

    def as_kernel(self, flat: Tensor) -> Tensor:
        """``(any, taps * inputs)`` in the shape of a weight with so many outputs."""
        _, inputs, *taps = self.weight_shape
        return flat.reshape(-1, *taps, inputs).permute(0, 3, 1, 2) if taps else flat


Use = Paired | Halves


@lru_cache(maxsize=1024)
def use_of(layout: Layout) -> Use | None:
    """How a train folded like this can be used; None leaves it to the readable code."""
    outs, ins = len(layout.splits[0]), len(layout.splits[1])
    if layout.shape == layout.axes and layout.modes == tuple((k, outs + k) for k in range(outs)):
        return Paired(layout.splits[0], layout.splits[1], (layout.shape[0], layout.shape[1]))
    if layout.shape == layout.axes and layout.modes == tuple((k,) for k in range(outs + ins)):
        return Halves(outs, True, layout.shape)
    taps_first = (outs + ins, *range(outs, outs + ins), *range(outs))
    if len(layout.shape) == 4 and layout.modes == tuple((k,) for k in taps_first):
        return Halves(1 + ins, False, layout.shape)
    return None


def multiply(x: Tensor, chain: Sequence[Factor], batch_first: bool) -> Tensor:
    """``(B, inputs) -> (B, outputs)``."""
    if not batch_first and x.device.type == "cpu" and len(x) > MANY_ROWS:
        return torch.cat([multiply(rows, chain, batch_first) for rows in x.split(ROWS_AT_ONCE)])
    rows, state = len(x), x if batch_first else x.mT
    for matrix, batch in chain:
        state = _product(matrix, state.reshape(rows * batch if batch_first else batch, matrix.shape[1], -1))
    return state.reshape(rows, -1) if batch_first else state.reshape(-1, rows).mT


def _product(matrix: Tensor, state: Tensor) -> Tensor:
    """`matrix` ``(n, K)`` times every slice of `state` ``(batch, K, N)``."""
    batch, _, columns = state.shape
    if columns == 1:
        return (state.squeeze(2) @ matrix.mT).unsqueeze(2)
    if batch == 1:
        return (matrix @ state.squeeze(0)).unsqueeze(0)
    return torch.bmm(matrix.expand(batch, -1, -1), state)


def _merged(cores: Sequence[Tensor]) -> Tensor:
    """A run of cores ``(left, out, in, right)`` contracted into one, in halves: each is reordered while it is small."""
    if len(cores) == 1:
        return cores[0]
    half = (len(cores) + 1) // 2
    left, right = _merged(cores[:half]), _merged(cores[half:])
    (outer, m, j, r), (_, n, k, last) = left.shape, right.shape
    product = left.reshape(-1, r) @ right.reshape(r, -1)
    return product.reshape(outer, m, j, n, k, last).transpose(2, 3).reshape(outer, m * n, j * k, last)


def _cut(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix without its padding; where it has none, slices would only cost time in the backward pass."""
    return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]


def _ranks(cores: Collection[Tensor]) -> tuple[int, ...]:
    """The ranks of a train, with ones at both ends."""
    return (1, *[core.shape[-1] for core in cores][:-1], 1)


def _three_way(cores: Collection[Tensor]) -> list[Tensor]:
    """The cores as ``(left, mode, right)``."""
    first, *inner, last = cores
    return [first[None], *inner, last[..., None]]
