"""What all predictions have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError

Indices = Tensor | Sequence[int] | slice | int
"""Selects inputs of a prediction: indices or a mask as a tensor, a list, a slice, or one index."""


class Prediction(Protocol):
    """What all particles of a posterior predict for N inputs; your own likelihood may return its own kind.

    The `total` uncertainty is `aleatoric` (each particle reports it; more data would not remove it) plus `epistemic`
    (the particles disagree; more data would remove it).
    """

    @property
    def mean(self) -> Tensor: ...
    @property
    def total(self) -> Tensor: ...
    @property
    def aleatoric(self) -> Tensor: ...
    @property
    def epistemic(self) -> Tensor: ...
    def interval(self, level: float = ...) -> tuple[Tensor, Tensor]: ...
    def log_likelihood(self, targets: Tensor, /) -> float: ...
    def mean_log_likelihood(self, targets: Tensor, /) -> float: ...
    def metrics(self, targets: Tensor, /) -> dict[str, float]: ...
    def subset(self, indices: Indices) -> Self: ...
    def __len__(self) -> int: ...


def detached(values: Tensor, what: str) -> Tensor:
    """Check that values are floating-point numbers and detach them, from MPS (no double precision) to the CPU."""
    if not values.is_floating_point():
        raise ConfigError(f"{what} must be floating-point numbers, got {values.dtype}. Type {what}.double().")
    return (values.cpu() if values.device.type == "mps" else values).detach()


def as_double(values: Tensor) -> Tensor:
    """Detach values and convert them to double precision."""
    return (values.cpu() if values.device.type == "mps" else values).detach().double()


def tails(level: float) -> tuple[float, float]:
    """Return the two quantiles between which a central interval of this probability lies."""
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, got {level}. Try level=0.9.")
    return (1 - level) / 2, (1 + level) / 2


def select(values: Tensor, indices: Indices) -> Tensor:
    """Select inputs along the second dimension, which is kept for a single index."""
    single = not isinstance(indices, Tensor) and hasattr(indices, "__index__")
    return values[:, [indices]] if single else values[:, indices]


def concatenate(batches: Sequence[Tensor]) -> Tensor:
    """Concatenate batches of inputs, seen by the same particles."""
    shapes = [tuple(batch.shape) for batch in batches]
    if len({(shape[0], *shape[2:]) for shape in shapes}) != 1:
        raise ShapeError(
            "Predictions to concatenate may differ only in their number of inputs (the second size), got the shapes "
            f"{shapes}. Pass at least one prediction, all of one posterior."
        )
    return torch.cat(list(batches), dim=1)
