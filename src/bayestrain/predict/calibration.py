"""One temperature for a posterior, or for a single network, chosen so that it is as sure as it should be.

Particles that are each well calibrated are, averaged, too unsure of themselves: where they disagree the mean is flat.
Raising the mean to the power 1 / temperature, found on data held out from training, mends it (pool first, then
calibrate: Rahaman & Thiery 2021). A single network that knows its training data by heart is too sure, and mended in the
same way. It changes no class, and costs one line search.
"""

import math

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

SHARPEST, FLATTEST = 0.1, 10.0


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """``probs ** (1 / temperature)``, normalised over the last dimension."""
    if temperature == 1.0:
        return probs
    least = torch.finfo(probs.dtype).tiny
    return (probs.clamp_min(least).log() / temperature).softmax(-1)


def fit_temperature(particle_probabilities: Tensor, labels: Tensor) -> float:
    """The temperature at which the particles' mean has the largest log likelihood.

    Args:
        particle_probabilities: ``(n, N, C)``.
        labels: true classes ``(N,)`` of data that were not trained on.
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

    low, high = math.log(SHARPEST), math.log(FLATTEST)
    ratio = (math.sqrt(5) - 1) / 2  # golden section: the loss is convex in 1 / temperature, so has one valley
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
