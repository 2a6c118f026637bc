"""SVGD as it is printed (Liu & Wang 2016, eq. 8): loops over pairs of particles, autograd for every gradient."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

PointKernel = Callable[[Tensor, Tensor], Tensor]
"""Two points, each a flat vector, to one number."""

LogDensity = Callable[[dict[str, Tensor], object], Tensor]


def flatten(particles: Mapping[str, Tensor]) -> list[Tensor]:
    """Every particle as one vector."""
    n = len(next(iter(particles.values())))
    return [torch.cat([tensor[i].detach().flatten() for tensor in particles.values()]) for i in range(n)]


def unflatten(points: list[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    sizes = [tensor[0].numel() for tensor in like.values()]
    split = [point.split(sizes) for point in points]
    return {
        name: torch.stack([parts[k] for parts in split]).view(tensor.shape)
        for k, (name, tensor) in enumerate(like.items())
    }


def median_rule(points: list[Tensor]) -> float:
    """``median(|x - y|^2) / log n`` over the pairs of different points; of an even number of pairs the lower median."""
    n = len(points)
    pairs = [float((points[i] - points[j]).square().sum()) for i in range(n) for j in range(i)]
    return statistics.median_low(pairs) / math.log(n)


def rbf_of(points: list[Tensor]) -> PointKernel:
    """The RBF kernel, its bandwidth by the median rule for these points."""
    h = median_rule(points)
    return lambda x, y: torch.exp(-(x - y).square().sum() / h)


def imq_of(points: list[Tensor]) -> PointKernel:
    """The inverse multiquadric kernel, its bandwidth by the median rule for these points."""
    h = median_rule(points)
    return lambda x, y: 1 / torch.sqrt(1 + (x - y).square().sum() / h)


def scores(particles: Mapping[str, Tensor], log_density: LogDensity, batch: object) -> list[Tensor]:
    """The gradient of every particle's log density, one particle after the other."""
    found = []
    for i in range(len(flatten(particles))):
        one = {name: tensor[i : i + 1].detach().clone().requires_grad_() for name, tensor in particles.items()}
        gradients = torch.autograd.grad(log_density(one, batch)[0], list(one.values()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return found


def phi(points: list[Tensor], gradients: list[Tensor], kernel: PointKernel) -> list[Tensor]:
    """The direction of every particle."""
    directions = []
    for y in points:
        total = torch.zeros_like(y)
        for point, gradient in zip(points, gradients, strict=True):
            x = point.clone().requires_grad_()
            value = kernel(x, y)
            (repulsion,) = torch.autograd.grad(value, x)
            total += value.detach() * gradient + repulsion
        directions.append(total / len(points))
    return directions


def direction(
    particles: Mapping[str, Tensor],
    log_density: LogDensity,
    batch: object,
    make_kernel: Callable[[list[Tensor]], PointKernel] = rbf_of,
) -> dict[str, Tensor]:
    """The direction of one SVGD step, in the particles' shapes."""
    points = flatten(particles)
    return unflatten(phi(points, scores(particles, log_density, batch), make_kernel(points)), particles)
