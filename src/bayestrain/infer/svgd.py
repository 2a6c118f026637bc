"""Stein variational gradient descent (Liu & Wang 2016): particles that move until they lie like draws from a density.

Each particle climbs the log density, driven by the gradients of the particles near it, and is repelled by them, which
keeps all of them from ending on one peak (eq. 8)::

    phi(theta_k) = 1/n sum_i [ K(theta_i, theta_k) grad log p(theta_i)  +  grad_{theta_i} K(theta_i, theta_k) ]
                                              drive                                   repulsion

With the particles as rows of Theta and their gradients as rows of G, both ``(n, D)``, and a kernel of the squared
distance with slope K', ``grad_{theta_i} K = 2 K'_ik (theta_i - theta_k)``, so both sums are matrix products::

    phi = ( K @ G  +  2 (K' @ Theta - rowsum(K') * Theta) ) / n

No tensor of size ``n x n x D`` is made.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.infer.kernels import Kernel, rbf, squared_distances
from bayestrain.infer.method import LogDensity, MakeOptimizer, Method
from bayestrain.infer.particles import Particles, centred, columns, matrices


class SVGD(Method):
    """Stein variational gradient descent; arguments as for `Method`, and two more.

    Adam is a good optimiser for it, because the size of phi changes a lot during training.

    Args:
        kernel: a function of squared distances, see `infer.kernels`.
        times_n: multiply phi by the number of particles. A particle far from all others then moves along its own
            gradient, so that learning rates do not depend on n.
    """

    name: ClassVar[str] = "svgd"
    fewest: ClassVar[int] = 2
    advice: ClassVar[str] = "A single particle has nothing to be repelled by: use MAP for a single point."

    def __init__(
        self,
        log_density: LogDensity,
        particles: Particles,
        optimizer: MakeOptimizer,
        *,
        kernel: Kernel = rbf,
        times_n: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(log_density, particles, optimizer, **options)
        self.kernel, self.times_n = kernel, times_n

    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        K, slope = self.kernel(squared_distances(self.particles, alive))  # (n, n) each
        for theta, g in zip(matrices(self.particles), gradients, strict=True):
            stein_direction_(theta, g, K.to(g.dtype), slope.to(g.dtype), alive)
            if self.times_n:
                g.mul_(alive.sum())


@torch.no_grad()
def stein_direction_(particles: Tensor, gradients: Tensor, K: Tensor, slope: Tensor, alive: Tensor) -> None:
    """Replace the gradients by phi, both ``(n, D)``; particles that are not `alive` have no influence."""
    for theta, g in zip(columns(particles), columns(gradients), strict=True):
        theta = centred(theta, alive)  # the repulsion depends on differences only; centring keeps small ones exact
        drive = K @ g  # (n, n) @ (n, columns)
        repulsion = 2 * (slope @ theta - slope.sum(1, keepdim=True) * theta)
        g.copy_((drive + repulsion) / alive.sum().clamp_min(1))
