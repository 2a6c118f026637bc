"""How good probabilities and uncertainties are: scores, out-of-distribution detection, and one temperature.

The mean of particles that are each well calibrated is underconfident: where they disagree it is flat. A single network
that memorised its training data is overconfident. Raising the mean to the power 1 / temperature, fitted to held-out
data, fixes both (pool first, then calibrate: Rahaman & Thiery 2021). It changes no predicted class.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.prediction import off_mps

ECE_BINS = 15
SHARPEST, FLATTEST = 0.1, 10.0
"""Between these a temperature is sought."""

LEAST = 1e-300
"""The smallest probability of which a logarithm is taken."""


def classification_metrics(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, mean log likelihood, expected calibration error (15 bins) and multi-class Brier score.

    The calibration error (Guo et al. 2017) is the mean gap between confidence and accuracy, by confidence.
    """
    probs = off_mps(probs).double()
    labels = checked_labels(labels, probs)
    confidence, predicted = probs.max(1)
    right = (predicted == labels).double()
    bins = (confidence * ECE_BINS).long().clamp_max(ECE_BINS - 1)
    gaps = probs.new_zeros(ECE_BINS).index_add(0, bins, confidence - right)
    return {
        "accuracy": float(right.mean()),
        "log_likelihood": mean_log_probability(probs, labels),
        "ece": float(gaps.abs().sum() / len(labels)),
        "brier": float((probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(1).mean()),
    }


def mean_log_probability(probs: Tensor, labels: Tensor) -> float:
    """Mean over the data of the log probability ``(N, C)`` of the label."""
    return float(probs.gather(1, labels[:, None]).clamp_min(LEAST).log().mean())


def checked_labels(labels: Tensor, probs: Tensor, read: bool = True) -> Tensor:
    """Check the labels of N inputs against ``(.., N, C)``, their values if they may be `read`; return them as int64."""
    number, classes = probs.shape[-2:]
    if number == 0 or labels.shape != (number,):
        raise ShapeError(
            f"There must be one class number per input and at least one input, got labels of shape "
            f"{tuple(labels.shape)} for {number} inputs. For one-hot rows type labels.argmax(1)."
        )
    if labels.is_floating_point():
        raise ConfigError(f"Labels must be whole class numbers, got {labels.dtype}. Type labels.long().")
    low, high = (int(labels.min()), int(labels.max())) if read else (0, 0)
    if low < 0 or high >= classes:
        raise ConfigError(
            f"Labels must lie between 0 and {classes - 1}, got {low} to {high}. Number the classes from 0."
        )
    return labels.to(probs.device, torch.int64)


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """How well an uncertainty separates out-of-distribution inputs from inputs like the training data.

    It is the probability that an outside input scores higher than an inside one, with ties counted half: 1 if it
    always does, 0.5 by chance.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
    0.9166666666666666
    """
    inside, outside = (off_mps(scores).double().flatten() for scores in (scores_in, scores_out))
    if not (len(inside) and len(outside)) or bool(torch.cat([inside, outside.to(inside.device)]).isnan().any()):
        raise ConfigError("There must be at least one score inside and one outside, and none may be NaN.")
    inside, outside = inside.sort().values, outside.to(inside.device)
    below, up_to = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(inside))


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
