"""Class probabilities of all particles, and the uncertainty within and between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.metrics import (
    LEAST,
    at_temperature,
    checked_labels,
    classification_metrics,
    mean_log_probability,
)  # fmt: skip
from bayestrain.posterior.prediction import Prediction, tails

CLEAR = 0.1
"""Below this total uncertainty, in nats, a prediction counts as clear."""


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    """The probabilities that n particles give to C classes of N inputs, with entropies in nats.

    A `temperature` other than 1 (see `fit_temperature`) sharpens or flattens the reported probabilities and intervals,
    and changes neither the particles nor the uncertainties that follow from them.

    >>> ClassPrediction(torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]))  # both are confident, of different classes
    ClassPrediction(particles=2, inputs=1, total=0.6931, epistemic=0.3681)
    """

    particle_probabilities: Tensor
    """``(n, N, C)``; every row sums to 1."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        probs = self.particle_probabilities
        if probs.ndim != 3 or probs.shape[2] < 2:
            raise ShapeError(f"Probabilities must be those of at least 2 classes (n, N, C), got {tuple(probs.shape)}.")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be positive and finite, got {self.temperature}.")
        away = (probs.sum(2, dtype=torch.float64) - 1).abs()
        tolerance = 1e-4 if probs.dtype in (torch.float32, torch.float64) else 1e-2
        if bool((away > tolerance).any()) or bool((probs < 0).any()):
            raise ConfigError(
                "Probabilities must be at least 0 and sum to 1 over the classes, got a smallest one of "
                f"{float(probs.min()):.4g} and a sum {float(away.max()):.4g} away from 1. Pass logits through "
                ".softmax(-1) first."
            )

    @cached_property
    def mixture(self) -> Tensor:
        """``(N, C)``: the mean of the particles' probabilities."""
        return self.particle_probabilities.mean(0, dtype=torch.float64)

    @cached_property
    def mean(self) -> Tensor:
        """``(N, C)``: what the posterior predicts, which is the mixture at the `temperature`."""
        return at_temperature(self.mixture, self.temperature)

    @property
    def classes(self) -> Tensor:
        """``(N,)``: the most probable class."""
        return self.mean.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """``(N,)``: the probability of the most probable class."""
        return self.mean.amax(1)

    @cached_property
    def total(self) -> Tensor:
        """``(N,)``: the entropy of the mixture."""
        return _entropy(self.mixture)

    @cached_property
    def aleatoric(self) -> Tensor:
        """``(N,)``: the mean entropy of the particles, which more training data would not remove."""
        # One particle at a time: the whole tensor in double precision may not fit into memory.
        return torch.stack([_entropy(probs.double()) for probs in self.particle_probabilities]).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """``(N,)``: the mutual information of class and particle, which is large where particles disagree."""
        return (self.total - self.aleatoric).clamp_min(0)

    @property
    def disagreement(self) -> Tensor:
        """``(N,)``: the fraction of particles that predict another class than the mean."""
        return (self.particle_probabilities.argmax(2) != self.classes).double().mean(0)

    def reasons(self) -> list[str]:
        """Say in words why each input is uncertain: "clear", "ambiguous input" or "particles disagree".

        Networks that agree on an even split see an ambiguous input. Confident networks that contradict each other lack
        training data like it.
        """
        pairs = zip(self.total.tolist(), self.epistemic.tolist(), strict=True)
        return [
            "clear" if total < CLEAR else "particles disagree" if epistemic > total / 2 else "ambiguous input"
            for total, epistemic in pairs
        ]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends, each ``(N, C)``, of the central `level` of the particles' probabilities of each class.

        Each particle is brought to the `temperature` first, as the mean is.
        """
        each = torch.stack([at_temperature(probs.double(), self.temperature) for probs in self.particle_probabilities])
        # torch.quantile refuses more than 16 million numbers.
        low, high = np.quantile(each.cpu().numpy(), tails(level), axis=0)
        return torch.as_tensor(low, device=each.device), torch.as_tensor(high, device=each.device)

    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        labels = checked_labels(targets, self.particle_probabilities)
        of_label = self.particle_probabilities.gather(2, labels.expand(len(self.particle_probabilities), -1)[..., None])
        return of_label.squeeze(2).double().clamp_min(LEAST).log()

    def log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the data of the log of the predicted probability, which is at the `temperature`."""
        return mean_log_probability(self.mean, checked_labels(targets, self.mean))

    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return accuracy, both log likelihoods, expected calibration error and Brier score."""
        return {**classification_metrics(self.mean, targets), "mean_log_likelihood": self.mean_log_likelihood(targets)}

    @classmethod
    def cat(cls, predictions: Sequence[ClassPrediction]) -> ClassPrediction:
        if len({prediction.temperature for prediction in predictions}) > 1:
            raise ConfigError("Predictions at different temperatures cannot be concatenated. Predict them again.")
        return super().cat(predictions)


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1).clamp_min(0)
