"""`Format`: a family of tensor networks, which is its equation and what it can do better than the generic way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.formats import algebra, trees
from bayestrain.formats.align import align
from bayestrain.formats.equation import Equation

SWEEPS, STALLED = 200, 1e-4
"""Least-squares sweeps of a decomposition at most; it stops when the relative error falls by less in ten of them."""


class Format(ABC):
    """A family of tensor networks.

    A format must say its `equation`. The rest follows from it; a format overrides a method only where it can do better
    than the generic way. Cores are lists of tensors whose axes are the labels of the equation, in order.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = False
    """Whether layers split their sizes into several modes by default, or leave every axis whole."""

    @abstractmethod
    def equation(self, modes: Sequence[int]) -> Equation:
        """The equation of a tensor whose modes have these sizes; there may be any number of them, even one.

        Most formats only need to know how many there are. A mode need not have a core of its own.
        """

    def decompose(self, tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
        """Cores of `tensor` with relative error at most `tol`, where `max_rank` allows it, and small ranks.

        `max_rank` is one number or one per bond, and wins over `tol`. A tree is decomposed by singular values, any
        other network by least squares from a random start. Half precision is computed in single.
        """
        if not bool(tensor.isfinite().all()):
            raise ConfigError("A tensor with NaN or infinite entries cannot be decomposed. Re-initialise it first.")
        trees.check_tol(tol)
        equation, caps = self.equation(tensor.shape), self.max_ranks(tensor.shape, max_rank)
        exact = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        largest = exact.abs().amax()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))  # squares of the entries stay in range
        way = trees.decompose if equation.is_tree else fitted
        cores = way(equation, exact / scale, tol, caps)
        cores[0] = cores[0] * scale
        return [core.to(tensor.dtype).contiguous() for core in cores]

    def max_ranks(self, modes: Sequence[int], max_rank: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """The rank of every bond: `max_rank`, cut down to what is useful for modes of these sizes."""
        return algebra.max_ranks(self.equation(modes), modes, max_rank)

    def rounds(self, equation: Equation) -> bool:
        """Whether `round` finds the ranks a tensor needs; otherwise ranks are cut by contribution."""
        return equation.is_tree

    def round(
        self, equation: Equation, cores: Sequence[Tensor], tol: float = 0.0, max_rank: int | Sequence[int] | None = None
    ) -> list[Tensor]:
        """The same tensor to relative error `tol`, with the smallest ranks for it and at most `max_rank`."""
        if not self.rounds(equation):
            raise ConfigError(f"Format {self.name!r} has loops or shared bonds and cannot round. Cut by contribution.")
        sizes = equation.sizes([core.shape for core in cores])
        return trees.round(equation, cores, tol, self.max_ranks([sizes[mode] for mode in equation.modes], max_rank))

    def spectra(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Per bond the norms of what its indices contribute, largest first: singular values, where it has them."""
        if equation.is_tree:
            return trees.singular_values(equation, cores)
        found = algebra.contributions(equation, self.align(equation, cores))
        return [values.sort(descending=True).values for values in found]

    def align(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Other cores of the same tensor and shapes, whose rank indices are as independent as can be.

        The prior and cuts by contribution see single indices. An index may become zero: it is cut next.
        """
        return align(equation, cores)

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks as people write them for this format."""
        return tuple(ranks)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def fitted(equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
    """Cores found by alternating least squares, of ranks that grow from 1 until the error is at most `tol`."""
    goal, norm = [(tensor, equation.output)], float(torch.linalg.vector_norm(tensor))
    ranks = tuple(caps) if tol == 0.0 and norm > 0 else (1,) * len(caps)
    while True:
        generator = torch.Generator().manual_seed(0)  # the same tensor has the same cores
        start = algebra.random_cores(equation, tensor.shape, ranks, 1.0, generator=generator, dtype=torch.float64)
        cores, error, before = [core.to(tensor.device) for core in start], 1.0, 2.0
        for _ in range(0, SWEEPS, 10):
            if error <= tol or before - error < STALLED * before:
                break
            cores, before = algebra.refit(equation, cores, goal, sweeps=10), error
            error = float(torch.linalg.vector_norm(algebra.dense(equation, cores) - tensor)) / max(norm, 1e-300)
        if error <= tol or norm == 0 or ranks == tuple(caps):
            return cores
        ranks = tuple(min(rank + (rank + 1) // 2, cap) for rank, cap in zip(ranks, caps, strict=True))
