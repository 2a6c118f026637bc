"""Other cores for the same tensor: changes of gauge, and the one in which every rank index is a singular direction."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bayestrain import tt

LIVE = 1e-3
"""`align` leaves rank indices as they are that contribute less than this share of their bond's largest contribution."""


def change_gauge(cores: tt.Cores, bond: int, matrix: Tensor) -> list[Tensor]:
    """Insert ``matrix @ inverse(matrix)`` at a bond: other cores, the same tensor."""
    result = list(cores)
    left, right = cores[bond - 1], cores[bond]
    result[bond - 1] = left @ matrix
    solved = torch.linalg.solve(matrix, right.reshape(right.shape[0], -1))
    result[bond] = solved.reshape(right.shape)
    return result


def align(cores: tt.Cores, live: float = LIVE) -> list[Tensor]:
    """The same tensor with its rank indices turned to the singular directions: one singular value per index and bond.

    With P the Gram matrix of the left part's columns and Q that of the right part's rows, the gauge T of a bond makes
    both ``T^t P T`` and ``T^-1 Q T^-t`` diagonal; their product is the squared singular values. Only small matrices are
    decomposed. Each index keeps its ratio of left to right size, so no core grows or shrinks as a whole. Indices that
    contribute less than `live` of the bond's largest contribution stay as they are, and the new ones are ordered and
    signed to be as close as possible to the old: an optimiser's moments keep most of their meaning.
    """
    exact = [core.double() for core in cores]
    pairs = [aligning_gauges(left, right, live) for left, right in zip(*tt.grams(exact), strict=True)]
    turned = change_gauges(exact, [gauge for gauge, _ in pairs], [inverse for _, inverse in pairs])
    return [new.to(old.dtype) for new, old in zip(turned, cores, strict=True)]


def change_gauges(cores: tt.Cores, gauges: Sequence[Tensor], inverses: Sequence[Tensor]) -> list[Tensor]:
    """Insert ``gauge @ inverse`` at every bond."""
    result = list(cores)
    for k, (gauge, inverse) in enumerate(zip(gauges, inverses, strict=True)):
        left, right = result[k], result[k + 1]
        result[k] = (left.reshape(-1, left.shape[-1]) @ gauge).reshape(left.shape)
        result[k + 1] = (inverse @ right.reshape(right.shape[0], -1)).reshape(right.shape)
    return result


def aligning_gauges(left: Tensor, right: Tensor, live: float = LIVE) -> tuple[Tensor, Tensor]:
    """The gauges of `align` and their inverses from the Gram matrices of many bonds, each ``(.., R, R)``.

    Bonds of smaller rank are filled up with zeros; there, and where a bond has an entry that is not finite, the gauge
    is the identity. No branch looks at a value, so that a GPU is not waited for and `torch.vmap` works.
    """
    identity = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    sane = (left.isfinite() & right.isfinite()).flatten(-2).all(-1)[..., None]
    left, right = torch.where(sane[..., None], left, identity), torch.where(sane[..., None], right, identity)
    p, q = _diagonal(left), _diagonal(right)
    size = (p * q).clamp_min(0.0).sqrt()
    alive = (size > live * size.amax(-1, keepdim=True)) & sane
    both, rest = alive[..., :, None] & alive[..., None, :], torch.diag_embed((~alive).to(left.dtype))
    scale = torch.where(alive, q / p, 1.0).pow(0.25)  # makes the two diagonals equal
    rows, columns = scale[..., :, None], scale[..., None, :]
    # Indices that are to stay get the largest values, by themselves, so that no eigenvector mixes them with others.
    largest = 4 * torch.where(alive, size, 0.0).sum(-1)[..., None, None] * rest
    values, vectors = torch.linalg.eigh(torch.where(both, right / rows / columns, largest))
    root = _at_least(values, 1e-14).sqrt()[..., None, :]
    turn, back = vectors * root, vectors / root  # right = turn @ turn^t and back^t @ turn = 1
    values, vectors = torch.linalg.eigh(turn.mT @ torch.where(both, left * rows * columns, largest) @ turn)
    root = _at_least(values, 1e-16).pow(0.25)[..., None, :]  # of the singular values
    turn, back = turn @ vectors / root, back @ vectors * root
    order = _nearest_order(turn, alive)[..., None, :].expand(turn.shape)
    turn, back = turn.gather(-1, order), back.gather(-1, order)
    sign = torch.where(_diagonal(turn) < 0, -1.0, 1.0)[..., None, :]
    gauge, inverse = rows * (turn * sign) / columns, rows * (back * sign).mT / columns
    return torch.where(both, gauge, identity), torch.where(both, inverse, identity)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


def _at_least(values: Tensor, fraction: float) -> Tensor:
    """Eigenvalues, smallest first, not below this fraction of the largest."""
    return torch.maximum(values, values[..., -1:] * fraction)


def _nearest_order(turn: Tensor, alive: Tensor) -> Tensor:
    """The order of the columns, found largest entries first, that brings ``|turn|`` as close to the identity as can be.

    Rows that are alive only get columns that are: the others may stand at right angles to them, but nowhere else.
    """
    count = turn.shape[-1]
    likeness = (turn / torch.linalg.vector_norm(turn, dim=-2, keepdim=True)).abs()
    alive_column = torch.where(alive[..., None], likeness.square(), 0.0).sum(-2) > 0.5
    likeness = torch.where(alive[..., None] == alive_column[..., None, :], likeness, -1.0).flatten(-2)
    place = torch.arange(count * count, device=turn.device)
    row, column = place // count, place % count
    found = []
    for _ in range(count):
        best = likeness.argmax(-1, keepdim=True)
        found.append(best)
        likeness = torch.where((row == best // count) | (column == best % count), -2.0, likeness)
    best = torch.cat(found, -1)  # each row once, and each column once
    return (best % count).gather(-1, (best // count).argsort(-1))
