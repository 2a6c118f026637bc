"""What all predictions have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """What all particles of a posterior predict for N inputs, as tensors ``(n, N, ...)``, one per field.

    The `total` uncertainty is `aleatoric` (each particle reports it; more data would not remove it) plus `epistemic`
    (the particles disagree; more data would remove it). What is computed is in double precision. A likelihood of your
    own may return a subclass of its own.
    """

    def __post_init__(self) -> None:
        for name, values in self._tensors().items():
            if not values.is_floating_point():
                raise ConfigError(f"{name} must be floating-point numbers, got {values.dtype}. Type {name}.double().")
            if values.ndim not in (2, 3) or len(values) == 0:
                raise ShapeError(
                    f"{name} must have shape (particles, inputs) or (particles, inputs, outputs) with at least 1 "
                    f"particle, got {tuple(values.shape)}. For those of one network pass {name}[None]."
                )
            if number := int((~values.isfinite()).sum()):
                raise ConfigError(
                    f"{name} must be finite, got {number} of {values.numel()} that are not. Look for inputs or weights "
                    "that are not finite."
                )
            object.__setattr__(self, name, off_mps(values))

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...
    @property
    @abstractmethod
    def total(self) -> Tensor: ...
    @property
    @abstractmethod
    def aleatoric(self) -> Tensor: ...
    @property
    @abstractmethod
    def epistemic(self) -> Tensor: ...
    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends of a central interval."""

    @abstractmethod
    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        """Return the log probability ``(n, N)`` of every target under every particle."""

    @abstractmethod
    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return how good the prediction is."""

    def log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the data of the log of the particles' mean probability."""
        each = self.particle_log_likelihoods(targets)
        return float((each.logsumexp(0) - math.log(len(each))).mean())

    def mean_log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the particles of their log likelihoods (the paper's figure); never the larger one."""
        return float(self.particle_log_likelihoods(targets).mean())

    @classmethod
    def cat(cls, predictions: Sequence[Self]) -> Self:
        """Concatenate the predictions of one posterior for several batches of inputs."""
        batches = [prediction._tensors() for prediction in predictions]
        shapes = [[(len(t), *t.shape[2:]) for t in batch.values()] for batch in batches]
        if not shapes or any(shape != shapes[0] for shape in shapes):
            raise ShapeError(f"Predictions to concatenate must be of one posterior, got the sizes {shapes}.")
        return replace(predictions[0], **{k: torch.cat([batch[k] for batch in batches], dim=1) for k in batches[0]})

    def __len__(self) -> int:
        return next(iter(self._tensors().values())).shape[1]

    def __repr__(self) -> str:
        size = f"{type(self).__name__}(particles={len(next(iter(self._tensors().values())))}, inputs={len(self)}"
        if not len(self):
            return f"{size})"
        return f"{size}, total={float(self.total.mean()):.4g}, epistemic={float(self.epistemic.mean()):.4g})"

    def _tensors(self) -> dict[str, Tensor]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in own.items() if isinstance(value, Tensor)}


def off_mps(values: Tensor) -> Tensor:
    """Detach values and move them from MPS, which has no double precision."""
    return (values.cpu() if values.device.type == "mps" else values).detach()


def tails(level: float) -> tuple[float, float]:
    """Return the two quantiles between which a central interval of this probability lies."""
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, got {level}. Try level=0.9.")
    return (1 - level) / 2, (1 + level) / 2
