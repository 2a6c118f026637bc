"""Particles: a dict of stacked tensors, every one with the particles along its first dimension."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

Particles = Mapping[str, Tensor]
"""``{name: (n, ..)}``; the entries of one particle are ``{name: tensor[i]}``."""

BLOCK = 1 << 16
"""Columns handled at once: where particles must be copied for a while, no more of them are."""


def stack(points: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Particles from single points, which must agree in names, shapes and dtypes."""
    if not points:
        raise ShapeError("There is no particle to stack. Give at least one.")
    first = points[0]
    for i, point in enumerate(points):
        if point.keys() != first.keys():
            differing = sorted(set(point) ^ set(first))
            raise ShapeError(f"Particle {i} and particle 0 do not have the same tensors: {differing} is in only one.")
        for name, tensor in point.items():
            if tensor.shape != first[name].shape or tensor.dtype != first[name].dtype:
                raise ShapeError(
                    f"Particle {i} has {name!r} of shape {tuple(tensor.shape)} and {tensor.dtype}, particle 0 has "
                    f"{tuple(first[name].shape)} and {first[name].dtype}. Particles must be alike: build all from the "
                    "same code, with the same ranks."
                )
    return {name: torch.stack([point[name].detach() for point in points]) for name in first}


def count(particles: Particles) -> int:
    """The number of particles, the same in every tensor."""
    if not particles:
        raise ShapeError("There is no tensor in these particles.")
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in particles.items()}
    if len(set(sizes.values())) > 1:
        raise ShapeError(f"Every tensor must hold the same number of particles in its first dimension, got {sizes}.")
    return next(iter(sizes.values()))


def groups(particles: Particles) -> list[list[str]]:
    """The names in groups that are handled as one matrix: a large tensor is alone, small ones of one dtype together.

    A deep network has hundreds of small tensors, and on a GPU each operation takes the same time for one as for many.
    """
    found: list[list[str]] = []
    unfilled: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, tensor in particles.items():
        width = tensor.numel() // tensor.shape[0]
        if width > BLOCK:
            found.append([name])
            continue
        group, filled = unfilled.get(tensor.dtype, ([], BLOCK + 1))
        if filled + width > BLOCK:
            group, filled = [], 0
            found.append(group)
        group.append(name)
        unfilled[tensor.dtype] = group, filled + width
    return found


def matrix(tensors: Sequence[Tensor]) -> Tensor:
    """``(n, columns)``: one tensor ``(n, ..)``, or several side by side, which is a copy."""
    flat = [tensor.reshape(tensor.shape[0], tensor.numel() // tensor.shape[0]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)


def parts(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of given shapes, that such a matrix is made of; contiguous."""
    widths = [tensor.numel() // tensor.shape[0] for tensor in like]
    split = whole.split(widths, dim=1)
    return [part.contiguous().view(tensor.shape) for part, tensor in zip(split, like, strict=True)]


def matrices(particles: Particles) -> Iterator[Tensor]:
    """All groups, one after the other."""
    for names in groups(particles):
        yield matrix([particles[name].detach() for name in names])


def columns(whole: Tensor) -> Iterator[Tensor]:
    """Views ``(n, at most BLOCK)`` that together are the whole matrix ``(n, columns)``."""
    for start in range(0, whole.shape[1], BLOCK):
        yield whole[:, start : start + BLOCK]


def centred(block: Tensor, alive: Tensor) -> Tensor:
    """A block of columns minus the mean of its living rows; the other rows become zero."""
    dead = ~alive[:, None]
    living = block.masked_fill(dead, 0.0)
    return living.sub_(living.sum(0) / alive.sum()).masked_fill_(dead, 0.0)
