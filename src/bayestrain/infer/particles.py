"""Particles: a dict of stacked tensors, each with the particles along its first dimension."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

Particles = Mapping[str, Tensor]
"""``{name: (n, ...)}``; particle i is ``{name: tensor[i]}``."""


def stack(points: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack single points, which must agree in names, shapes and dtypes, into particles."""
    first, *others = [{name: (tuple(t.shape), t.dtype) for name, t in point.items()} for point in points]
    for i, other in enumerate(others, 1):
        if differing := sorted(first.items() ^ other.items(), key=str):
            name, _ = differing[0]
            raise ShapeError(
                f"All particles must have the same tensors, but {name!r} is {other.get(name)} in particle {i} and "
                f"{first.get(name)} in particle 0. Build all networks with the same code and the same ranks."
            )
    return {name: torch.stack([point[name].detach() for point in points]) for name in first}


def count(particles: Particles) -> int:
    """Return the number of particles, which must be the same in every tensor."""
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in particles.items()}
    if len(distinct := set(sizes.values())) != 1:
        raise ShapeError(f"Every tensor must hold the same number of particles in its first dimension, got {sizes}.")
    return distinct.pop()


def flatten(particles: Particles) -> Tensor:
    """Return the particles as rows of one new matrix ``(n, D)``, in at least single precision."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in particles.values()), torch.float32)
    return torch.cat([tensor.detach().reshape(len(tensor), -1).to(dtype) for tensor in particles.values()], dim=1)


def unflatten(rows: Tensor, like: Particles) -> dict[str, Tensor]:
    """Return the columns of ``(n, D)`` in the names, shapes and dtypes of `like`."""
    parts = rows.split([tensor[0].numel() for tensor in like.values()], dim=1)
    named = zip(like.items(), parts, strict=True)
    return {name: part.reshape(tensor.shape).to(tensor.dtype) for (name, tensor), part in named}
