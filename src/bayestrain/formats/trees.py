"""Singular values in networks without loops: for trains TT-SVD and TT rounding (Oseledets 2011), for Tucker HOSVD."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bayestrain.formats.algebra import keep, nonzero, slices
from bayestrain.formats.equation import Equation


def decompose(equation: Equation, tensor: Tensor, tol: float, caps: Sequence[int]) -> list[Tensor]:
    """Cores with relative error at most `tol`, where `caps` allow it; each takes singular vectors of what remains."""
    cores, cap = [tensor] * len(equation.cores), dict(zip(equation.bonds, caps, strict=True))
    left = (tol * torch.linalg.vector_norm(tensor)).square()  # what is cut adds up in squares
    rest, labels = tensor, list(equation.modes)
    for number, (k, _, bond) in enumerate(equation.branches):
        own = [x for x in equation.cores[k] if x != bond]
        others = [x for x in labels if x not in own]
        rest = rest.permute([labels.index(x) for x in (*own, *others)])
        inside, outside = rest.shape[: len(own)], rest.shape[len(own) :]
        u, s, vh = thin_svd(rest.reshape(math.prod(inside), -1))
        rank = kept(s, (left / (len(caps) - number)).sqrt(), cap[bond])
        left = (left - s[rank:].square().sum()).clamp_min(0.0)
        cores[k] = u[:, :rank].reshape(*inside, rank).movedim(-1, equation.axis(k, bond))
        rest, labels = (s[:rank, None] * vh[:rank]).reshape(rank, *outside), [bond, *others]
    cores[0] = rest.permute([labels.index(x) for x in equation.cores[0]])
    return cores


def round(equation: Equation, cores: Sequence[Tensor], tol: float, caps: Sequence[int]) -> list[Tensor]:
    """The same tensor to relative error `tol`, with the smallest ranks for it and at most `caps`, in any gauge."""
    result, values, log_scale = singular_gauge(equation, cores)
    norm = torch.linalg.vector_norm(result[0])
    budget = tol * norm / math.sqrt(max(len(caps), 1))
    for bond, own, cap in zip(equation.bonds, values, caps, strict=True):
        result = keep(equation, result, bond, torch.arange(kept(own, budget, cap), device=own.device))
    if norm > 0:  # it is spread evenly over the cores
        result[0] = result[0] / norm
        share = torch.exp((log_scale + norm.log()) / len(result))
        result = [core * share for core in result]
    return [new.to(old.dtype) for new, old in zip(result, cores, strict=True)]


def singular_gauge(equation: Equation, cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Cores whose indices are singular directions, the singular values of every bond, and the log of a common factor.

    Cores but the first are orthonormal in the bond to their parent: errors of cuts add in squares at most.
    """
    result = [core.double() for core in cores]
    log_scale, values = result[0].new_zeros(()), dict.fromkeys(equation.bonds, result[0])

    def move(k: int, to: int, bond: str, svd: bool = False) -> None:
        """Core k becomes orthonormal; what remains goes to its neighbour."""
        own, other = slices(equation, result, k, bond).mT, slices(equation, result, to, bond)
        if svd:
            q, values[bond], vh = thin_svd(own)
            r = values[bond][:, None] * vh
        else:
            q, r = torch.linalg.qr(own)
        for n, new in ((k, q.mT), (to, r @ other)):
            axis = equation.axis(n, bond)
            rest = result[n].movedim(axis, 0).shape[1:]
            result[n] = new.reshape(-1, *rest).movedim(0, axis)

    for child, parent, bond in equation.branches:
        move(child, parent, bond)
        size = nonzero(torch.linalg.vector_norm(result[parent]))
        result[parent], log_scale = result[parent] / size, log_scale + size.log()
    for step in tour(equation, 0):
        move(*step)
    return result, [values[bond] for bond in equation.bonds], log_scale


def tour(equation: Equation, k: int) -> Iterator[tuple[int, int, str, bool]]:
    """Along every bond beyond core k and back: from, to, bond, and whether it is the way back."""
    for child, parent, bond in equation.branches:
        if parent == k:
            yield k, child, bond, False
            yield from tour(equation, child)
            yield child, k, bond, True


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition, where the largest entry of every left vector is positive."""
    wide = matrix.shape[0] < matrix.shape[1]  # LAPACK finds that of the transpose ten times as fast
    u, s, vh = torch.linalg.svd(matrix.mT if wide else matrix, full_matrices=False)
    u, vh = (vh.mT, u.mT) if wide else (u, vh)
    sign = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0).to(u.dtype)
    return u * sign, s, vh * sign.mT


def kept(singular_values: Tensor, budget: Tensor, cap: int) -> int:
    """The smallest rank >= 1 whose dropped singular values have a norm within `budget`, and at most `cap`."""
    # No rank is kept for rounding noise alone, whatever the tolerance.
    noise = 10 * torch.finfo(singular_values.dtype).eps * len(singular_values) * singular_values[0]
    tails = singular_values.flip(0).square().cumsum(0).sqrt().flip(0)  # tails[r]: norm of everything from r on
    return max(1, min(int((tails > torch.maximum(budget, noise)).sum()), cap))
