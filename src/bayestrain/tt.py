"""Tensor-train maths on lists of cores. Torch only; knows no modules.

A *core* has shape ``(left rank, *modes, right rank)``. With one mode per core the list is a tensor train (TT), with two
a tensor-train matrix (TTM) whose core modes are ``(out, in)``. Everything that only needs the chain of ranks works for
both: a core is flattened to ``(left, modes, right)`` where that is easier. Bond ``k`` (1 .. d-1) joins core ``k-1`` and
core ``k`` of the Python list. Functions return new tensors and never change their arguments.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError

Cores = Sequence[Tensor]

RESCALE_EVERY = 8
"""`norm` takes the scale out of its running product after so many cores; shorter trains do without."""


# --- shapes -----------------------------------------------------------------------------------------------------------


def ranks(cores: Cores) -> tuple[int, ...]:
    """All ranks ``(1, R_1, .., R_{d-1}, 1)``."""
    return (*(core.shape[0] for core in cores), cores[-1].shape[-1])


def check(cores: Cores) -> None:
    """Raise `ShapeError` unless `cores` is a chain with boundary ranks 1."""
    if not cores:
        raise ShapeError("A tensor train needs at least one core, got none.")
    for k, core in enumerate(cores):
        if core.ndim < 3:
            raise ShapeError(f"Core {k} must have shape (left rank, modes.., right rank), got {tuple(core.shape)}.")
    for k, (left, right) in enumerate(pairwise(cores)):
        if left.shape[-1] != right.shape[0]:
            raise ShapeError(f"Bond {k + 1} joins rank {left.shape[-1]} to rank {right.shape[0]}; they must be equal.")
    if cores[0].shape[0] != 1 or cores[-1].shape[-1] != 1:
        raise ShapeError(f"The first and last rank must be 1, got ranks {ranks(cores)}.")


def feasible_ranks(sizes: Sequence[int], max_rank: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """The largest useful inner ranks for cores with `sizes` entries per slice, cut down to `max_rank`.

    No unfolding can have a larger rank than its smaller side; and with the neighbours cut down, a bond cannot use more
    than ``neighbour rank * size`` on either side. `max_rank` is one number for all bonds or one per bond.
    """
    bonds = len(sizes) - 1
    if max_rank is None:
        max_rank = math.prod(sizes)
    wanted = list(max_rank) if isinstance(max_rank, Sequence) else [max_rank] * bonds
    if len(wanted) != bonds:
        raise ShapeError(f"max_rank must be one number or {bonds} inner ranks, got {tuple(wanted)}.")
    if any(isinstance(rank, bool) or not isinstance(rank, Integral) or rank < 1 for rank in wanted):
        raise ConfigError(
            f"max_rank must be an integer of at least 1, or a tuple of them, got {max_rank!r}. Try max_rank=20."
        )
    inner = [1, *map(int, wanted), 1]
    for k in range(1, bonds + 1):
        inner[k] = min(inner[k], inner[k - 1] * sizes[k - 1])
    for k in range(bonds, 0, -1):
        inner[k] = min(inner[k], inner[k + 1] * sizes[k])
    return tuple(inner[1:-1])


def _flat(core: Tensor) -> Tensor:
    """``(left, *modes, right)`` -> ``(left, prod modes, right)``."""
    return core.reshape(core.shape[0], -1, core.shape[-1])


# --- dense and back ---------------------------------------------------------------------------------------------------


def merge(cores: Cores) -> Tensor:
    """Contract a run of neighbouring cores, flattened, into one: ``(R_left, prod of all modes, R_right)``."""
    if len(cores) == 1:
        return _flat(cores[0])
    half = (len(cores) + 1) // 2  # in halves: only the last product is large
    left, right = merge(cores[:half]), merge(cores[half:])
    product = left.reshape(-1, left.shape[-1]) @ right.reshape(right.shape[0], -1)  # (L*I, r) @ (r, J*R)
    return product.reshape(left.shape[0], left.shape[1] * right.shape[1], right.shape[-1])


def to_dense(cores: Cores) -> Tensor:
    """The full tensor, with the modes of all cores in order."""
    modes = [size for core in cores for size in core.shape[1:-1]]
    return merge(cores).reshape(modes)


def matrix_to_dense(cores: Cores) -> Tensor:
    """The ``(prod out modes, prod in modes)`` matrix of a TTM."""
    return merge_matrix(cores).squeeze((0, -1))


def merge_matrix(cores: Cores) -> Tensor:
    """Contract a run of TTM cores into one: ``(R_left, prod out modes, prod in modes, R_right)``."""
    if len(cores) == 1:
        return cores[0]
    half = (len(cores) + 1) // 2  # each half is brought into order while it is small
    left, right = merge_matrix(cores[:half]), merge_matrix(cores[half:])
    (outer, m, j, r), (_, n, k, last) = left.shape, right.shape
    product = left.reshape(-1, r) @ right.reshape(r, -1)  # (L*M*J, r) @ (r, N*K*R)
    return product.reshape(outer, m, j, n, k, last).transpose(2, 3).reshape(outer, m * n, j * k, last)


def matrix_to_tensor(matrix: Tensor, out_modes: Sequence[int], in_modes: Sequence[int]) -> Tensor:
    """Reorder a ``(prod out_modes, prod in_modes)`` matrix to the d-way tensor ``(m1*j1, .., md*jd)`` of its TTM."""
    d = len(out_modes)
    split = matrix.reshape(*out_modes, *in_modes)
    order = [axis for k in range(d) for axis in (k, d + k)]
    return split.permute(order).reshape([m * j for m, j in zip(out_modes, in_modes, strict=True)])


def tt_svd(tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
    """Three-way cores of `tensor` with ``norm(error) <= tol * norm(tensor)`` and ranks as small as that allows.

    `max_rank` (one number or one per bond) is a hard cap and wins over `tol`. Half precision is computed in single.
    Oseledets 2011, algorithm 1.
    """
    caps = feasible_ranks(tensor.shape, max_rank)
    dtype = tensor.dtype
    tensor = tensor.to(torch.promote_types(dtype, torch.float32))
    largest = tensor.abs().amax()
    if not bool(largest.isfinite()):
        raise ConfigError("A tensor with NaN or infinite entries has no TT-SVD. Repair or re-initialise it first.")
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))  # the squares of the entries stay in range
    budget = _bond_budget(torch.linalg.vector_norm(tensor / scale), tol, len(caps))
    cores: list[Tensor] = []
    rest, left = (tensor / scale).reshape(1, -1), 1
    for size, cap in zip(tensor.shape[:-1], caps, strict=True):
        u, s, vh = torch.linalg.svd(rest.reshape(left * size, -1), full_matrices=False)
        rank = _kept(s, budget, cap)
        cores.append(u[:, :rank].reshape(left, size, rank))
        rest, left = s[:rank, None] * vh[:rank], rank
    cores.append((rest * scale).reshape(left, tensor.shape[-1], 1))
    return [core.to(dtype) for core in cores]


def round_cores(cores: Cores, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
    """The same tensor to relative error `tol` with the smallest ranks for it: QR sweep right, truncated SVD sweep back.

    Gauge invariant: it sees the tensor, not the cores. The norm comes back spread evenly over the cores.
    Oseledets 2011, algorithm 2.
    """
    shapes = [core.shape[1:-1] for core in cores]
    caps = feasible_ranks([math.prod(shape) for shape in shapes], max_rank)
    scale, flat = _orthogonal_sweep(cores)
    budget = _bond_budget(torch.linalg.vector_norm(flat[-1]), tol, len(caps))
    for k in range(len(flat) - 1, 0, -1):
        left, size, right = flat[k].shape
        u, s, vh = torch.linalg.svd(flat[k].reshape(left, size * right), full_matrices=False)
        rank = _kept(s, budget, caps[k - 1])
        flat[k] = vh[:rank].reshape(rank, size, right)
        flat[k - 1] = flat[k - 1] @ (u[:, :rank] * s[:rank])  # (L, I, left) @ (left, rank)
    norm = torch.linalg.vector_norm(flat[0])
    if norm > 0:
        flat[0] = flat[0] / norm
        flat = [core * torch.exp((scale + norm.log()) / len(flat)) for core in flat]
    return [core.reshape(core.shape[0], *shape, core.shape[-1]) for core, shape in zip(flat, shapes, strict=True)]


def bond_spectra(cores: Cores) -> list[Tensor]:
    """Singular values of the unfolding at every bond, largest first, without forming the tensor."""
    scale, flat = _orthogonal_sweep(cores)
    spectra: list[Tensor] = []
    for k in range(len(flat) - 1, 0, -1):
        left, size, right = flat[k].shape
        u, s, vh = torch.linalg.svd(flat[k].reshape(left, size * right), full_matrices=False)
        spectra.append(s * scale.exp())
        flat[k - 1] = flat[k - 1] @ (u * s)
    return spectra[::-1]


def _orthogonal_sweep(cores: Cores) -> tuple[Tensor, list[Tensor]]:
    """Left-orthogonal cores (all but the last) of the tensor divided by ``exp(scale)``; flat ``(left, size, right)``.

    The size of what is carried from core to core is taken out into `scale`, so that neither a long product of large
    cores nor of small ones leaves the range of floating point numbers.
    """
    scale = torch.zeros((), dtype=cores[0].dtype, device=cores[0].device)
    flat: list[Tensor] = []
    carry = torch.ones(1, 1, dtype=cores[0].dtype, device=cores[0].device)
    for k, core in enumerate(cores):
        body = _flat(core)
        body = (carry @ body.reshape(body.shape[0], -1)).reshape(carry.shape[0], body.shape[1], body.shape[2])
        size = torch.linalg.vector_norm(body)
        size = torch.where(size > 0, size, torch.ones_like(size))
        body, scale = body / size, scale + size.log()
        if k == len(cores) - 1:
            flat.append(body)
            break
        q, carry = torch.linalg.qr(body.reshape(-1, body.shape[2]))
        flat.append(q.reshape(body.shape[0], body.shape[1], -1))
    return scale, flat


def _bond_budget(norm: Tensor, tol: float, bonds: int) -> float:
    """Error allowed per bond so that the errors, which add in squares, stay within ``tol * norm`` together."""
    if not 0.0 <= tol < 1.0:
        raise ConfigError(f"tol is a relative error and must lie in [0, 1), got {tol}.")
    return tol * float(norm.detach()) / math.sqrt(max(bonds, 1))


def _kept(singular_values: Tensor, budget: float, cap: int) -> int:
    """The smallest rank >= 1 whose dropped singular values have a norm within `budget`, and at most `cap`."""
    singular_values = singular_values.detach()
    # A rank is never kept for rounding noise alone, whatever the tolerance.
    noise = 10 * torch.finfo(singular_values.dtype).eps * len(singular_values) * float(singular_values[0])
    tails = singular_values.flip(0).square().cumsum(0).sqrt().flip(0)  # tails[r]: norm of everything from r on
    needed = int((tails > max(budget, noise)).sum())
    return max(1, min(needed, cap))


# --- norms and contributions ------------------------------------------------------------------------------------------


def inner(a: Cores, b: Cores) -> Tensor:
    """Inner product of two trains with equal modes, without forming either."""
    gram = a[0].new_ones(1, 1)
    for x, y in zip(a, b, strict=True):
        gram = _gram_right(gram, x, y)
    return gram.squeeze()


def norm(cores: Cores) -> Tensor:
    """Frobenius norm of the full tensor. Differentiable away from zero."""
    gram = cores[0].new_ones(1, 1)
    log_scale = cores[0].new_zeros(())
    for k, core in enumerate(cores):
        if k % RESCALE_EVERY == RESCALE_EVERY - 1:  # a long product of squares would leave the range
            size = gram.detach().diagonal().sum()
            size = torch.where(size > 0, size, torch.ones_like(size))
            gram, log_scale = gram / size, log_scale + size.log()
        gram = _gram_right(gram, core, core)
    root = gram.squeeze().clamp_min(0.0).sqrt()
    return root if len(cores) < RESCALE_EVERY else root * (0.5 * log_scale).exp()


def subtract(a: Cores, b: Cores) -> list[Tensor]:
    """The train of ``a - b``, with ranks added up and every core flattened to three ways."""
    if len(a) == len(b) == 1:
        return [_flat(a[0]) - _flat(b[0])]
    first = torch.cat([_flat(a[0]), _flat(b[0])], dim=2)
    last = torch.cat([_flat(a[-1]), -_flat(b[-1])], dim=0)
    middle = []
    for x, y in zip(a[1:-1], b[1:-1], strict=True):
        block = x.new_zeros(x.shape[0] + y.shape[0], math.prod(x.shape[1:-1]), x.shape[-1] + y.shape[-1])
        block[: x.shape[0], :, : x.shape[-1]] = _flat(x)
        block[x.shape[0] :, :, x.shape[-1] :] = _flat(y)
        middle.append(block)
    return [first, *middle, last]


def grams(cores: Cores) -> tuple[list[Tensor], list[Tensor]]:
    """For every bond the Gram matrix of the left part's columns and of the right part's rows, each ``(R_k, R_k)``."""
    left, right = [cores[0].new_ones(1, 1)], [cores[0].new_ones(1, 1)]
    for core in cores[:-1]:
        left.append(_gram_right(left[-1], core, core))
    for core in reversed(cores[1:]):
        right.append(_gram_left(right[-1], core, core))
    return left[1:], right[:0:-1]


def contributions(cores: Cores) -> list[Tensor]:
    """For every bond the norm of what each rank index adds to the full tensor.

    Dropping index r of a bond changes the tensor by exactly the outer product of the left part's column r and the right
    part's row r. Unlike a slice's own norm this does not depend on how the scale is spread over the cores.
    """
    return [
        left.diagonal().clamp_min(0.0).sqrt() * right.diagonal().clamp_min(0.0).sqrt()
        for left, right in zip(*grams(cores), strict=True)
    ]


def drop_order(cores: Cores, bond: int) -> tuple[Tensor, Tensor]:
    """Rank indices of a bond, least important first, and the exact error (norm) of dropping the first 1, 2, .. of them.

    Dropping a set D changes the tensor by the sum over D x D of the product of the two Gram matrices.
    """
    left, right = (grams_[bond - 1] for grams_ in grams(cores))
    cross = left * right
    order = cross.diagonal().argsort()
    errors = cross[order][:, order].cumsum(0).cumsum(1).diagonal().clamp_min(0.0).sqrt()
    return order, errors.cummax(0).values


def _gram_right(gram: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Carry ``(a, b)`` through cores x ``(a, I, c)`` and y ``(b, I, d)`` to ``(c, d)``."""
    x, y = _flat(x), _flat(y)
    carried = (gram @ y.reshape(y.shape[0], -1)).reshape(-1, y.shape[2])  # (a*I, d)
    return x.reshape(-1, x.shape[2]).mT @ carried


def _gram_left(gram: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Carry ``(c, d)`` back through cores x ``(a, I, c)`` and y ``(b, I, d)`` to ``(a, b)``."""
    x, y = _flat(x), _flat(y)
    carried = (y.reshape(-1, y.shape[2]) @ gram.mT).reshape(y.shape[0], -1)  # (b, I*c)
    return x.reshape(x.shape[0], -1) @ carried.mT


# --- changing a train -------------------------------------------------------------------------------------------------


def slice_bond(cores: Cores, bond: int, keep: Tensor) -> list[Tensor]:
    """Keep only the rank indices `keep` (a 1-d index tensor) of a bond, in both of its cores."""
    result = list(cores)
    result[bond - 1] = result[bond - 1].index_select(-1, keep)
    result[bond] = result[bond].index_select(0, keep)
    return result


def random_cores(
    shapes: Sequence[Sequence[int]],
    inner_ranks: Sequence[int],
    variance: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Gaussian cores with mode shapes `shapes` whose full tensor has entries of mean square `variance`, exactly.

    An entry is a sum of ``prod(inner ranks)`` products of d core entries, so equal variances ``sigma^2`` for all cores
    give it the variance ``prod(ranks) * sigma^(2d)``. A few small cores make that fluctuate from draw to draw; the last
    step therefore rescales by the norm the draw really has.
    """
    if not variance > 0.0:
        raise ConfigError(f"variance must be positive, got {variance}.")
    d = len(shapes)
    chain = (1, *inner_ranks, 1)
    sigma = (variance / math.prod(inner_ranks)) ** (1 / (2 * d))
    cores = [
        sigma * torch.randn(left, *shape, right, generator=generator, dtype=dtype, device=device)
        for left, shape, right in zip(chain[:-1], shapes, chain[1:], strict=True)
    ]
    if cores[0].is_meta:
        return cores
    entries = math.prod(size for shape in shapes for size in shape)
    correction = math.sqrt(variance * entries) / float(norm(cores))
    return [core * correction ** (1 / d) for core in cores]
