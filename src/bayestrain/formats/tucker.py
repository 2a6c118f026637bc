"""Tucker: a small core with a factor matrix at each mode."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.formats.equation import Equation
from bayestrain.formats.fitting import SWEEPS
from bayestrain.formats.format import Format
from bayestrain.formats.trees import thin_svd

WHOLE = 3  # modes of no more entries have no factor: it would hold about as many entries as it saves


class Tucker(Format):
    """``xyz, ax, by, cz -> abc``: entry (i, j, k) is the core between row i, j and k of the factors.

    A mode of at most `WHOLE` entries stays in the core, such as the rows of a 3x3 kernel, and a matrix has one factor.
    Rounding is generic; its squared error is at most as many times the least as there are factors.
    """

    name: ClassVar[str] = "tucker"

    def equation(self, modes: Sequence[int]) -> Equation:
        mode = tuple(f"m{k}" for k in range(len(modes)))
        long = [k for k, size in enumerate(modes) if size > 1]
        wide = [k for k in long if modes[k] > WHOLE] or long
        bond = {k: f"r{k}" for k in wide[: 1 if len(long) == 2 else None] if len(long) > 1}
        return Equation((tuple(bond.get(k, m) for k, m in enumerate(mode)), *((mode[k], bond[k]) for k in bond)), mode)

    def approximate(self, equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
        """Singular values of one mode after the other, then orthogonal iteration over the factors (HOOI)."""
        cores = super().approximate(equation, tensor, tol, caps)
        whole, before = algebra.nonzero(torch.linalg.vector_norm(tensor)), 2.0
        for _ in range(SWEEPS):
            share = torch.linalg.vector_norm(cores[0]) / whole  # all factors are orthonormal
            error = float((1 - share.square()).clamp_min(0.0).sqrt())
            if error <= tol or before - error < 1e-5 * before:
                break
            before = error
            for k, (mode, bond) in list(enumerate(equation.cores))[1:]:
                others = [own for n, own in enumerate(algebra.operands(equation, cores)) if n not in (0, k)]
                rest = (mode, *(label for label in equation.cores[0] if label != bond))
                near = algebra.contract([(tensor, equation.modes), *others], rest).flatten(1)
                cores[k] = thin_svd(near)[0][:, : cores[k].shape[1]]
            factors = algebra.operands(equation, cores)[1:]
            cores[0] = algebra.contract([(tensor, equation.modes), *factors], equation.cores[0])
        return cores
