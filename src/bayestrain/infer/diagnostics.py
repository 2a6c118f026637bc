"""Diagnostics of a set of particles: are they different, and how far are they from the density?"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.kernels import median_bandwidth, rbf, squared_distances
from bayestrain.infer.particles import Particles, centred, columns, count, groups, matrices, matrix

DISTINCT = 0.1
"""Particles count as different when their distance is at least this fraction of their length."""


@dataclass(frozen=True)
class Diagnostics:
    """How the particles lie relative to each other.

    Attributes:
        bandwidth: of the median rule, in squared distance.
        kernel_mass: mean kernel value of two different particles. Near 0 no particle influences another (SVGD is then
            an ensemble), near 1 all coincide.
        spread: median distance of two particles, relative to their length.
        effective_particles: how many are really different, between 1 and n:
            ``n^2 / sum_ij exp(-d2_ij / (0.1 length)^2)``. Unlike the kernel it does not adapt to how close they are.
    """

    bandwidth: float
    kernel_mass: float
    spread: float
    effective_particles: float


@torch.no_grad()
def diagnose(particles: Particles) -> Diagnostics:
    """Compute the diagnostics of at least two particles; those that are not finite are left out."""
    n = count(particles)
    if n < 2:
        raise ConfigError(f"Diagnostics compare particles and need at least 2, got {n}.")
    alive = torch.stack([whole.isfinite().all(1) for whole in matrices(particles)]).all(0)
    d2 = squared_distances(particles, alive)
    length2 = torch.stack([torch.where(alive, whole.square().sum(1), 0.0).sum() for whole in matrices(particles)]).sum()
    mean_length2 = length2 / alive.sum()
    kernel = rbf(d2)[0]
    living = int(alive.sum())
    # The distance of a broken particle is infinite even to itself, so it adds nothing to this sum.
    alike = torch.exp(-d2 / (DISTINCT**2 * mean_length2).clamp_min(1e-30))
    median = torch.where(d2.isfinite(), d2, math.nan)[~torch.eye(n, dtype=torch.bool, device=d2.device)].nanmedian()
    return Diagnostics(
        bandwidth=float(median_bandwidth(d2)),
        kernel_mass=float((kernel.sum() - kernel.diagonal().sum()) / max(living * (living - 1), 1)),
        spread=float((median / mean_length2.clamp_min(1e-30)).sqrt()),
        effective_particles=living**2 / float(alike.sum()) if living else 0.0,
    )


@torch.no_grad()
def stein_discrepancy(particles: Particles, gradients: dict[str, Tensor]) -> float:
    """Squared kernelised Stein discrepancy with an RBF kernel, unbiased (Liu, Lee & Jordan 2016, eq. 14).

    Its expectation is zero for draws from the density whose log gradients are given, so an estimate may be negative.
    Noise of minibatch gradients adds to it: average them over many data.
    """
    n = count(particles)
    if n < 2:
        raise ConfigError(f"The Stein discrepancy compares particles and needs at least 2, got {n}.")
    alive = torch.ones(n, dtype=torch.bool, device=next(iter(particles.values())).device)
    d2 = squared_distances(particles, alive)
    h = median_bandwidth(d2)
    kernel = torch.exp(-d2 / h)
    scores, crossed, dimensions = torch.zeros_like(d2), torch.zeros_like(d2), 0
    for names in groups(particles):
        whole, gradient = (matrix([tensors[name].detach() for name in names]) for tensors in (particles, gradients))
        for theta, score in zip(columns(whole), columns(gradient), strict=True):
            scores += score @ score.mT
            crossed += score @ centred(theta, alive).mT  # s_i . theta_j
        dimensions += whole.shape[1]
    # s_i . (theta_i - theta_j) - s_j . (theta_i - theta_j)
    along = crossed.diagonal()[:, None] - crossed + crossed.diagonal() - crossed.mT
    terms = kernel * (scores + 2 / h * along + 2 * dimensions / h - 4 * d2 / h**2)
    return float((terms.sum() - terms.diagonal().sum()) / (n * (n - 1)))
