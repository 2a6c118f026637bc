"""`Spread`: n particles over the processes of a group, and the exchange of rows for columns that SVGD needs.

One process has all particles and exchanges nothing. In a group of processes, each holds the rows of its own particles,
``(own, D)``. For sums over particles it gets its share of the columns of all, so that none ever holds ``(n, D)``::

    rows --all_to_all--> columns    partial Gram matrix of the columns --all_reduce--> (n, n)
    rows <--all_to_all-- columns    the two matrix products need no other columns
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Spread:
    """Particles of which each process of `group`, if there is one, holds `own`, in the order of the processes."""

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
        """Particles of all processes."""
        return sum(self.counts)

    def widths(self, columns: int) -> list[int]:
        """How many of the columns each process gets."""
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
