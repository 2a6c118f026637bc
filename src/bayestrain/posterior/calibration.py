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
    return probs if temperature == 1.0 else (_logs(probs) / temperature).softmax(-1)


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
    logs = _logs(particle_probabilities.detach().mean(0, dtype=torch.float64))
    of_labels = float(logs.gather(1, labels.to(logs.device)[:, None]).mean())
    # The log likelihood is concave in 1 / temperature. It rises while the labels' logs exceed those expected.
    low, high = math.log(SHARPEST), math.log(FLATTEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        expected = float(((logs / math.exp(middle)).softmax(1) * logs).sum(1).mean())
        low, high = (low, middle) if of_labels > expected else (middle, high)
    return math.exp((low + high) / 2)


def _logs(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
