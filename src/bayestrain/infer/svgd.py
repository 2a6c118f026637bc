"""Stein variational gradient descent: n particles that move until they lie like draws from a density.

Each particle climbs the log density, pulled along by the gradients of the particles near it, and is pushed away from
them so that all do not end on one peak (Liu & Wang 2016, eq. 8)::

    phi(theta_k) = 1/n sum_i [ K(theta_i, theta_k) grad log p(theta_i)  +  grad_{theta_i} K(theta_i, theta_k) ]
                                  the drive: up the hill                       the repulsion: apart

Write the particles as the rows of Theta and their gradients as the rows of G, both ``(n, D)``. For a kernel of the
squared distance, ``grad_{theta_i} K = 2 K'_ik (theta_i - theta_k)`` with K' its slope, so both sums are products of an
``n x n`` matrix with an ``n x D`` one::

    phi = ( K @ G  +  2 (K' @ Theta - rowsum(K') * Theta) ) / n

Nothing of size ``n x n x D`` exists, and the work beside the gradients themselves is small.
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

    The optimiser gets ``scale * phi``. Adam is a good choice: phi's size changes a lot on the way.

    Args:
        kernel: see `infer.kernels`.
        times_n: multiply phi by the number of particles. One that feels no other then moves along its own gradient,
            whatever that number is, and learning rates need not know it.
    """

    name: ClassVar[str] = "svgd"
    fewest: ClassVar[int] = 2
    advice: ClassVar[str] = "One particle has nobody to keep a distance from: use MAP for a single point."

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
    """Replace the gradients by phi, both ``(n, D)``. Particles not `alive` neither move nor matter."""
    for theta, g in zip(columns(particles), columns(gradients), strict=True):
        theta = centred(theta, alive)  # the repulsion knows differences only, and small ones are exact this way
        drive = K @ g  # (n, n) @ (n, columns)
        repulsion = 2 * (slope @ theta - slope.sum(1, keepdim=True) * theta)
        g.copy_((drive + repulsion) / alive.sum().clamp_min(1))
