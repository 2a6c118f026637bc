"""Stein variational gradient descent (Liu & Wang 2016): particles that move until they lie like draws from a density.

Each particle is driven by the gradients of the particles near it, and repelled by them, so that not all of them end on
one peak (eq. 8)::

    phi(theta_k) = 1/n sum_i [ K(theta_i, theta_k) grad log p(theta_i)  +  grad_{theta_i} K(theta_i, theta_k) ]
                                              drive                                   repulsion

With the particles as rows of Theta and their gradients as rows of G, both ``(n, D)``, and a kernel of the squared
distance with slope K', ``grad_{theta_i} K = 2 K'_ik (theta_i - theta_k)``, so both sums are matrix products::

    phi = ( K @ G  +  2 (K' @ Theta - rowsum(K') * Theta) ) / n

The direction is n times phi, so a particle far from all others moves along its own gradient.
"""

from typing import Any

from torch import Tensor

from bayestrain.infer.kernels import Kernel, rbf, squared_distances_
from bayestrain.infer.method import Method

BLOCK = 1 << 16  # columns computed at once, which bounds the size of temporary matrices


class SVGD(Method):
    """Stein variational gradient descent; arguments as for `Method`. Adam suits it: the size of phi changes a lot.

    Args:
        kernel: a function of squared distances, see `infer.kernels`.
    """

    name = "svgd"
    options = Method.options | {"kernel"}
    fewest = 2

    def __init__(self, *args: Any, kernel: Kernel = rbf, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kernel = kernel

    def direction(self, theta: Tensor, gradients: Tensor, alive: Tensor) -> Tensor:
        spread = self.spread  # each process does the columns that it gets, of all particles
        await_theta, await_gradients = spread.columns(theta), spread.columns(gradients)
        theta, alive = await_theta(), spread.gather(alive)
        K, slope = self.kernel(squared_distances_(theta, alive, spread.sum))  # (n, n) each; theta is centred
        columns = await_gradients()
        for t, g in zip(theta.split(BLOCK, dim=1), columns.split(BLOCK, dim=1), strict=True):
            g.copy_(K @ g + 2 * (slope @ t - slope.sum(1, keepdim=True) * t))
        return spread.rows(columns, gradients)
