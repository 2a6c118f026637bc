"""Singular values in any network without loops: decomposing a tensor, and rounding cores. Torch only.

Cutting a bond of a tree splits the network in two, so every bond has the singular values of a matrix. For a train this
is TT-SVD and TT rounding (Oseledets 2011), for a Tucker tensor the higher-order SVD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.formats.algebra import contract, keep
from bayestrain.formats.equation import Equation


def decompose(equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
    """Cores with relative error at most `tol`, where the ranks `caps` allow it; near the best for the ranks found.

    Each core in turn, children before their parents, takes the leading singular vectors of what remains.
    """
    cores, cap = [tensor] * len(equation.cores), dict(zip(equation.bonds, caps, strict=True))
    budget = bond_budget(torch.linalg.vector_norm(tensor), tol, len(caps))
    rest, labels = tensor, equation.output
    for k, _, bond in equation.branches:
        own = tuple(x for x in equation.cores[k] if x != bond)
        others = tuple(x for x in labels if x not in own)
        rest = contract([(rest, labels)], (*own, *others))
        inside, outside = rest.shape[: len(own)], rest.shape[len(own) :]
        u, s, vh = torch.linalg.svd(rest.reshape(math.prod(inside), -1), full_matrices=False)
        rank = kept(s, budget, cap[bond])
        cores[k] = contract([(u[:, :rank].reshape(*inside, rank), (*own, bond))], equation.cores[k])
        rest, labels = (s[:rank, None] * vh[:rank]).reshape(rank, *outside), (bond, *others)
    cores[0] = contract([(rest, labels)], equation.cores[0])
    return cores


def round(equation: Equation, cores: Sequence[Tensor], tol: float, caps: Sequence[int]) -> list[Tensor]:
    """The same tensor to relative error `tol`, with the smallest ranks for it and at most `caps`.

    It depends on the tensor and not on its gauge. The norm is spread evenly over the cores.
    """
    result, values, log_scale = singular_gauge(equation, cores)
    norm = torch.linalg.vector_norm(result[0])
    budget = bond_budget(norm, tol, len(caps))
    for bond, own, cap in zip(equation.bonds, values, caps, strict=True):
        result = keep(equation, result, bond, torch.arange(kept(own, budget, cap), device=own.device))
    if norm > 0:
        result[0] = result[0] / norm
        share = torch.exp((log_scale + norm.log()) / len(result))
        result = [core * share for core in result]
    return [new.to(old.dtype) for new, old in zip(result, cores, strict=True)]


def singular_values(equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:
    """Those of every bond, largest first, without materialising the tensor."""
    _, values, log_scale = singular_gauge(equation, cores)
    return [own * log_scale.exp() for own in values]


def singular_gauge(equation: Equation, cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Cores of the tensor divided by ``exp(log_scale)`` whose indices are singular directions, and the singular values.

    All cores but the first are orthonormal in the bond to their parent, so dropping the last indices of several bonds
    projects the tensor once per bond: the errors add in squares at most.

    Returns:
        The cores, the singular values of every bond, largest first, and ``log_scale``, which keeps products in range.
    """
    result = [core.double() for core in cores]
    log_scale, values = result[0].new_zeros(()), dict.fromkeys(equation.bonds, result[0])

    def matrix(k: int, bond: str) -> Tensor:  # (entries per index, rank)
        axis = equation.axis(k, bond)
        return result[k].movedim(axis, -1).reshape(-1, result[k].shape[axis])

    def put(k: int, bond: str, matrix: Tensor) -> None:
        axis = equation.axis(k, bond)
        shape = [n for a, n in enumerate(result[k].shape) if a != axis]
        result[k] = matrix.reshape(*shape, -1).movedim(-1, axis)

    def move(k: int, to: int, bond: str) -> None:  # k becomes orthonormal, what remains goes to its neighbour
        q, r = torch.linalg.qr(matrix(k, bond))
        put(k, bond, q)
        put(to, bond, matrix(to, bond) @ r.mT)

    def visit(k: int) -> None:  # everything but core k is orthonormal, before and after
        for child, parent, bond in equation.branches:
            if parent == k:
                move(k, child, bond)
                visit(child)
                u, values[bond], vh = torch.linalg.svd(matrix(child, bond), full_matrices=False)
                put(child, bond, u)
                put(k, bond, matrix(k, bond) @ (vh.mT * values[bond]))

    for child, parent, bond in equation.branches:
        move(child, parent, bond)
        size = torch.linalg.vector_norm(result[parent])
        size = torch.where(size > 0, size, torch.ones_like(size))
        result[parent], log_scale = result[parent] / size, log_scale + size.log()
    visit(0)
    return result, [values[bond] for bond in equation.bonds], log_scale


def check_tol(tol: float) -> None:
    """Raise unless `tol` is a relative error."""
    if not 0.0 <= tol < 1.0:
        raise ConfigError(f"tol is a relative error and must lie in [0, 1), got {tol}.")


def bond_budget(norm: Tensor, tol: float, bonds: int) -> float:
    """The error allowed per bond so that all errors, which add in squares, stay within ``tol * norm``."""
    check_tol(tol)
    return tol * float(norm) / math.sqrt(max(bonds, 1))


def kept(singular_values: Tensor, budget: float, cap: int) -> int:
    """The smallest rank >= 1 whose dropped singular values have a norm within `budget`, and at most `cap`."""
    # No rank is kept for rounding noise alone, whatever the tolerance.
    noise = 10 * torch.finfo(singular_values.dtype).eps * len(singular_values) * float(singular_values[0])
    tails = singular_values.flip(0).square().cumsum(0).sqrt().flip(0)  # tails[r]: norm of everything from r on
    return max(1, min(int((tails > max(budget, noise)).sum()), cap))
