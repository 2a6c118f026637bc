"""Are these particles many, or one in many copies? And how far are they from the density?"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.kernels import median_bandwidth, rbf, squared_distances
from bayestrain.infer.particles import Particles, centred, columns, count, groups, matrices, matrix

DISTINCT = 0.1
"""Particles count as different when they lie apart by this part of their length."""


@dataclass(frozen=True)
class Diagnostics:
    """How the particles lie.

    bandwidth: the median rule's, in squared distance. kernel_mass: mean kernel value of different particles; near 0
    nobody feels anybody (SVGD is then an ensemble), near 1 all are one. spread: typical distance of two particles
    relative to their length. effective_particles: how many are really different, between 1 and n: the number that
    ``sum_ij exp(-d2 / (0.1 length)^2)`` leaves, which, unlike the kernel, does not adapt to how close they are.
    """

    bandwidth: float
    kernel_mass: float
    spread: float
    effective_particles: float


@torch.no_grad()
def diagnose(particles: Particles) -> Diagnostics:
    """How the particles lie; needs at least two."""
    n = count(particles)
    if n < 2:
        raise ConfigError(f"Diagnostics compare particles: at least 2 are needed, got {n}.")
    alive = torch.stack([whole.isfinite().all(1) for whole in matrices(particles)]).all(0)
    d2 = squared_distances(particles, alive)
    length2 = sum(torch.where(alive, whole.square().sum(1), 0.0) for whole in matrices(particles))
    mean_length2 = torch.as_tensor(length2).sum() / alive.sum()
    kernel = rbf(d2)[0]
    living = int(alive.sum())
    pairs = max(living * (living - 1), 1)
    # A particle that is broken has a distance of infinity to itself too and counts for nothing.
    alike = torch.exp(-d2 / (DISTINCT**2 * mean_length2).clamp_min(1e-30))
    median = torch.where(d2.isfinite(), d2, math.nan)[~torch.eye(n, dtype=torch.bool, device=d2.device)].nanmedian()
    return Diagnostics(
        bandwidth=float(median_bandwidth(d2)),
        kernel_mass=float((kernel.sum() - kernel.diagonal().sum()) / pairs),
        spread=float((median / mean_length2.clamp_min(1e-30)).sqrt()),
        effective_particles=living**2 / float(alike.sum()) if living else 0.0,
    )


@torch.no_grad()
def stein_discrepancy(particles: Particles, gradients: dict[str, Tensor]) -> float:
    """Squared kernelised Stein discrepancy, an unbiased estimate (Liu, Lee & Jordan 2016, eq. 14), RBF kernel.

    Zero in expectation for draws from the density whose log gradients these are; it may come out negative. With
    minibatch gradients it measures their noise too, so give gradients over many data.
    """
    n = count(particles)
    if n < 2:
        raise ConfigError(f"The Stein discrepancy compares particles: at least 2 are needed, got {n}.")
    alive = torch.ones(n, dtype=torch.bool, device=next(iter(particles.values())).device)
    d2 = squared_distances(particles, alive)
    h = median_bandwidth(d2)
    kernel = torch.exp(-d2 / h)
    scores, crossed, dimensions = torch.zeros_like(d2), torch.zeros_like(d2), 0
    for names in groups(particles):
        whole, gradient = (matrix([tensors[name].detach() for name in names]) for tensors in (particles, gradients))
        for theta, score in zip(columns(whole), columns(gradient), strict=True):
            theta = centred(theta, alive)
            scores += score @ score.mT
            crossed += score @ theta.mT  # s_i . theta_j
        dimensions += whole.shape[1]
    # s_i . (theta_i - theta_j) - s_j . (theta_i - theta_j)
    along = crossed.diagonal()[:, None] - crossed + crossed.diagonal() - crossed.mT
    terms = kernel * (scores + 2 / h * along + 2 * dimensions / h - 4 * d2 / h**2)
    return float((terms.sum() - terms.diagonal().sum()) / (n * (n - 1)))
