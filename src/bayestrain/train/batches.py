"""`Batches`: passes over a user's data of any kind, as (inputs, targets) on a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bayestrain.errors import ConfigError

KINDS = (
    "a DataLoader, a Dataset, a pair of tensors (x, y), bayestrain.data images, a list of (x, y) batches, or a "
    "function that returns an iterator of batches"
)


class Batches:
    """An iterable of passes, the same for every kind of data.

    Args:
        data: a DataLoader, a Dataset, tensors (x, y), an object with ``batches(batch_size, shuffle=, generator=,
            device=)`` such as `bayestrain.data.Images`, any re-iterable of (x, y) batches, or a function that returns
            an iterator of them. x may be a tensor or a dict, list or tuple of tensors.
        batch_size: of data that do not come in batches.
        shuffle: draw a new order for each pass, from torch's global generator; data that come in batches decide
            themselves.
        device: where the batches go.
        name: what errors call the data.

    Attributes:
        num_data, steps: data and batches of a pass; None until `count`, if only a pass can determine them.
    """

    def __init__(self, data: Any, batch_size: int, *, shuffle: bool, device: torch.device, name: str = "data") -> None:
        if isinstance(data, Iterator):
            raise ConfigError(
                f"{name} must be iterable once per epoch, but a {type(data).__name__} ends with the first. Pass the "
                "function that makes it, without calling it, or list(..) of it if it fits into memory."
            )
        if isinstance(data, Dataset) and not hasattr(data, "batches"):
            data = DataLoader(data, batch_size, shuffle=shuffle and not isinstance(data, IterableDataset))
        self.name, self.device, self.batch_size, self.shuffle, self.data = name, device, batch_size, shuffle, data
        self.num_data: int | None = None
        self.steps: int | None = None
        self._passes: Callable[[], Iterable[Any]]
        rows = -1
        if hasattr(data, "batches"):
            own, options = data.to(device) if hasattr(data, "to") else data, {"shuffle": shuffle, "device": device}
            self._passes = lambda: own.batches(batch_size, generator=torch.default_generator, **options)
            rows = len(own)
        elif isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
            sizes: set[int] = set()
            apply(data, lambda tensor: sizes.add(len(tensor)) or tensor)  # type: ignore[func-returns-value]
            if len(sizes) != 1:
                raise ConfigError(f"The tensors of {name} must have as many rows as one another, got {sorted(sizes)}.")
            rows, self.data = sizes.pop(), self._moved(data)
            self._passes = lambda: self._tensors(rows)
        elif isinstance(data, Iterable):
            self._passes, self.steps = lambda: data, _length(data)
            sampler = getattr(data, "sampler", None)
            if sampler is not None and getattr(getattr(data, "batch_sampler", None), "sampler", None) is sampler:
                self.num_data = _length(sampler)
        elif callable(data):
            self._passes = data
        else:
            raise ConfigError(f"{name} must be {KINDS}, got a {type(data).__name__}.")
        self._leaves_one = False
        """Whether the last batch would be a single datum, from which batch norm learns nothing: it is left out."""
        if rows >= 0:
            self._leaves_one = shuffle and rows % batch_size == 1 and rows > batch_size > 1
            self.num_data, self.steps = rows, math.ceil(rows / batch_size) - self._leaves_one
        if self.steps == 0:
            raise ConfigError(f"{name} has no data.")

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        steps = 0
        for batch in self._passes():
            if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
                entries = ", ".join(type(entry).__name__ for entry in batch) if isinstance(batch, tuple | list) else ""
                raise ConfigError(
                    f"Every batch of {self.name} must be a pair (inputs, targets) with a tensor of targets, got a "
                    f"{type(batch).__name__}{' of ' * bool(entries)}{entries}. Wrap the data in a "
                    "generator function that yields such pairs."
                )
            if len(batch[1]) == 1 and self._leaves_one:
                continue
            steps += 1
            x, y = self._moved(batch)
            yield x, y
        if not steps:
            raise ConfigError(
                f"{self.name} yielded no batch in this epoch. It must be iterable once per epoch: pass {KINDS}."
            )

    def count(self, num_data: int | None = None) -> int:
        """Determine `num_data`, unless it is given, and `steps`; if necessary by one pass without training."""
        if self.steps is None or (self.num_data is None and num_data is None):
            sizes = [len(y) for _, y in self]
            self.num_data, self.steps = sum(sizes), len(sizes)
        self.num_data = self.num_data if num_data is None else num_data
        return self.num_data or 0

    def _tensors(self, rows: int) -> Iterator[Any]:
        order = torch.randperm(rows) if self.shuffle else torch.arange(rows)
        for chosen in order.to(self.device).split(self.batch_size):
            yield apply(self.data, lambda tensor, own=chosen: tensor[own])  # type: ignore[misc]

    def _moved(self, tree: Any) -> Any:
        return apply(tree, lambda tensor: tensor.to(self.device, non_blocking=True))

    def generators(self) -> dict[str, torch.Generator]:
        """The random number generators that the data keep for themselves, which an exact resume has to restore."""
        owners = {"loader": self.data, "sampler": getattr(self.data, "sampler", None)}
        found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}


def apply(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts, lists and tuples with `function` applied to every tensor in them."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: apply(entry, function) for key, entry in tree.items()}
    if isinstance(tree, tuple | list):
        entries = [apply(entry, function) for entry in tree]
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    return tree


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None
