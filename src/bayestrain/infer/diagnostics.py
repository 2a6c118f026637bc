"""Diagnostics of a set of particles: are they different?"""

from dataclasses import dataclass

import torch

from bayestrain.errors import ConfigError
from bayestrain.infer.kernels import median_bandwidth, rbf, squared_distances_
from bayestrain.infer.particles import Particles, count, flatten

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
    if (n := count(particles)) < 2:
        raise ConfigError(f"Particles are compared with each other, so there must be at least 2, got {n}.")
    theta = flatten(particles)
    theta = theta[theta.isfinite().all(1)]
    n, alive = len(theta), theta.new_ones(len(theta), dtype=torch.bool)
    length2 = theta.square().sum(1).mean().clamp_min(1e-30)
    d2 = squared_distances_(theta, alive)
    pairs = d2[alive.expand(n, n).triu(1)]
    return Diagnostics(
        bandwidth=float(median_bandwidth(d2)),
        kernel_mass=float((rbf(d2)[0].sum() - n) / max(n * (n - 1), 1)),
        spread=float((pairs.nanmedian() / length2).sqrt()),
        effective_particles=n**2 / max(float(torch.exp(-d2 / (DISTINCT**2 * length2)).sum()), 1.0),
    )
