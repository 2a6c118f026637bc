"""Particles: a dict of stacked tensors, each with the particles along its first dimension, and their `Spread`."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
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


class Spread:
    """Particles of which each process of `group`, if there is one, holds `own`, in the order of the processes.

    For sums over particles, as SVGD needs, a process exchanges the rows of its own particles ``(own, D)`` for a share
    of the columns of all of them, so that none ever holds ``(n, D)``::

        rows --all_to_all--> columns    partial Gram matrix of the columns --all_reduce--> (n, n)
        rows <--all_to_all-- columns    the two matrix products need no other columns
    """

    def __init__(self, own: int, group: Any = None, device: torch.device | None = None) -> None:
        self.group, self.place, self.counts = group, 0, [own]
        """`counts` are the particles of every process."""
        if group is not None:
            self.place = dist.get_rank(group)
            found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, torch.tensor([own], device=device), group=group)
            self.counts = [int(count) for count in found]
        first = sum(self.counts[: self.place])
        self.own = slice(first, first + own)
        """Which of all particles are here."""

    def __deepcopy__(self, _: Any) -> "Spread":
        return self  # of a method: the processes are the same

    @property
    def total(self) -> int:
        return sum(self.counts)

    def widths(self, columns: int) -> list[int]:
        n = len(self.counts)
        return [columns // n + (place < columns % n) for place in range(n)]

    def columns(self, rows: Tensor) -> Callable[[], Tensor]:
        """Send ``(own, D)``; the function that is returned waits for ``(n, D / processes)``."""
        if self.group is None:
            return lambda: rows
        widths, own = self.widths(rows.shape[1]), len(rows)
        sent = torch.cat([part.reshape(-1) for part in rows.split(widths, 1)])
        width = widths[self.place]
        received = rows.new_empty(self.total * width)
        shapes = [count * width for count in self.counts], [own * each for each in widths]
        work: Any = dist.all_to_all_single(received, sent, *shapes, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return received.view(-1, width) if width else received.view(self.total, 0)

        return wait

    def rows(self, columns: Tensor, like: Tensor) -> Tensor:
        """The inverse of `columns`, into a tensor like this one."""
        if self.group is None:
            return columns
        widths = self.widths(like.shape[1])
        received, own = like.new_empty(like.numel()), len(like)
        shapes = [own * each for each in widths], [count * widths[self.place] for count in self.counts]
        dist.all_to_all_single(received, columns.reshape(-1), *shapes, group=self.group)
        parts = received.split(shapes[0])
        return torch.cat([part.view(own, each) for part, each in zip(parts, widths, strict=True)], 1)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, the same bits on all of them; in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """What all particles have, from what the own ones have: ``(own, ..) -> (n, ..)``."""
        if self.group is None:
            return tensor
        padded = tensor.new_zeros(max(self.counts), *tensor.shape[1:])  # a gather takes equal shapes only
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in self.counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])
