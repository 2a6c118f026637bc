"""Gaussian predictions of all particles: their mixture, and the variance within and between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.prediction import Prediction, off_mps, tails

BISECTIONS = 60
"""Halvings of the bracket of a quantile: to the last bit of a double."""

COVERED = 0.9
"""The level of the interval whose coverage is among the metrics."""


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    """For each of N inputs, a Gaussian per output from each of n particles.

    Tensors are ``(n, N, K)`` for K outputs or ``(n, N)`` for a scalar; results are ``(N, K)`` or ``(N,)`` accordingly.
    """

    particle_means: Tensor
    particle_variances: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        means, variances = self.particle_means, self.particle_variances
        if means.shape != variances.shape:
            raise ShapeError(
                f"Means and variances must have the same shape, got {tuple(means.shape)} and {tuple(variances.shape)}. "
                "For one variance shared by all, pass variance.expand_as(means)."
            )
        if not bool((variances > 0).all()):
            raise ConfigError(
                f"Variances must be positive, got {float(variances.min()):.4g}. Pass squares of standard deviations."
            )

    @cached_property
    def mean(self) -> Tensor:
        """The mean of the particles' means."""
        return self.particle_means.mean(0, dtype=torch.float64)

    @cached_property
    def aleatoric(self) -> Tensor:
        """The mean of the particles' variances, which more training data would not remove."""
        return self.particle_variances.mean(0, dtype=torch.float64)

    @cached_property
    def epistemic(self) -> Tensor:
        """The variance of the particles' means."""
        return (self.particle_means.double() - self.mean).square().mean(0)

    @property
    def total(self) -> Tensor:
        """The variance of the mixture, by the law of total variance."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """The standard deviation of the mixture."""
        return self.total.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends of the central interval to which the mixture of Gaussians gives this probability."""
        low, high = (self._quantile(q) for q in tails(level))
        return low, high

    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        """Return the log density ``(n, N)`` of each datum under each particle, at all outputs of a datum jointly."""
        means, variances = self.particle_means.double(), self.particle_variances.double()
        squares = (self._checked(targets) - means).square()
        each = -0.5 * (squares / variances + variances.log() + math.log(2 * math.pi))
        return each.sum(2) if each.ndim == 3 else each

    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return root mean squared error, both log likelihoods, and the fraction of targets in the 90 % interval."""
        targets = self._checked(targets)
        low, high = self.interval(COVERED)
        return {
            "rmse": float((self.mean - targets).square().mean().sqrt()),
            "log_likelihood": self.log_likelihood(targets),
            "mean_log_likelihood": self.mean_log_likelihood(targets),
            "coverage_90": float(((low <= targets) & (targets <= high)).double().mean()),
        }

    def _quantile(self, q: float) -> Tensor:
        """Quantile of the mixture, by bisection between the extreme quantiles of its Gaussians."""
        means, stds = self.particle_means.double(), self.particle_variances.double().sqrt()
        each: Tensor = means + stds * torch.special.ndtri(means.new_tensor(q))
        low, high = each.amin(0), each.amax(0)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - means) / stds).mean(0) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def _checked(self, targets: Tensor) -> Tensor:
        """The targets in double precision on the predictions' device."""
        wanted = tuple(self.particle_means.shape[1:])
        if tuple(targets.shape) != wanted or 0 in wanted:
            raise ShapeError(
                f"Targets must have the shape of the predicted mean, {wanted}, with at least one number, got "
                f"{tuple(targets.shape)}. Type targets.reshape{wanted} if only the shape differs."
            )
        return off_mps(targets).double().to(self.particle_means.device)
