"""Kernels between particles as functions of squared distances, and what those tell; every matrix is ``(n, n)``.

A kernel is any callable that maps the squared distances ``d2`` to ``(K, dK/d(d2))``, because the gradient of a radial
kernel is ``grad_x K(x, y) = 2 * dK/d(d2) * (x - y)``. At infinite distances, those of broken particles, both are zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.particles import Particles, Spread, count, flatten

Kernel = Callable[[Tensor], tuple[Tensor, Tensor]]


def squared_distances_(rows: Tensor, alive: Tensor, total: Callable[[Tensor], Tensor] = lambda own: own) -> Tensor:
    """Squared distances of all pairs of rows ``(n, D)``; infinite for rows not `alive`, which become zero.

    Rows are centred in place, so that small differences far from the origin are not rounded away. If other processes
    have more columns, `total` adds up what is computed of them.
    """
    rows.masked_fill_(~alive[:, None], 0.0)
    rows.sub_(rows.sum(0) / alive.sum().clamp_min(1)).masked_fill_(~alive[:, None], 0.0)
    gram = total(rows @ rows.mT)
    lengths = gram.diagonal()[:, None] + gram.diagonal()
    distances = lengths - 2 * gram
    rounding = 8 * torch.finfo(distances.dtype).eps * lengths  # two copies of one point differ by no more than this
    distances = torch.where(distances < rounding, 0.0, distances).fill_diagonal_(0.0)
    return torch.where(alive[:, None] & alive, distances, math.inf)


def median_bandwidth(d2: Tensor) -> Tensor:
    """``median(d2) / log n`` over pairs of different particles (Liu & Wang 2016); if most coincide, over the rest."""
    pairs = torch.where(d2.isfinite(), d2, math.nan)
    living = pairs.diagonal().isfinite().sum().clamp_min(2)
    median, apart = pairs.fill_diagonal_(math.nan).nanmedian(), torch.where(pairs > 0, pairs, math.nan).nanmedian()
    median = torch.where(median > 0, median, apart).nan_to_num(1.0)  # if all coincide, any bandwidth will do
    return (median / living.to(d2.dtype).log()).clamp_min(1e-30)


def rbf(d2: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """``exp(-d2 / h)``; h comes from the median rule unless given."""
    h = median_bandwidth(d2) if bandwidth is None else bandwidth
    kernel = torch.exp(-d2 / h)
    return kernel, -kernel / h


def imq(d2: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """Inverse multiquadric ``(1 + d2 / h)^(-1/2)``: its heavy tails let distant particles interact."""
    h = median_bandwidth(d2) if bandwidth is None else bandwidth
    kernel = (1 + d2 / h).rsqrt()
    return kernel, -0.5 * kernel**3 / h


DISTINCT = 0.1  # of their length: particles at that distance count as different


@dataclass(frozen=True)
class Diagnostics:
    """How the particles lie relative to each other."""

    kernel_mass: float
    """Mean kernel value of two different particles: near 0 SVGD is an ensemble, near 1 all coincide."""
    spread: float
    """Median distance of two particles, relative to their length."""
    effective_particles: float
    """How many are really different, between 1 and n: ``n^2 / sum_ij exp(-d2_ij / (0.1 length)^2)``."""


@torch.no_grad()
def diagnose(particles: Particles, spread: Spread | None = None) -> Diagnostics:
    """Compute the diagnostics of at least two particles; those that are not finite are left out."""
    spread = spread or Spread(count(particles))
    if spread.total < 2:
        raise ConfigError(f"Particles are compared with each other, so there must be at least 2, got {spread.total}.")
    rows = flatten(particles)
    finite, square = spread.gather(rows.isfinite().all(1)), spread.gather(rows.square().sum(1))
    theta = spread.columns(rows)()[finite]
    n, alive = len(theta), theta.new_ones(len(theta), dtype=torch.bool)
    length2 = square[finite].mean().clamp_min(1e-30)
    d2 = squared_distances_(theta, alive, spread.sum)
    pairs = d2[alive.expand(n, n).triu(1)]
    return Diagnostics(
        kernel_mass=float((rbf(d2)[0].sum() - n) / max(n * (n - 1), 1)),
        spread=float((pairs.nanmedian() / length2).sqrt()),
        effective_particles=n**2 / max(float(torch.exp(-d2 / (DISTINCT**2 * length2)).sum()), 1.0),
    )
