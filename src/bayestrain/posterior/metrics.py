"""How good probabilities and uncertainties are: scores, calibration, out-of-distribution detection, abstention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.posterior.prediction import as_double

ECE_BINS = 15

LEAST = 1e-300
"""The smallest probability of which a logarithm is taken."""


def classification_metrics(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, mean log likelihood, expected calibration error (15 bins) and multi-class Brier score.

    The calibration error (Guo et al. 2017) is the mean gap between confidence and accuracy, by confidence.
    """
    probs = as_double(probs)
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


def checked_labels(labels: Tensor, probs: Tensor) -> Tensor:
    """Check the labels of N inputs against probabilities ``(.., N, C)``; return them as int64 on their device."""
    number, classes = probs.shape[-2:]
    if number == 0 or labels.shape != (number,):
        raise ShapeError(
            f"There must be one label per input and at least one input, got labels of shape {tuple(labels.shape)} for "
            f"{number} inputs. Pass class numbers of shape (N,), not one-hot rows."
        )
    if labels.is_floating_point():
        raise ConfigError(f"Labels must be whole class numbers, got {labels.dtype}. Type labels.long().")
    low, high = int(labels.min()), int(labels.max())
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
    inside, outside = _checked_scores(scores_in, "scores_in"), _checked_scores(scores_out, "scores_out")
    inside, outside = inside.sort().values, outside.to(inside.device)
    below, up_to = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(inside))


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """`risk[k]` is the error rate on the most certain fraction `coverage[k]` of the inputs; `area` is their mean."""

    coverage: Tensor
    risk: Tensor
    area: float


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """Return the error rate when only the most certain inputs are answered, for every number of them.

    Inputs of equal uncertainty share their error rate, so their order does not matter.
    """
    uncertainty = _checked_scores(uncertainty, "uncertainty")
    if wrong.shape != uncertainty.shape:
        raise ShapeError(
            f"wrong must have one entry per uncertainty, got shapes {tuple(wrong.shape)} and "
            f"{tuple(uncertainty.shape)}. Pass prediction.classes != labels."
        )
    errors = as_double(wrong.bool()).to(uncertainty.device)
    _, group, counts = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    rates = errors.new_zeros(len(counts)).index_add(0, group, errors) / counts
    answered = torch.arange(1, len(errors) + 1, dtype=errors.dtype, device=errors.device)
    risk = rates.repeat_interleave(counts).cumsum(0) / answered
    return RiskCoverage(answered / len(errors), risk, float(risk.mean()))


def _checked_scores(scores: Tensor, what: str) -> Tensor:
    """Check that there is one score per input and none is NaN; return them in double precision."""
    if scores.ndim != 1 or len(scores) == 0:
        raise ShapeError(
            f"{what} must have shape (N,) with N at least 1, got {tuple(scores.shape)}. "
            "Pass one number per input, such as prediction.epistemic."
        )
    if number := int(scores.isnan().sum()):
        raise ConfigError(f"{what} must be numbers, got {number} NaN of {len(scores)}. Find out where they come from.")
    return as_double(scores)
