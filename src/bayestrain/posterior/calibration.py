"""One temperature for the predictive distribution of a posterior, or of a single network.

The mean of particles that are each well calibrated is underconfident: where they disagree it is flat. A single network
that memorised its training data is overconfident. Raising the mean to the power 1 / temperature, fitted to held-out
data, fixes both (pool first, then calibrate: Rahaman & Thiery 2021). It changes no predicted class.
"""

import math

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

SHARPEST, FLATTEST = 0.1, 10.0


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Return ``probs ** (1 / temperature)``, normalised over the last dimension."""
    if temperature == 1.0:
        return probs
    return (probs.clamp_min(torch.finfo(probs.dtype).tiny).log() / temperature).softmax(-1)


def fit_temperature(particle_probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the particles' mean has the largest log likelihood.

    Args:
        particle_probabilities: ``(n, N, C)``.
        labels: true classes ``(N,)`` of data the network was not trained on.
    """
    shape = tuple(particle_probabilities.shape)
    if len(shape) != 3 or labels.shape != shape[1:2]:
        raise ShapeError(
            "Calibration needs probabilities (particles, data, classes) and one label per datum, got "
            f"{shape} and {tuple(labels.shape)}."
        )
    mixture = particle_probabilities.detach().mean(0, dtype=torch.float64)
    log_mixture = mixture.clamp_min(torch.finfo(mixture.dtype).tiny).log()
    index = labels.to(mixture.device)[:, None]

    def loss(log_temperature: float) -> float:
        return -float((log_mixture / math.exp(log_temperature)).log_softmax(1).gather(1, index).mean())

    # Golden-section search: the loss is convex in 1 / temperature, so it has one minimum.
    low, high = math.log(SHARPEST), math.log(FLATTEST)
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-3:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return math.exp((low + high) / 2)
