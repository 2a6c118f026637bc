"""The gauge in which every rank index, by which the prior judges, is a singular direction (docs/method.md)."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from bayestrain.formats.algebra import contract, operands, slices
from bayestrain.formats.equation import Equation

LIVE = 1e-3  # indices that contribute less than this share of their bond's largest contribution stay unchanged


def align(equation: Equation, cores: Sequence[Tensor], live: float = LIVE) -> list[Tensor]:
    """The same tensor with every bond turned to singular directions: of the whole tensor in a tree, else of two cores.

    Bonds that more cores share are balanced. New indices are as close as possible to old ones, for optimisers' moments.
    """
    exact = [core.double() for core in cores]
    grams = tree_grams(equation, exact) if equation.is_tree else {}  # a change of gauge leaves those of other bonds
    for bond in sorted(equation.bonds, key=lambda bond: len(equation.owners(bond)) > 2):  # shared bonds come last
        if len(owners := equation.owners(bond)) > 2:
            exact = balance(equation, exact, bond)
            continue
        sides = [slices(equation, exact, k, bond) for k in owners]
        left, right = grams[bond] if grams else [own @ own.mT for own in sides]
        exact = change_gauge(equation, exact, bond, *aligning_gauges(left, right, live))
    return [new.to(old.dtype) for new, old in zip(exact, cores, strict=True)]


def tree_grams(equation: Equation, cores: Sequence[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Per bond of a tree the inner products ``(R, R)`` of what either side of it holds at each index."""
    own, twin = operands(equation, cores), operands(equation, cores, equation.bonds)

    @cache
    def gram(k: int, bond: str) -> Tensor:
        others = [(other, x) for x in equation.bonds_of(k) if x != bond for other in equation.owners(x) if other != k]
        beyond = [(gram(other, x), (x, f"{x}'")) for other, x in others]
        return contract([own[k], twin[k], *beyond], (bond, f"{bond}'"))

    return {bond: tuple(gram(k, bond) for k in equation.owners(bond)) for bond in equation.bonds}


def change_gauge(
    equation: Equation, cores: Sequence[Tensor], bond: str, gauge: Tensor, inverse: Tensor
) -> list[Tensor]:
    """Insert ``gauge @ inverse`` at a bond between two cores: other cores, the same tensor."""
    result = list(cores)
    for k, matrix in zip(equation.owners(bond), (gauge, inverse.mT), strict=True):
        axis = equation.axis(k, bond)
        result[k] = (cores[k].movedim(axis, -1) @ matrix).movedim(-1, axis)
    return result


def balance(equation: Equation, cores: Sequence[Tensor], bond: str) -> list[Tensor]:
    """Give all cores of a bond the same norm at each index of it: other cores, the same tensor."""
    owners, result = equation.owners(bond), list(cores)
    norms = torch.stack([torch.linalg.vector_norm(slices(equation, cores, k, bond), dim=1) for k in owners])
    norms = torch.where((norms > 0).all(0), norms, 1.0)
    for k, factor in zip(owners, norms.log().mean(0).exp() / norms, strict=True):
        axis = equation.axis(k, bond)
        result[k] = (cores[k].movedim(axis, -1) * factor).movedim(-1, axis)
    return result


def aligning_gauges(left: Tensor, right: Tensor, live: float = LIVE) -> tuple[Tensor, Tensor]:
    """The gauges of `align` and their inverses from the Gram matrices of one or many bonds, each ``(.., R, R)``.

    With P the Gram matrix of one side and Q that of the other, the gauge T makes both ``T^t P T`` and ``T^-1 Q T^-t``
    diagonal, and each index keeps its ratio of sizes. Padding and what is not finite stay. No branch looks at a value,
    so a GPU is not waited for and `vmap` works.
    """
    identity = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    sane = (left.isfinite() & right.isfinite()).flatten(-2).all(-1)[..., None]
    left, right = torch.where(sane[..., None], left, identity), torch.where(sane[..., None], right, identity)
    p, q = torch.linalg.diagonal(left), torch.linalg.diagonal(right)
    size = (p * q).clamp_min(0.0).sqrt()
    alive = (size > live * size.amax(-1, keepdim=True)) & sane
    both, rest = alive[..., :, None] & alive[..., None, :], torch.diag_embed((~alive).to(left.dtype))
    scale = torch.where(alive, q / p, 1.0).pow(0.25)  # makes the two diagonals equal
    rows, columns = scale[..., :, None], scale[..., None, :]
    # Indices that stay get the largest values, by themselves, so that no eigenvector mixes them with others.
    largest = 4 * torch.where(alive, size, 0.0).sum(-1)[..., None, None] * rest
    values, vectors = torch.linalg.eigh(torch.where(both, right / rows / columns, largest))
    root = torch.maximum(values, values[..., -1:] * 1e-14).sqrt()[..., None, :]
    turn, back = vectors * root, vectors / root  # right = turn @ turn^t and back^t @ turn = 1
    values, vectors = torch.linalg.eigh(turn.mT @ torch.where(both, left * rows * columns, largest) @ turn)
    root = torch.maximum(values, values[..., -1:] * 1e-16).pow(0.25)[..., None, :]  # of the singular values
    turn, back = turn @ vectors / root, back @ vectors * root
    order = _nearest_order(turn, alive)[..., None, :].expand(turn.shape)
    turn, back = turn.gather(-1, order), back.gather(-1, order)
    sign = torch.where(torch.linalg.diagonal(turn) < 0, -1.0, 1.0)[..., None, :]
    gauge, inverse = rows * (turn * sign) / columns, rows * (back * sign).mT / columns
    return torch.where(both, gauge, identity), torch.where(both, inverse, identity)


def _nearest_order(turn: Tensor, alive: Tensor) -> Tensor:
    """The order of the columns, largest entries first, that brings ``|turn|`` as close to the identity as possible."""
    count = turn.shape[-1]
    likeness = (turn / torch.linalg.vector_norm(turn, dim=-2, keepdim=True)).abs()
    alive_column = torch.where(alive[..., None], likeness.square(), 0.0).sum(-2) > 0.5
    likeness = torch.where(alive[..., None] == alive_column[..., None, :], likeness, -1.0)  # those alive stay together
    order, number = torch.zeros_like(alive, dtype=torch.int64), torch.arange(count, device=turn.device)
    for _ in range(count):
        best = likeness.flatten(-2).argmax(-1, keepdim=True)
        row, column = best // count, best % count
        order = order.scatter(-1, row, column)
        taken = (number[:, None] == row[..., None]) | (number == column[..., None])
        likeness = torch.where(taken, -2.0, likeness)
    return order
