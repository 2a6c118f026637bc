"""`Format`: a family of tensor networks, which is its equation and what it can do better than the generic way."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.formats import algebra, trees
from bayestrain.formats.align import align
from bayestrain.formats.equation import Equation
from bayestrain.formats.fitting import fitted


@dataclass(frozen=True)
class Format(ABC):
    """A family of tensor networks, given by its `equation`; it overrides other methods only to do better."""

    name: ClassVar[str]
    splits: ClassVar[bool] = False
    """Whether layers split their sizes into several modes by default."""

    @abstractmethod
    def equation(self, modes: Sequence[int]) -> Equation:
        """The equation of a tensor whose modes, any number of them, have these sizes; a mode may have no own core."""

    def decompose(self, tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
        """Cores of `tensor` with relative error at most `tol`, where `max_rank` allows it, and small ranks.

        A tree is decomposed by singular values, any other network by least squares from random starts.
        """
        check_tol(tol)
        if not bool(tensor.isfinite().all()):
            raise ConfigError("A tensor with NaN or infinite entries cannot be decomposed. Re-initialise it first.")
        equation, caps = self.equation(tensor.shape), self.max_ranks(tensor.shape, max_rank)
        exact = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        scale = algebra.nonzero(exact.abs().amax())  # squares of the entries stay in range
        cores = self.approximate(equation, exact / scale, tol, caps)
        cores[0] = cores[0] * scale
        return [core.to(tensor.dtype).contiguous() for core in cores]

    def approximate(self, equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
        """What `decompose` does for a finite tensor of at least single precision, whose largest entry is near 1."""
        return trees.decompose(equation, tensor, tol, caps) if equation.is_tree else fitted(equation, tensor, tol, caps)

    def max_ranks(self, modes: Sequence[int], max_rank: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """The largest useful rank of every bond, at most `max_rank` (one number, or one per bond).

        A bond between two cores never needs more indices than either core has entries per index. A bond that joins more
        cores needs no more than the tensor has entries, divided by its largest mode.
        """
        equation, total = self.equation(modes), max(math.prod(modes), 1)
        bonds, asked = equation.bonds, total if max_rank is None else checked_rank(max_rank)
        wanted = asked if isinstance(asked, tuple) else (asked,) * len(bonds)
        if len(wanted) != len(bonds):
            raise ShapeError(f"max_rank must be one number or {len(bonds)} ranks, one per bond, got {wanted}.")
        size = dict(zip((*equation.modes, *bonds), (*modes, *wanted), strict=True))
        before: dict[str, int] = {}
        while size != before:  # a smaller bond may make its neighbours smaller
            before = dict(size)
            for bond in bonds:
                limits = [total // max(modes)]
                if len(owners := equation.owners(bond)) == 2:
                    limits = [math.prod(size[x] for x in equation.cores[k] if x != bond) for k in owners]
                size[bond] = max(1, min(size[bond], *limits))
        return tuple(size[bond] for bond in bonds)

    def align(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Other cores of the same tensor and shapes, whose rank indices are as independent as can be."""
        return align(equation, cores)

    def rounds(self, equation: Equation) -> bool:
        """Whether the format can `round`; otherwise ranks are cut by contribution."""
        return equation.is_tree

    def round(
        self, equation: Equation, cores: Sequence[Tensor], tol: float = 0.0, max_rank: int | Sequence[int] | None = None
    ) -> list[Tensor]:
        """The same tensor to relative error `tol`, with the smallest ranks for it and at most `max_rank`."""
        check_tol(tol)
        if not self.rounds(equation):
            raise ConfigError(f"Format {self.name!r} has loops or shared bonds and cannot round. Cut by contribution.")
        sizes = equation.sizes([core.shape for core in cores])
        return trees.round(equation, cores, tol, self.max_ranks([sizes[mode] for mode in equation.modes], max_rank))

    def spectra(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Per bond the singular values, largest first, by which `round` finds ranks."""
        _, values, log_scale = trees.singular_gauge(equation, cores)
        return [own * log_scale.exp() for own in values]

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks as people write them for this format."""
        return tuple(ranks)


def checked_rank(max_rank: Any) -> int | tuple[int, ...]:
    """One rank, or a tuple with one per bond, as plain integers of at least 1; NumPy's are taken, too."""
    given = max_rank if isinstance(max_rank, Sequence) else (max_rank,)
    if not all(isinstance(r, Integral) and not isinstance(r, bool) and int(r) >= 1 for r in given):
        raise ConfigError(f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}. Try 20.")
    return tuple(map(int, given)) if isinstance(max_rank, Sequence) else int(max_rank)


def check_tol(tol: float) -> None:
    """Raise unless `tol` is a relative error."""
    if not 0.0 <= tol < 1.0:
        raise ConfigError(f"tol is a relative error and must lie in [0, 1), got {tol}.")
