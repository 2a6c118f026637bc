"""`Batches`: passes over a user's data of any kind, as (inputs, targets) on a device."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from bayestrain.errors import ConfigError
from bayestrain.train.distributed import World

KINDS = (
    "a DataLoader, a Dataset, a pair of tensors (x, y), bayestrain.data images, a list of (x, y) batches, or a "
    "function that returns an iterator of batches"
)

LOADER = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
          "generator", "prefetch_factor", "persistent_workers", "pin_memory_device")  # fmt: skip


class Padding(tuple[Any, Tensor]):
    """A batch of one datum that counts as none, for a process that has no part of a batch of the others."""


class Batches:
    """An iterable of passes, the same for every kind of data.

    `data` are one of `KINDS`, where images are any object with ``batches(batch_size, shuffle=, generator=, device=)``.
    Inputs may be a tensor or a dict, list or tuple of tensors. `batch_size` and `shuffle`, which draws a new order for
    each pass from torch's global generator, do not concern data that come in batches. Errors call the data `name`.
    `num_data` and `steps`, the data and batches of a pass, are 0 until `count`, if only a pass can determine them.

    In a `world` of several processes every one yields its part of the same batches. Of data with an attribute
    ``sharded = True`` (also of a DataLoader's dataset) or a `DistributedSampler` it yields its own batches, and
    `Padding` once it has none left, until the others are through.
    """

    def __init__(
        self, data: Any, batch_size: int, *, shuffle: bool, device: torch.device, name: str = "data",
        world: World | None = None,
    ) -> None:  # fmt: skip
        self.world = world if world is not None and world.size > 1 else None
        self.epoch = 0  # of a DistributedSampler
        if isinstance(data, Iterator):
            remedy = "Pass the function that makes it, without calling it, or list(..) of it if it fits into memory."
            kind = type(data).__name__
            raise ConfigError(f"{name} must be iterable once per epoch, but a {kind} ends with the first. {remedy}")
        if isinstance(data, Dataset) and not hasattr(data, "batches"):
            data = DataLoader(data, batch_size, shuffle=shuffle and not isinstance(data, IterableDataset))
        sampler = getattr(data, "sampler", None)
        self._sampler = sampler if self.world and isinstance(sampler, DistributedSampler) else None
        marked = any(getattr(each, "sharded", False) for each in (data, getattr(data, "dataset", None)))
        self.sharded = self.world is not None and (marked or self._sampler is not None)
        if self.sharded and self.world and self.world.parts > 1:
            raise ConfigError(f"{name} are sharded, but particles in different processes need the same data.")
        self._divided = self.world is not None and self.world.replicas > 1 and not self.sharded
        self._parts: _Parts | None = None  # of the batches of a DataLoader
        self.data, self.batch_size, self.device, self.name = data, batch_size, device, name
        self.num_data = self.steps = 0
        self._passes: Callable[[], Iterable[Any]]
        if hasattr(data, "batches"):
            own = data.to(device) if hasattr(data, "to") else data
            options = {"shuffle": shuffle, "generator": torch.default_generator, "device": device}
            self.num_data, self._passes = len(own), partial(own.batches, batch_size, **options)
        elif isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
            sizes: set[int] = set()
            apply(data, lambda tensor: sizes.add(len(tensor)))
            if len(sizes) != 1:
                raise ConfigError(f"The tensors of {name} must have as many rows as one another, got {sorted(sizes)}.")
            self.num_data, self._passes = sizes.pop(), partial(self._rows, self._moved(data), shuffle)
        elif isinstance(data, Iterable):
            self._passes, self.steps = lambda: data, length_hint(data)
            if marked and self.world:
                self.steps = 0  # that of a process is not that of all
            if self._divided and isinstance(data, DataLoader) and data.batch_sampler is not None:
                self._parts = _Parts(data.batch_sampler, self._bounds)
                kept = {name: getattr(data, name) for name in LOADER}
                loader: Any = DataLoader(data.dataset, batch_sampler=self._parts, **kept)
                self._passes = lambda: loader
            if isinstance(data, DataLoader) and getattr(data.batch_sampler, "sampler", None) is data.sampler:
                self.num_data = length_hint(data.sampler)
        elif callable(data):
            self._passes = data
        else:
            raise ConfigError(f"{name} must be {KINDS}, got a {type(data).__name__}.")
        self._leaves_one = False  # out: a last batch of one datum, from which batch norm learns nothing
        if not self.steps:
            self._leaves_one = shuffle and self.num_data % batch_size == 1 and self.num_data > batch_size > 1
            self.steps = math.ceil(self.num_data / batch_size) - self._leaves_one

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return self._own() if self.world is None else self._together(self.world)

    def _together(self, world: World) -> Iterator[tuple[Any, Tensor]]:
        """This process's part of all batches, which have the same order in all processes."""
        world.copy_([state := torch.get_rng_state()])
        torch.set_rng_state(state)
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        last: tuple[Any, Tensor] | None = None
        for step, batch in enumerate(self._own()):
            if self.sharded:
                world.sum_data(torch.tensor(1.0))  # for those that have none left
            if step == 0 and world.rank:  # the order is drawn: dropout differs from here on
                torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)
            last = batch
            yield batch
        while self.sharded and world.sum_data(torch.tensor(0.0)):
            assert last is not None
            yield Padding(apply(last, lambda tensor: tensor[:1]))

    def _own(self) -> Iterator[tuple[Any, Tensor]]:
        steps = 0
        for batch in self._passes():
            if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
                parts = ", ".join(type(entry).__name__ for entry in batch) if isinstance(batch, tuple | list) else ""
                found = f"{type(batch).__name__} of {parts}" if parts else type(batch).__name__
                raise ConfigError(
                    f"Every batch of {self.name} must be a pair (inputs, targets) with a tensor of targets, got a "
                    f"{found}. Wrap the data in a generator function that yields such pairs."
                )
            if len(batch[1]) == 1 and self._leaves_one:
                continue
            steps += 1
            empty = self._parts is not None and self._parts.empty.popleft()
            if self._divided and self._parts is None:
                first, last = self._bounds(len(batch[1]))
                batch, empty = apply(batch, lambda t, a=first, b=last: t[a : max(b, a + 1)]), first == last
            x, y = self._moved(batch)
            yield Padding((x, y)) if empty else (x, y)
        if not steps:
            raise ConfigError(f"{self.name} yielded no batch. It must be iterable once per epoch: pass {KINDS}.")

    def count(self, num_data: int | None = None) -> int:
        """Determine `num_data`, unless it is given, and `steps`; if necessary by one pass without training."""
        if not self.steps or (num_data is None and not self.num_data):
            sizes = [rows(batch) for batch in self]
            self.num_data, self.steps = sum(sizes), len(sizes)
            parts = self._divided or self.sharded
        else:
            parts = self._sampler is not None
        if self.world and parts:
            self.num_data = int(self.world.sum_data(torch.tensor(self.num_data)))
        self.num_data = self.num_data if num_data is None else num_data
        return self.num_data

    def _rows(self, data: Any, shuffle: bool) -> Iterator[Any]:
        rows = len(data[1])
        order = torch.randperm(rows) if shuffle else torch.arange(rows)
        for chosen in order.to(self.device).split(self.batch_size):
            yield apply(data, lambda tensor, chosen=chosen: tensor[chosen])

    def _bounds(self, number: int) -> tuple[int, int]:
        """Which of so many rows are this process's."""
        assert self.world is not None
        place, places = self.world.replica, self.world.replicas
        return number * place // places, number * (place + 1) // places

    def _moved(self, tree: Any) -> Any:
        return apply(tree, lambda tensor: tensor.to(self.device, non_blocking=True))

    def generators(self) -> list[torch.Generator]:
        """The random number generators that the data keep for themselves, which an exact resume has to restore."""
        found = [getattr(owner, "generator", None) for owner in (self.data, getattr(self.data, "sampler", None))]
        return [generator for generator in found if isinstance(generator, torch.Generator)]


class _Parts:
    """The rows of this process in every batch of a sampler, so that its DataLoader loads no others."""

    def __init__(self, batches: Iterable[Any], bounds: Callable[[int], tuple[int, int]]) -> None:
        self.batches, self.bounds = batches, bounds

    def __iter__(self) -> Iterator[list[Any]]:
        self.empty = deque[bool]()  # whether those that were yielded, and perhaps not loaded yet, are padding
        for chosen in map(list, self.batches):
            first, last = self.bounds(len(chosen))
            self.empty.append(first == last)
            yield chosen[first : max(last, first + 1)]


def rows(batch: tuple[Any, Tensor]) -> int:
    return 0 if isinstance(batch, Padding) else len(batch[1])


def apply(tree: Any, function: Callable[..., Any]) -> Any:
    """The same dicts, lists and tuples with `function` applied to every tensor in them."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: apply(entry, function) for key, entry in tree.items()}
    if isinstance(tree, tuple | list):
        entries = [apply(entry, function) for entry in tree]
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    return tree
