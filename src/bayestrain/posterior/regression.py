"""Gaussian predictions of all particles: their mixture, and the variance within and between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.prediction import Indices, as_double, concatenate, detached, select, tails

BISECTIONS = 60
"""Halvings of the bracket of a quantile: to the last bit of a double."""

COVERED = 0.9
"""The level of the interval whose coverage is among the metrics."""


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction:
    """For each of N inputs, a Gaussian per output from each of n particles.

    Tensors are ``(n, N, K)`` for K outputs or ``(n, N)`` for a scalar; results are ``(N, K)`` or ``(N,)`` accordingly,
    in double precision.
    """

    particle_means: Tensor
    particle_variances: Tensor

    def __post_init__(self) -> None:
        means, variances = self.particle_means, self.particle_variances
        if means.shape != variances.shape or means.ndim not in (2, 3) or means.shape[0] < 1:
            raise ShapeError(
                "Means and variances must both have shape (particles, inputs) or (particles, inputs, outputs) with at "
                f"least 1 particle, got {tuple(means.shape)} and {tuple(variances.shape)}. For one variance shared by "
                "all, pass variance.expand_as(means)."
            )
        means, variances = detached(means, "means"), detached(variances, "variances")
        object.__setattr__(self, "particle_means", means)
        object.__setattr__(self, "particle_variances", variances)
        if number := int((~means.isfinite()).sum()):
            raise ConfigError(f"Means must be finite, got {number} of {means.numel()} that are not. Train again.")
        if not bool(((variances > 0) & variances.isfinite()).all()):
            raise ConfigError(
                f"Variances must be positive and finite, got {float(variances.min()):.4g} to "
                f"{float(variances.max()):.4g}. Pass squares of standard deviations, or exponentials of logarithms."
            )

    def __len__(self) -> int:
        return self.particle_means.shape[1]

    def __repr__(self) -> str:
        n, number = self.particle_means.shape[:2]
        wide = self.particle_means.shape[2] if self.particle_means.ndim == 3 else 1
        outputs = f", {wide} outputs" if wide != 1 else ""
        size = f"{n} particle{'s' * (n != 1)}, {number} input{'s' * (number != 1)}{outputs}"
        if self.particle_means.numel() == 0:
            return f"RegressionPrediction({size})"
        total, epistemic = float(self.total.mean()), float(self.epistemic.mean())
        return f"RegressionPrediction({size}; mean variance {total:.4g}, {epistemic:.4g} of it epistemic)"

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

    def log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the data of the mixture's log density, at all outputs of a datum jointly."""
        return float((self._log_densities(targets).logsumexp(0) - math.log(len(self.particle_means))).mean())

    def mean_log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the particles of their log likelihoods; never above `log_likelihood`."""
        return float(self._log_densities(targets).mean())

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

    def subset(self, indices: Indices) -> RegressionPrediction:
        """Return the prediction for some of the inputs."""
        return RegressionPrediction(select(self.particle_means, indices), select(self.particle_variances, indices))

    @staticmethod
    def cat(predictions: Sequence[RegressionPrediction]) -> RegressionPrediction:
        """Concatenate the predictions of one posterior for several batches of inputs."""
        means = concatenate([prediction.particle_means for prediction in predictions])
        return RegressionPrediction(means, concatenate([prediction.particle_variances for prediction in predictions]))

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

    def _log_densities(self, targets: Tensor) -> Tensor:
        """``(n, N)``: log density of each datum under each particle, summed over the outputs."""
        means, variances = self.particle_means.double(), self.particle_variances.double()
        squares = (self._checked(targets) - means).square()
        each = -0.5 * (squares / variances + variances.log() + math.log(2 * math.pi))
        return each.sum(2) if each.ndim == 3 else each

    def _checked(self, targets: Tensor) -> Tensor:
        """The targets in double precision on the predictions' device."""
        wanted = tuple(self.particle_means.shape[1:])
        if tuple(targets.shape) != wanted or 0 in wanted:
            raise ShapeError(
                f"Targets must have the shape of the predicted mean, {wanted}, with at least one number, got "
                f"{tuple(targets.shape)}. Type targets.reshape{wanted} if only the shape differs."
            )
        return as_double(targets).to(self.particle_means.device)
