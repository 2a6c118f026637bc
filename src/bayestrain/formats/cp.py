"""CP: a sum of outer products, which share one bond."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.formats.algebra import Operand, nonzero
from bayestrain.formats.align import balance
from bayestrain.formats.equation import Equation
from bayestrain.formats.fitting import fitted, inside, lowered, nearest, outside, swept
from bayestrain.formats.format import Format, check_tol

EXACT = 1e-7  # relative error below which two tensors are the same: it is the root of a difference of squares
SPARE = 2  # a decomposition starts with so many times its ranks: from there it rarely ends in a local minimum


class CP(Format):
    """``ar, br, cr -> abc``: entry (i, j, k) is the sum of the products of row i, j and k of the cores.

    Ranks are found by taking away the index that the others can best replace, and fitting these again.
    """

    name: ClassVar[str] = "cp"

    def equation(self, modes: Sequence[int]) -> Equation:
        bond = ("r",) if len(modes) > 1 else ()
        mode = tuple(f"m{k}" for k in range(len(modes)))
        return Equation(tuple((m, *bond) for m in mode), mode)

    def approximate(self, equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
        """Beyond the generic way: a fit of more indices, of which those are taken away that the others can replace."""
        if equation.is_tree or not bool(tensor.any()):
            return super().approximate(equation, tensor, tol, caps)
        exact = tensor.double()
        if tol > 0.0:
            return balance(equation, fitted(equation, exact, tol, caps), "r")
        error, cores = nearest(equation, exact, caps)
        if error <= EXACT:
            return balance(equation, lowered(equation, cores, exact, EXACT), "r")
        wide = [SPARE * caps[0]]
        small, bases = inside(equation, exact, wide)
        goal, size = [(small, equation.modes)], torch.linalg.vector_norm(small)
        less = taken_away(equation, nearest(equation, small, wide, starts=1)[1], goal, size, EXACT, caps[0])
        other = polished(equation, outside(equation, less, bases), [(exact, equation.modes)], size, tol)
        return balance(equation, cores if error <= other[0] else other[1], "r")

    def rounds(self, equation: Equation) -> bool:  # noqa: ARG002
        return True

    def round(
        self, equation: Equation, cores: Sequence[Tensor], tol: float = 0.0, max_rank: int | Sequence[int] | None = None
    ) -> list[Tensor]:
        """Indices are taken away as long as the tolerance allows, or the largest rank demands."""
        if equation.is_tree:
            return super().round(equation, cores, tol, max_rank)
        check_tol(tol)
        caps = self.max_ranks([len(core) for core in cores], max_rank)
        exact = balance(equation, [core.double() for core in cores], "r")
        goal, size = algebra.operands(equation, exact), algebra.norm(equation, exact)
        less = taken_away(equation, exact, goal, size, max(tol, EXACT), caps[0])
        return [new.to(old.dtype) for new, old in zip(balance(equation, less, "r"), cores, strict=True)]

    def spectra(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
        """Values whose root of the sum of squares, from any index on, is at least the error of taking these away."""
        if equation.is_tree:
            return super().spectra(equation, cores)
        exact = balance(equation, [core.double() for core in cores], "r")
        goal, size = algebra.operands(equation, exact), algebra.norm(equation, exact)
        less, errors = exact, [0.0]
        while less[0].shape[-1] > 1:
            error, less = polished(equation, one_less(equation, less, goal), goal, size, 0.0)
            errors.append(error)
        lost = size.new_tensor([*errors, 1.0]).square()
        lost = torch.where(lost > EXACT**2, lost, 0.0).cummax(0).values
        return [lost.diff().cummax(0).values.flip(0).sqrt() * size]


def one_less(equation: Equation, cores: Sequence[Tensor], goal: Sequence[Operand]) -> list[Tensor]:
    """Without the index that the others can best replace, and these fitted again."""
    gram = algebra.gram(equation, cores, "r")
    norms = gram.diagonal().clamp_min(0.0).sqrt()
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    alike = gram / nonzero(norms) / nonzero(norms)[:, None] + 1e-10 * eye
    alone = norms / torch.linalg.inv(alike).diagonal().clamp_min(1.0).sqrt()  # what no multiples of others replace
    number = torch.arange(len(gram), device=gram.device)
    rest = algebra.keep(equation, cores, "r", number[number != alone.argmin()])
    return balance(equation, algebra.refit(equation, rest, goal, sweeps=5), "r")


def taken_away(
    equation: Equation, cores: Sequence[Tensor], goal: Sequence[Operand], size: Tensor, tol: float, cap: int
) -> list[Tensor]:
    """The fewest indices with an error of at most `tol`, and at most `cap` of them."""
    best = list(cores)
    while (rank := best[0].shape[-1]) > 1:
        less = one_less(equation, best, goal)
        if rank <= cap:
            error, less = polished(equation, less, goal, size, tol)
            if not error <= tol:  # NaN, too
                break
        best = less
    return best


def polished(
    equation: Equation, cores: Sequence[Tensor], goal: Sequence[Operand], size: Tensor, tol: float
) -> tuple[float, list[Tensor]]:
    """Cores fitted to a goal of this norm, and their relative error; neither is materialised."""

    def error_of(cores: Sequence[Tensor]) -> float:
        cross = algebra.contract([*goal, *algebra.operands(equation, cores, equation.bonds)], ())
        squares = size.square() + algebra.norm(equation, cores).square() - 2 * cross
        return float(squares.clamp_min(0.0).sqrt() / nonzero(size))

    return swept(equation, cores, goal, error_of, max(tol, EXACT))
