"""`Batches`: passes over whatever a user has for data, as (inputs, targets) on a device."""

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
    """An iterable of one pass after the other, the same for every kind of data.

    Args:
        data: a DataLoader, a Dataset, tensors (x, y), an object with ``batches(batch_size, shuffle=, generator=,
            device=)`` such as `bayestrain.data.Images`, any re-iterable of (x, y) batches, or a function that returns
            an iterator of them. x may be a tensor or a dict, list or tuple of tensors.
        batch_size: of data that do not come in batches.
        shuffle: draw a new order for each pass, from torch's global generator; data that come in batches decide
            themselves.
        device: where the batches go.
        name: what errors call the data.
    """

    def __init__(self, data: Any, batch_size: int, *, shuffle: bool, device: torch.device, name: str = "data") -> None:
        if isinstance(data, Iterator):
            raise ConfigError(
                f"{name} must be iterable once per epoch, but a {type(data).__name__} ends with the first. Pass the "
                "function that makes it, without calling it, or list(..) of it if it fits into memory."
            )
        if isinstance(data, Dataset) and not hasattr(data, "batches"):
            data = DataLoader(data, batch_size, shuffle=shuffle and not isinstance(data, IterableDataset))
        self.name, self.device, self.batch_size, self.shuffle = name, device, batch_size, shuffle
        self.data: Any = data
        self._rows, self._leaves_one = 0, False
        """Whether the last batch would be a single datum, from which batch norm learns nothing: it is left out."""
        self.num_data: int | None = None
        self.steps: int | None = None
        """Both None until `count`, if only a pass can tell."""
        if hasattr(data, "batches"):
            self.data, self._passes = data.to(device) if hasattr(data, "to") else data, self._own_batches
            self._known(len(self.data))
        elif isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor):
            self.data, self._passes = moved(data, device), self._tensors
            sizes = {len(tensor) for tensor in tensors(data)}
            if len(sizes) != 1:
                raise ConfigError(f"The tensors of {name} must have as many rows as one another, got {sorted(sizes)}.")
            self._known(sizes.pop())
        elif isinstance(data, Iterable):
            self.data, self._passes = data, lambda: iter(data)
            self.steps = len(self.data) if _has_length(data) else None
            sampler = getattr(data, "sampler", None)
            own = getattr(getattr(data, "batch_sampler", None), "sampler", None) is sampler
            if sampler is not None and own and self.steps is not None and _has_length(sampler):
                self.num_data = len(sampler)
        elif callable(data):
            self.data, self._passes = data, lambda: iter(data())
        else:
            raise ConfigError(f"{name} must be {KINDS}, got a {type(data).__name__}.")
        if self.steps == 0:
            raise ConfigError(f"{name} has no data.")

    def _known(self, number: int) -> None:
        size = self.batch_size
        self.num_data = self._rows = number
        self._leaves_one = self.shuffle and number % size == 1 and number > size > 1
        self.steps = math.ceil(number / size) - self._leaves_one

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        steps = 0
        for batch in self._passes():
            if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
                raise ConfigError(
                    f"Every batch of {self.name} must be a pair (inputs, targets) with a tensor of targets, got "
                    f"{_kind(batch)}. Wrap the data in a generator function that yields such pairs."
                )
            if len(batch[1]) == 1 and self._leaves_one:
                continue
            steps += 1
            yield moved(batch[0], self.device), batch[1].to(self.device, non_blocking=True)
        if not steps:
            raise ConfigError(
                f"{self.name} yielded no batch in this epoch. It must be iterable once per epoch: pass {KINDS}."
            )

    def count(self, num_data: int | None = None) -> int:
        """Learn `num_data`, unless it is given, and `steps`; if need be by one pass that trains nothing."""
        if self.steps is None or (self.num_data is None and num_data is None):
            sizes = [len(y) for _, y in self]
            self.num_data, self.steps = sum(sizes), len(sizes)
        self.num_data = self.num_data if num_data is None else num_data
        return self.num_data or 0

    def _own_batches(self) -> Iterator[Any]:
        return iter(self.data.batches(
            self.batch_size, shuffle=self.shuffle, generator=torch.default_generator, device=self.device
        ))  # fmt: skip

    def _tensors(self) -> Iterator[Any]:
        order = torch.randperm(self._rows) if self.shuffle else torch.arange(self._rows)
        for chosen in order.to(self.device).split(self.batch_size):
            yield apply(self.data, lambda tensor, own=chosen: tensor[own])  # type: ignore[misc]

    def generators(self) -> dict[str, torch.Generator]:
        """The random number generators that the data keep for themselves, which an exact resume has to restore."""
        sampler = getattr(self.data, "sampler", None)
        owners = {"loader": self.data, "sampler": sampler}
        found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}


def apply(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same dicts, lists and tuples with `function` applied to every tensor in them."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: apply(entry, function) for key, entry in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(apply(entry, function) for entry in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(apply(entry, function) for entry in tree)
    return tree


def moved(tree: Any, device: torch.device) -> Any:
    """The same with every tensor on `device`."""
    return apply(tree, lambda tensor: tensor.to(device, non_blocking=True))


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in dicts, lists and tuples."""
    found: list[Tensor] = []
    apply(tree, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:
        return False


def _kind(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {', '.join(type(entry).__name__ for entry in batch) or 'nothing'}"
    return f"a {type(batch).__name__}"
