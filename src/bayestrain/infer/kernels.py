"""Kernels between particles, as functions of their squared distances: everything here is ``n x n``.

A kernel is any callable that maps the squared distances ``d2`` to ``(K, dK/d(d2))``. That is all SVGD needs, since the
gradient of a radial kernel is ``grad_x K(x, y) = 2 * dK/d(d2) * (x - y)``. A particle that does not count has infinite
distances, where kernel and slope are zero.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayestrain.infer.particles import Particles, centred, columns, matrices

Kernel = Callable[[Tensor], tuple[Tensor, Tensor]]

TINY = 1e-30


@torch.no_grad()
def squared_distances(particles: Particles, alive: Tensor) -> Tensor:
    """All pairs, ``(n, n)``, by way of inner products of the centred particles; infinite for those not `alive`.

    Centring first keeps the small differences of particles that lie close together.
    """
    gram = sum((block := centred(part, alive)) @ block.mT for whole in matrices(particles) for part in columns(whole))
    assert isinstance(gram, Tensor)
    norms = gram.diagonal()
    lengths = norms[:, None] + norms
    distances = lengths - 2 * gram
    rounding = 8 * torch.finfo(distances.dtype).eps * lengths  # all that is left between two copies
    distances = torch.where(distances < rounding, 0.0, distances).fill_diagonal_(0.0)
    return torch.where(alive[:, None] & alive, distances, math.inf)


def median_bandwidth(d2: Tensor) -> Tensor:
    """``median(d2) / log n`` over pairs of different particles: each feels about as much of all others as of itself.

    Self-distances are left out: they are zero by definition, and with few particles would drag the median down.
    Particles at infinite distances do not count. Where most are copies of one, the median is over those that are not.
    """
    n = d2.shape[0]
    row, column = torch.triu_indices(n, n, offset=1, device=d2.device)
    pairs = torch.where(d2.isfinite(), d2, math.nan)[row, column]
    median, apart = pairs.nanmedian(), torch.where(pairs > 0, pairs, math.nan).nanmedian()
    median = torch.where(median > 0, median, apart).nan_to_num(1.0)  # nobody is apart from anybody: any will do
    living = d2.diagonal().isfinite().sum().clamp_min(2)
    return (median / living.to(d2.dtype).log()).clamp_min(TINY)


def rbf(d2: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """``exp(-d2 / h)``, with h by the median rule unless it is given."""
    h = median_bandwidth(d2) if bandwidth is None else bandwidth
    kernel = torch.exp(-d2 / h)
    return kernel, -kernel / h


def imq(d2: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    """Inverse multiquadric ``(1 + d2 / h)^(-1/2)``: its tails are heavier, so distant particles feel each other."""
    h = median_bandwidth(d2) if bandwidth is None else bandwidth
    kernel = (1 + d2 / h).rsqrt()
    return kernel, -0.5 * kernel**3 / h
