"""The Gaussian-Gamma prior that shrinks ranks, as functions of cores and ``u = log lambda``. Torch only.

Every bond k has a vector ``lambda^(k)`` with one positive entry per rank index. A core's slice (a, b) is Gaussian with
mean 0 and variance ``lambda^(k-1)_a * lambda^(k)_b``; the first and last core, with one bond each, have variance
``lambda^2``. Every lambda is Gamma(a, b). When an entry goes to zero, both slices that meet there vanish and the rank
falls. The density grows without bound on the way, so callers keep a floor under ``u`` (`apply_floor`).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from bayestrain.tt import Cores

GAMMA_SHAPE, GAMMA_RATE = 1.0, 5.0
"""The paper's Gamma prior on every lambda."""

FLOOR = 1e-3
"""Smallest lambda of a bond relative to its largest."""

LIMIT = 30.0
"""Largest ``|log lambda|``: its exponentials and their products stay finite in single precision."""

MAX_NEWTON_STEP = 2.0
"""Largest change of ``log lambda`` in one update: far from the mode the conditional is flat and Newton overshoots."""


def slice_energies(cores: Cores) -> list[Tensor]:
    """Per core the ``(left, right)`` matrix of the slices' sums of squares."""
    # Half precision can hold neither the squares nor their sums.
    exact = [core if core.dtype in (torch.float32, torch.float64) else core.float() for core in cores]
    return [core.square().sum(dim=tuple(range(1, core.ndim - 1))) for core in exact]


def log_variances(log_lambdas: Sequence[Tensor]) -> list[Tensor]:
    """Per core the ``(left, right)`` matrix of the slices' log variances."""
    first, last = 2.0 * log_lambdas[0][None, :], 2.0 * log_lambdas[-1][:, None]
    middle = [left[:, None] + right[None, :] for left, right in pairwise(log_lambdas)]
    return [first, *middle, last]


def log_prob(
    cores: Cores, log_lambdas: Sequence[Tensor], a: float, b: float, dropped: Sequence[int] | None = None
) -> Tensor:
    """``log p(cores | lambda) + log p(lambda)``, every constant included (Hawkins & Zhang 2019, eqs. 9-11).

    `dropped` counts, per bond, rank indices that were cut because they are zero. Their slices still stand in the
    density of the neighbouring lambdas, so that cutting them does not change what the prior wants of the others; terms
    that depend on nothing but the dropped indices are left out.
    """
    gone = [0] * len(log_lambdas) if dropped is None else list(dropped)
    energies = slice_energies(cores)
    total = torch.zeros((), dtype=energies[0].dtype, device=cores[0].device)
    for core, energy, log_variance in zip(cores, energies, log_variances(log_lambdas), strict=True):
        per_slice = core.numel() // energy.numel()
        total = total - 0.5 * (
            (energy * torch.exp(-log_variance)).sum()
            + per_slice * log_variance.sum()
            + core.numel() * math.log(2 * math.pi)
        )
    for k in range(1, len(log_lambdas)):  # the cores between two bonds
        left, right = log_lambdas[k - 1], log_lambdas[k]
        per_slice = cores[k].numel() // (len(left) * len(right))
        if gone[k - 1] or gone[k]:
            total = total - 0.5 * per_slice * (gone[k - 1] * right.sum() + gone[k] * left.sum())
    for u in log_lambdas:
        total = total + ((a - 1) * u - b * u.exp()).sum() + u.numel() * (a * math.log(b) - math.lgamma(a))
    return total


def conditional(
    energies: Sequence[Tensor],
    sizes: Sequence[int],
    log_lambdas: Sequence[Tensor],
    bond: int,
    a: float,
    dropped: Sequence[int] | None = None,
) -> tuple[float, Tensor, Tensor]:
    """The terms of one bond's ``-log p(u | cores, other bonds)`` as ``(linear, inverse, inverse_square)``.

    Per entry it is ``linear * u + inverse * exp(-u) + inverse_square * exp(-2u) + b * exp(u)``, up to a constant:
    convex in u, with positive coefficients. `sizes` are the numbers of entries in one slice of each core; `dropped` is
    as in `log_prob`.

    The gradient printed in the paper is the derivative with respect to a slice's *variance*: the chain-rule factor of
    the neighbouring lambda is missing and the square at the first and last core is not treated. It does not agree with
    finite differences; this one does.
    """
    gone = [0] * len(log_lambdas) if dropped is None else list(dropped)
    left, right = energies[bond - 1], energies[bond]
    inverse = torch.zeros_like(log_lambdas[bond - 1])
    inverse_square = torch.zeros_like(inverse)
    linear = -(a - 1.0)
    if bond == 1:
        inverse_square = inverse_square + 0.5 * left[0]
        linear += sizes[bond - 1]
    else:
        neighbour = log_lambdas[bond - 2]
        inverse = inverse + 0.5 * torch.exp(-neighbour) @ left
        linear += 0.5 * sizes[bond - 1] * (len(neighbour) + gone[bond - 2])
    if bond == len(log_lambdas):
        inverse_square = inverse_square + 0.5 * right[:, 0]
        linear += sizes[bond]
    else:
        neighbour = log_lambdas[bond]
        inverse = inverse + 0.5 * right @ torch.exp(-neighbour)
        linear += 0.5 * sizes[bond] * (len(neighbour) + gone[bond])
    return linear, inverse, inverse_square


def newton_step(u: Tensor, linear: float | Tensor, inverse: Tensor, inverse_square: Tensor, b: float) -> Tensor:
    """One clipped Newton step towards the minimum of the convex conditional of `conditional`."""
    falling, steep, rising = inverse * torch.exp(-u), inverse_square * torch.exp(-2 * u), b * torch.exp(u)
    slope = linear - falling - 2 * steep + rising
    curvature = falling + 4 * steep + rising
    return u - (slope / curvature).clamp(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)


def gradient_step(
    u: Tensor, linear: float | Tensor, inverse: Tensor, inverse_square: Tensor, b: float, rate: float
) -> Tensor:
    """One gradient step on the same conditional, with the slope measured per entry of the slices that it governs."""
    slope = linear - inverse * torch.exp(-u) - 2 * inverse_square * torch.exp(-2 * u) + b * torch.exp(u)
    entries = linear.clamp_min(1.0) if isinstance(linear, Tensor) else max(linear, 1.0)
    return u - (rate * slope / entries).clamp(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)


def apply_floor(u: Tensor, floor: float) -> Tensor:
    """Keep every entry at least `floor` times the bond's largest lambda, and all within what single precision can hold.

    Between cores that are exactly zero nothing stops the largest lambda itself from falling; `LIMIT` does. Bonds may be
    stacked; the last axis is that of one bond's entries.
    """
    return torch.maximum(u, u.amax(-1, keepdim=True) + math.log(floor)).clamp(-LIMIT, LIMIT)


def conditional_mode(
    cores: Cores,
    log_lambdas: Sequence[Tensor],
    a: float,
    b: float,
    floor: float,
    sweeps: int,
    dropped: Sequence[int] | None = None,
) -> list[Tensor]:
    """``log lambda`` moved towards the joint mode given the cores by `sweeps` of Newton steps, bond after bond."""
    energies = slice_energies(cores)
    sizes = [core.numel() // energy.numel() for core, energy in zip(cores, energies, strict=True)]
    us = [u.to(energies[0].dtype) for u in log_lambdas]  # half precision has energies in single
    for _ in range(sweeps):
        for k in range(len(us)):
            moved = newton_step(us[k], *conditional(energies, sizes, us, k + 1, a, dropped), b)
            us[k] = apply_floor(moved, floor)
    return [u.to(own.dtype) for u, own in zip(us, log_lambdas, strict=True)]
