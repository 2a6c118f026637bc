"""What all predictions have in common, and what those of this package share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError

Indices = Tensor | Sequence[int] | slice | int
"""What picks inputs out of a prediction: a tensor of indices or of true and false, a list, a slice, one index."""


class Prediction(Protocol):
    """N inputs as all particles of a posterior see them; a likelihood of your own may bring its own kind.

    `total` uncertainty is `aleatoric` (in the data, each particle admits it) and `epistemic` (the particles differ).
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


def kept(values: Tensor, what: str) -> Tensor:
    """The tensor without its graph, in its own precision, on its own device unless that knows no double precision."""
    if not values.is_floating_point():
        raise ConfigError(f"{what} must be floating-point numbers, got {values.dtype}. Type {what}.double().")
    return (values.cpu() if values.device.type == "mps" else values).detach()


def as_double(values: Tensor) -> Tensor:
    """The same numbers without their graph, in double precision."""
    return (values.cpu() if values.device.type == "mps" else values).detach().double()


def tails(level: float) -> tuple[float, float]:
    """The two quantiles that a central interval of this probability lies between."""
    if not 0 < level < 1:
        raise ConfigError(f"The level of an interval must lie between 0 and 1, got {level}. Try level=0.9.")
    return (1 - level) / 2, (1 + level) / 2


def rows(values: Tensor, indices: Indices) -> Tensor:
    """The chosen inputs, along the second dimension."""
    if not isinstance(indices, Tensor):
        try:
            return values[:, [operator.index(indices)]]  # type: ignore[arg-type]  # whatever can be one, NumPy's too
        except TypeError:
            pass
    return values[:, indices]


def joined(batches: Sequence[Tensor]) -> Tensor:
    """Batches of inputs, seen by the same particles, one after the other."""
    shapes = [tuple(batch.shape) for batch in batches]
    if not shapes:
        raise ShapeError("There must be at least one prediction to join, got an empty list. Pass the batches' own.")
    if len({(shape[0], *shape[2:]) for shape in shapes}) > 1:
        raise ShapeError(
            "Predictions to join may differ in their number of inputs (the second size) and in nothing else, got the "
            f"shapes {shapes}. Join predictions of one posterior only."
        )
    return torch.cat(list(batches), dim=1)
