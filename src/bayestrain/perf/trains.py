"""How a layer can use a weight that is a train: as a whole, as two factors, or as a chain. Torch only.

In a chain, neighbouring cores are merged into a few factors, which act from the right end. Every factor is one batched
matrix product on a state ``(inputs left to do, rank, outputs done)``, whose result has the layout that the next one
needs, so nothing is permuted on the way. The batch is the last axis of the state, which makes products larger and
fewer, or for few rows the first, which needs no copies.
"""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from bayestrain.nn.layout import Layout
from bayestrain.perf.planner import Train

Factor = tuple[Tensor, int]  # of a chain: a matrix (n, K), and how many slices (K, any) of the state it multiplies

FEW_ROWS = 16  # with fewer rows than this a chain keeps the batch as its first axis
ROWS_AT_ONCE = 512  # the most that a chain takes on a CPU: what lies between products stays in the cache


@lru_cache(maxsize=1024)
def train_of(layout: Layout) -> Train | None:
    """The modes of a train that is folded like this; None leaves it to the readable code."""
    (outs, ins, *_), modes, shape = layout.splits, layout.modes, layout.shape
    d, e, ones = len(outs), len(ins), (1,) * len(layout.factors)
    if shape == layout.axes and modes == tuple((k, d + k) for k in range(d)):
        return Train(outs, ins, shape)
    if shape == layout.axes and modes == tuple((k,) for k in range(d + e)):
        return Train((*outs, *ones[d:]), (*ones[:d], *ins), shape, d)
    if len(shape) == 4 and modes == tuple((k,) for k in (d + e, *range(d, d + e), *range(d))):
        return Train((*ones[d:], *outs), (*layout.splits[2], *ins, *ones[:d]), shape, 1 + e, inputs_first=True)
    return None


def ranks(cores: Collection[Tensor]) -> tuple[int, ...]:
    """The ranks of a train, with ones at both ends."""
    return (1, *[core.shape[-1] for core in cores][:-1], 1)


def factors(
    train: Train, cores: Collection[Tensor], cuts: tuple[int, ...], dtype: torch.dtype | None = None
) -> list[Factor]:
    """The factors between the bonds `cuts`, in the order in which they act."""
    four_way, batch, found = _four_way(train, cores), math.prod(train.ins), []
    for first, last in train.runs(cuts):
        run = _merged(four_way[first:last])
        run = run.permute(3, 1, 2, 0) if train.inputs_first else run
        batch //= run.shape[2]  # a factor acts once for each input that is left to do
        found.append((run.reshape(run.shape[0] * run.shape[1], -1).to(dtype), batch))
    return found


def pair(train: Train, cores: Collection[Tensor], bond: int) -> tuple[Tensor, Tensor]:
    """The factors on both sides of a bond of paired modes: ``(rank, outputs * inputs)`` each."""
    four_way = _four_way(train, cores)
    left, right = _merged(four_way[:bond]), _merged(four_way[bond:])
    return left.reshape(-1, left.shape[-1]).mT.contiguous(), right.reshape(len(right), -1)


def halves(train: Train, cores: Collection[Tensor]) -> tuple[Tensor, Tensor]:
    """The factors at the middle bond, ``(rank, taps * inputs)`` and ``(outputs, rank)``, without padding."""
    (inner, _), (outer, _) = factors(train, cores, (train.middle,))
    (outputs, inputs, *taps), rank = train.shape, len(inner)
    if (len(outer), inner.shape[1]) != (outputs, inputs * math.prod(taps)):  # slices would cost time going back
        inner = inner.reshape(rank * math.prod(taps), -1)[:, :inputs].reshape(rank, -1)
        outer = outer[:outputs]
    return inner, outer


def dense(train: Train, cores: Collection[Tensor]) -> Tensor:
    """The whole weight; a kernel lies channels-last in memory."""
    if train.middle:
        inner, outer = halves(train, cores)
        return as_kernel(train, outer @ inner)
    ((whole, _),) = factors(train, cores, ())
    return whole if whole.shape == train.shape else whole[tuple(map(slice, train.shape))]


def as_kernel(train: Train, flat: Tensor) -> Tensor:
    """``(any, taps * inputs)`` in the shape of a weight with so many outputs."""
    _, inputs, *taps = train.shape
    return flat.reshape(-1, *taps, inputs).permute(0, 3, 1, 2) if taps else flat


def multiply(x: Tensor, chain: Sequence[Factor], bias: Tensor | None = None) -> Tensor:
    """``(B, inputs) -> (B, outputs)``, plus the bias."""
    rows = len(x)
    if rows > ROWS_AT_ONCE and x.device.type == "cpu":
        parts = [multiply(part.mT, chain, bias).mT for part in x.mT.split(ROWS_AT_ONCE, dim=1)]
        return torch.cat(parts, dim=1).mT  # in the layout that they have: cat is slow where it must transpose
    batch_first = rows < FEW_ROWS
    state = x if batch_first else x.mT
    for matrix, batch in chain:
        state = _product(matrix, state.reshape(rows * batch if batch_first else batch, matrix.shape[1], -1))
    y = state.reshape(rows, -1) if batch_first else state.reshape(-1, rows).mT
    return y if bias is None else y + bias


def _product(matrix: Tensor, state: Tensor) -> Tensor:
    """`matrix` ``(n, K)`` times every slice of `state` ``(batch, K, N)``."""
    batch, _, columns = state.shape
    if columns == 1:
        return (state.squeeze(2) @ matrix.mT).unsqueeze(2)
    if batch == 1:
        return (matrix @ state.squeeze(0)).unsqueeze(0)
    return torch.bmm(matrix.expand(batch, -1, -1), state)


def _four_way(train: Train, cores: Collection[Tensor]) -> list[Tensor]:
    """The cores as ``(left, outputs, inputs, right)``."""
    places = zip(cores, pairwise(ranks(cores)), train.outs, train.ins, strict=True)
    return [core.reshape(left, m, j, right) for core, (left, right), m, j in places]


def _merged(cores: Sequence[Tensor]) -> Tensor:
    """A run of cores ``(left, out, in, right)`` contracted into one, in halves: each is reordered while it is small."""
    if len(cores) == 1:
        return cores[0]
    half = (len(cores) + 1) // 2
    left, right = _merged(cores[:half]), _merged(cores[half:])
    (outer, m, j, r), (_, n, k, last) = left.shape, right.shape
    product = left.reshape(-1, r) @ right.reshape(r, -1)
    if j > 1 and n > 1:
        product = product.reshape(outer, m, j, n, k, last).transpose(2, 3)
    return product.reshape(outer, m * n, j * k, last)
