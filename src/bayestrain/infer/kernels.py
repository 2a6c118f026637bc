"""Kernels between particles as functions of squared distances; every matrix here is ``(n, n)``.

A kernel is any callable that maps the squared distances ``d2`` to ``(K, dK/d(d2))``. That is all SVGD needs, because
the gradient of a radial kernel is ``grad_x K(x, y) = 2 * dK/d(d2) * (x - y)``. A particle that must not count has
infinite distances, where a kernel and its slope are zero.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor], tuple[Tensor, Tensor]]


def squared_distances_(rows: Tensor, alive: Tensor) -> Tensor:
    """Squared distances of all pairs of rows ``(n, D)``, which are centred in place; infinite for rows not `alive`.

    Without their mean, small differences of particles far from the origin are not rounded away. Dead rows become zero.
    """
    rows.masked_fill_(~alive[:, None], 0.0)
    rows.sub_(rows.sum(0) / alive.sum().clamp_min(1)).masked_fill_(~alive[:, None], 0.0)
    gram = rows @ rows.mT
    lengths = gram.diagonal()[:, None] + gram.diagonal()
    distances = lengths - 2 * gram
    rounding = 8 * torch.finfo(distances.dtype).eps * lengths  # two copies of one point differ by no more than this
    distances = torch.where(distances < rounding, 0.0, distances).fill_diagonal_(0.0)
    return torch.where(alive[:, None] & alive, distances, math.inf)


def median_bandwidth(d2: Tensor) -> Tensor:
    """``median(d2) / log n`` over pairs of different particles (Liu & Wang 2016, section 3.2).

    Self-distances, zero by definition, would pull the median of a few particles down. Where most pairs coincide, the
    median is taken over the pairs that do not.
    """
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
