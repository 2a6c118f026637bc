"""SVGD as it is printed (Liu & Wang 2016, eq. 8): loops over pairs of particles, autograd for every gradient."""

import math
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bayestrain.infer.particles import flatten, unflatten

MakeKernel = Callable[[list[Tensor]], Callable[[Tensor], Tensor]]
"""Makes a kernel, a function of a squared distance, from all points."""


def median_rule(points: list[Tensor]) -> float:
    """``median(|x - y|^2) / log n`` over the pairs of different points; of an even number of pairs the lower median."""
    n = len(points)
    pairs = [float((points[i] - points[j]).square().sum()) for i in range(n) for j in range(i)]
    return statistics.median_low(pairs) / math.log(n)


def rbf_of(points: list[Tensor]) -> Callable[[Tensor], Tensor]:
    h = median_rule(points)
    return lambda d2: torch.exp(-d2 / h)


def imq_of(points: list[Tensor]) -> Callable[[Tensor], Tensor]:
    h = median_rule(points)
    return lambda d2: 1 / torch.sqrt(1 + d2 / h)


def scores(particles: Mapping[str, Tensor], log_density: Callable[..., Tensor], batch: object) -> list[Tensor]:
    """The gradient of every particle's log density, one particle after the other."""
    found = []
    for i in range(len(flatten(particles))):
        one = {name: tensor[i : i + 1].detach().clone().requires_grad_() for name, tensor in particles.items()}
        gradients = torch.autograd.grad(log_density(one, batch)[0], list(one.values()))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return found


def direction(
    particles: Mapping[str, Tensor], log_density: Callable[..., Tensor], batch: object, make: MakeKernel = rbf_of
) -> dict[str, Tensor]:
    """The direction of one SVGD step, in the particles' shapes."""
    points, gradients = list(flatten(particles)), scores(particles, log_density, batch)
    kernel, directions = make(points), []
    for y in points:
        total = torch.zeros_like(y)
        for point, gradient in zip(points, gradients, strict=True):
            x = point.clone().requires_grad_()
            value = kernel((x - y).square().sum())
            (repulsion,) = torch.autograd.grad(value, x)
            total += value.detach() * gradient + repulsion
        directions.append(total / len(points))
    return unflatten(torch.stack(directions), particles)
