"""`Format`: what a new low-rank format has to say about itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.formats import algebra
from bayestrain.formats.align import align
from bayestrain.formats.equation import Equation

EXACT = 1e-7
"""Rounding turns indices to singular directions down to this share of the largest; smaller ones are noise."""


class Format(ABC):
    """A family of tensor networks.

    A format must say its `equation` and how to `decompose` a tensor. The rest follows from the equation; a format
    overrides a method only where it can do better than the generic way. Cores are lists of tensors whose axes are the
    labels of the equation, in order.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = False
    """Whether layers split their sizes into several modes by default, or leave every axis whole."""

    @abstractmethod
    def equation(self, modes: Sequence[int]) -> Equation:
        """The equation of a tensor whose modes have these sizes; there may be any number of them, even one.

        Most formats only look at how many there are. A mode need not have a core of its own.
        """

    @abstractmethod
    def decompose(self, tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
        """Cores of `tensor` with relative error at most `tol`, where `max_rank` allows it, and small ranks.

        `max_rank` is one number or one per bond, and wins over `tol`. Half precision is computed in single.
        """

    def max_ranks(self, modes: Sequence[int], max_rank: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """The rank of every bond: `max_rank`, cut down to what is useful for modes of these sizes."""
        return algebra.max_ranks(self.equation(modes), modes, max_rank)

    def rounds(self, equation: Equation) -> bool:
        """Whether `round` finds the ranks a tensor needs; otherwise ranks are cut by contribution."""
        return equation.is_tree

    def round(
        self, equation: Equation, cores: Sequence[Tensor], tol: float = 0.0, max_rank: int | Sequence[int] | None = None
    ) -> list[Tensor]:
        """The same tensor to relative error `tol`, with the smallest ranks for it and at most `max_rank`.

        In a tree this turns every bond to its singular directions and drops the smallest ones.
        """
        if not self.rounds(equation):
            raise ConfigError(f"Format {self.name!r} has loops or shared bonds and cannot round. Cut by contribution.")
        cores = align(equation, cores, live=EXACT)
        sizes = equation.sizes([core.shape for core in cores])
        caps = algebra.max_ranks(equation, [sizes[mode] for mode in equation.modes], max_rank)
        budget = bond_budget(algebra.norm(equation, cores), tol, len(caps))
        for bond, cap in zip(equation.bonds, caps, strict=True):
            values, order = algebra.gram(equation, cores, bond).diagonal().clamp_min(0.0).sqrt().sort(descending=True)
            cores = algebra.keep(equation, cores, bond, order[: kept(values, budget, cap)].sort().values)
        return list(cores)

    def spectra(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Per bond the norms of what its indices contribute, largest first: singular values, where it has them."""
        turned = align(equation, cores, live=EXACT)
        return [values.sort(descending=True).values for values in algebra.contributions(equation, turned)]

    def align(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """The same tensor in the gauge in which the prior sees single singular values."""
        return align(equation, cores)

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks as people write them for this format."""
        return tuple(ranks)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def bond_budget(norm: Tensor, tol: float, bonds: int) -> float:
    """The error allowed per bond so that all errors, which add in squares, stay within ``tol * norm``."""
    if not 0.0 <= tol < 1.0:
        raise ConfigError(f"tol is a relative error and must lie in [0, 1), got {tol}.")
    return tol * float(norm.detach()) / math.sqrt(max(bonds, 1))


def kept(singular_values: Tensor, budget: float, cap: int) -> int:
    """The smallest rank >= 1 whose dropped singular values have a norm within `budget`, and at most `cap`."""
    singular_values = singular_values.detach()
    # No rank is kept for rounding noise alone, whatever the tolerance.
    noise = 10 * torch.finfo(singular_values.dtype).eps * len(singular_values) * float(singular_values[0])
    tails = singular_values.flip(0).square().cumsum(0).sqrt().flip(0)  # tails[r]: norm of everything from r on
    return max(1, min(int((tails > max(budget, noise)).sum()), cap))


def checked_finite(tensor: Tensor) -> Tensor:
    """A tensor to decompose, in single precision at least; raises if it has NaN or infinite entries."""
    if not bool(tensor.isfinite().all()):
        raise ConfigError("A tensor with NaN or infinite entries cannot be decomposed. Re-initialise it first.")
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
