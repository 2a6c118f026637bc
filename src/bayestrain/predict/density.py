"""The joint density of two classes' probabilities: how far the particles agree on one input, as a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError

MIN_WIDTH = 0.01
"""Narrowest kernel: particles that coincide still show as a spot."""

IMAGES = 2
"""How many times a kernel is mirrored at 0 and 1 on each side; what lies beyond is nothing even for the widest."""


@dataclass(frozen=True, eq=False)
class JointDensity:
    """``density[i, j]``: that of the pair of probabilities ``(axis[i], axis[j])`` of the two `classes`, in this order.

    `points` ``(n, 2)`` are the particles' own pairs.
    """

    classes: tuple[int, int]
    axis: Tensor
    density: Tensor
    points: Tensor

    def __repr__(self) -> str:
        size, particles = len(self.axis), len(self.points)
        return f"JointDensity(classes {self.classes[0]} and {self.classes[1]}, {size} x {size}, {particles} particles)"


def joint_density(points: Tensor, classes: tuple[int, int], grid: int) -> JointDensity:
    """Gaussian kernel density estimate of `points` ``(n, 2)`` on the unit square, which holds all of its mass.

    Each axis has its own width by Scott's rule, at least `MIN_WIDTH` and the distance of two grid points, so that the
    grid can show it. Kernels are mirrored at the edges, so nothing leaks out.
    """
    if grid < 2:
        raise ConfigError(f"A grid must have at least 2 points a side, got grid={grid}. Try grid=100.")
    points = points.double()
    axis = torch.linspace(0, 1, grid, dtype=points.dtype, device=points.device)
    n = len(points)
    spread = points.std(0) if n > 1 else torch.zeros_like(points[0])
    widths = (spread * n ** (-1 / 6)).clamp_min(max(MIN_WIDTH, 1 / (grid - 1)))
    across, along = (_mirrored_kernels(points[:, k], widths[k], axis) for k in (0, 1))
    return JointDensity(classes, axis, across.T @ along / n, points)  # (grid, n) (n, grid)


def _mirrored_kernels(centres: Tensor, width: Tensor, axis: Tensor) -> Tensor:
    """One Gaussian per centre, ``(n, grid)``, with all its mirror images at 0 and 1 that reach the unit interval."""
    total = torch.zeros(len(centres), len(axis), dtype=axis.dtype, device=axis.device)
    for period in range(-IMAGES, IMAGES + 1):
        for sign in (-1, 1):
            distance = axis[None, :] - (2 * period + sign * centres)[:, None]
            total += torch.exp(-0.5 * (distance / width).square())
    return total / (width * math.sqrt(2 * math.pi))
