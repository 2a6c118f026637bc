"""The tensor ring: a train whose ends are joined."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.formats import trees
from bayestrain.formats.equation import Equation
from bayestrain.formats.fitting import EXACT, fitted, is_quick, nearest, polished, relative_error
from bayestrain.formats.format import Format
from bayestrain.formats.tt import TensorTrain

NOISE = 0.1  # size of what fills the indices that a train does not have, relative to its cores


class TensorRing(Format):
    """``rax, xby, ycr -> abc``: entry (i, j, k) is the trace of the product of the matrices that i, j and k select.

    With a first rank of 1 it is a train, so no decomposition is worse than the train's. Two modes have one bond.
    """

    name: ClassVar[str] = "ring"
    splits: ClassVar[bool] = True

    def equation(self, modes: Sequence[int]) -> Equation:
        mode, count = tuple(f"m{k}" for k in range(len(modes))), len(modes)
        if count < 3:
            return TensorTrain().equation(modes)
        return Equation(tuple((f"r{k}", m, f"r{(k + 1) % count}") for k, m in enumerate(mode)), mode)

    def max_ranks(self, modes: Sequence[int], max_rank: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """No bond needs more than in a train of the modes in the same order that starts at any one of them."""
        around, total = (*modes, *modes), math.prod(modes)
        if len(found := super().max_ranks(modes, max_rank)) < 3:
            return found
        sides = [[math.prod(around[k : k + n]) for n in range(1, len(modes))] for k in range(len(modes))]
        return tuple(min(rank, max(min(p, total // p) for p in own)) for rank, own in zip(found, sides, strict=True))

    def approximate(self, equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
        """The train's singular values, and least squares from there and, where that is quick, from random starts."""
        if equation.is_tree or not bool(tensor.any()):
            return super().approximate(equation, tensor, tol, caps)
        exact = tensor.double()
        train = trees.decompose(TensorTrain().equation(tensor.shape), exact, tol, caps[1:])
        train = [train[0][None], *train[1:-1], train[-1][..., None]]
        best = relative_error(equation, train, exact), train
        if best[0] > max(tol, EXACT):  # it needs all its ranks
            best = best[0], widened(equation, train, tensor.shape, caps, 0.0)
            others = [polished(equation, widened(equation, train, tensor.shape, caps, NOISE), exact, tol)]
            others += [nearest(equation, exact, caps, tol)] if is_quick(equation, tensor.shape, caps) else []
            return min(best, *others, key=lambda each: each[0])[1]
        sizes, entries, rank = tensor.shape, sum(core.numel() for core in train), 1
        while rank < max(caps) and tol > 0.0:  # the largest equal ranks that are smaller
            ranks = self.max_ranks(sizes, [min(rank + 1, cap) for cap in caps])
            if sum(map(math.prod, equation.shapes(sizes, ranks))) >= entries or not is_quick(equation, sizes, ranks):
                break
            rank += 1
        if rank > 1:
            found = fitted(equation, exact, tol, self.max_ranks(sizes, [min(rank, cap) for cap in caps]))
            return found if relative_error(equation, found, exact) <= tol else train
        return train


def widened(
    equation: Equation, cores: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], noise: float
) -> list[Tensor]:
    """The same in the first indices of larger ranks, the others random and of so many times the size."""
    generator, result = torch.Generator().manual_seed(0), list[Tensor]()
    for core, shape in zip(cores, equation.shapes(sizes, ranks), strict=True):
        new = torch.randn(shape, generator=generator, dtype=core.dtype).to(core.device)
        new = new * noise * core.square().mean().sqrt()
        new[tuple(map(slice, core.shape))] = core
        result.append(new)
    return result
