"""One temperature for all particles, chosen so that together they are as sure as they should be.

Particles that are each well calibrated are, averaged, too unsure of themselves: where they disagree the mean is flat.
Dividing every particle's logits by one number, found on data held out from training, mends it (pool, then calibrate:
Rahaman & Thiery 2021). It changes no ranking within one particle and costs one line search.
"""

import math

import torch
from torch import Tensor

from bayestrain.errors import ShapeError

SHARPEST, FLATTEST = 0.1, 10.0


def fit_temperature(outputs: Tensor, labels: Tensor) -> float:
    """The temperature with the largest log likelihood of the particles' mean probability.

    Args:
        outputs: logits of every particle, ``(n, N, C)``.
        labels: true classes ``(N,)`` of data that were not trained on.
    """
    if outputs.ndim != 3 or labels.shape != outputs.shape[1:2]:
        raise ShapeError(
            f"Calibration needs logits (particles, data, classes) and one label per datum, got "
            f"{tuple(outputs.shape)} and {tuple(labels.shape)}."
        )
    logits = outputs.detach().double()
    index = labels.to(logits.device).expand(len(logits), -1)[..., None]

    def loss(log_temperature: float) -> float:
        log_probs = torch.log_softmax(logits / math.exp(log_temperature), dim=2).gather(2, index).squeeze(2)
        return -float((torch.logsumexp(log_probs, dim=0) - math.log(len(logits))).mean())

    low, high = math.log(SHARPEST), math.log(FLATTEST)
    ratio = (math.sqrt(5) - 1) / 2  # golden section
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
