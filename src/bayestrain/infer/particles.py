"""Particles: a dict of stacked tensors, each with the particles along its first dimension."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

Particles = Mapping[str, Tensor]
"""``{name: (n, ...)}``; particle i is ``{name: tensor[i]}``."""

BLOCK = 1 << 16
"""Columns processed at once, which bounds the size of temporary copies."""


def stack(points: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack single points, which must agree in names, shapes and dtypes, into particles."""
    for i, point in enumerate(points):
        if point.keys() != points[0].keys():
            differing = sorted(set(point) ^ set(points[0]))
            raise ShapeError(f"Particles {i} and 0 must have the same tensors, but only one of them has {differing}.")
        for name, tensor in point.items():
            first = points[0][name]
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise ShapeError(
                    f"All particles must have the same shapes, but {name!r} is {tuple(tensor.shape)} {tensor.dtype} in "
                    f"particle {i} and {tuple(first.shape)} {first.dtype} in particle 0. Build all networks with the "
                    "same code and the same ranks."
                )
    return {name: torch.stack([point[name].detach() for point in points]) for name in points[0]}


def count(particles: Particles) -> int:
    """Return the number of particles, which must be the same in every tensor."""
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in particles.items()}
    if len(set(sizes.values())) != 1:
        raise ShapeError(f"Every tensor must hold the same number of particles in its first dimension, got {sizes}.")
    return next(iter(sizes.values()))


def groups(particles: Particles) -> list[list[str]]:
    """Group the names so that each group is processed as one matrix.

    A large tensor is a group of its own; small tensors of one dtype share a group. A deep network has hundreds of small
    tensors, and on a GPU an operation on one of them takes as long as one on all of them.
    """
    found: list[list[str]] = []
    open_groups: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, tensor in particles.items():
        width = tensor.numel() // tensor.shape[0]
        group, filled = open_groups.get(tensor.dtype, ([], BLOCK))
        if width > BLOCK:
            found.append([name])
            continue
        if not group or filled + width > BLOCK:
            group, filled = [], 0
            found.append(group)
        group.append(name)
        open_groups[tensor.dtype] = group, filled + width
    return found


def matrix(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten one tensor ``(n, ...)``, or concatenate several, to ``(n, columns)``."""
    flat = [tensor.reshape(tensor.shape[0], tensor.numel() // tensor.shape[0]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def matrices(particles: Particles) -> Iterator[Tensor]:
    """Yield the matrix of every group."""
    for names in groups(particles):
        yield matrix([particles[name].detach() for name in names])


def columns(whole: Tensor) -> Iterator[Tensor]:
    """Yield views of at most `BLOCK` columns that together cover ``(n, columns)``."""
    for start in range(0, whole.shape[1], BLOCK):
        yield whole[:, start : start + BLOCK]


def centred(block: Tensor, alive: Tensor) -> Tensor:
    """Subtract the mean of the rows that are alive; all other rows become zero."""
    dead = ~alive[:, None]
    living = block.masked_fill(dead, 0.0)
    return living.sub_(living.sum(0) / alive.sum()).masked_fill_(dead, 0.0)
