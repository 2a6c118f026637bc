"""How good probabilities and uncertainties are: scores, calibration, telling strangers, knowing when not to answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict.prediction import as_double

ECE_BINS = 15

LEAST = 1e-300
"""What a probability of exactly zero counts as where its logarithm is taken."""


def classification_metrics(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, mean log likelihood, expected calibration error (15 bins, L1) and multi-class Brier score."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs = as_double(probs)
    labels = checked_labels(labels, probs)
    of_label = probs.gather(1, labels[:, None]).squeeze(1)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    bounded = probs.float().clamp(0, 1)  # a hair above 1, and torchmetrics would take them all for logits
    ece = multiclass_calibration_error(bounded, labels, probs.shape[1], n_bins=ECE_BINS, norm="l1")
    return {
        "accuracy": float((probs.argmax(1) == labels).double().mean()),
        "log_likelihood": float(of_label.clamp_min(LEAST).log().mean()),
        "ece": float(ece),
        "brier": float((probs - one_hot).square().sum(1).mean()),
    }


def checked_labels(labels: Tensor, probs: Tensor) -> Tensor:
    """The labels of N inputs with probabilities ``(.., N, C)``, as int64 where the probabilities are."""
    number, classes = probs.shape[-2:]
    if number == 0 or labels.shape != (number,):
        raise ShapeError(
            f"There must be one label per input and at least one input, got labels of shape {tuple(labels.shape)} for "
            f"{number} inputs. Pass labels of shape (N,), class numbers rather than one-hot rows."
        )
    if labels.is_floating_point():
        raise ConfigError(f"Labels must be whole class numbers, got {labels.dtype}. Type labels.long().")
    check_classes(labels, classes)
    return labels.to(probs.device, torch.int64)


def check_classes(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not among so many classes."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ConfigError(
            f"Labels must lie between 0 and {classes - 1}, got {low} to {high}. Number the classes from 0."
        )


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """How well an uncertainty tells inputs from outside the training data from those inside.

    The probability that an outside input scores higher than an inside one, ties counted half: 1 when all outside inputs
    are the more uncertain, 0.5 by chance.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
    0.9166666666666666
    """
    inside, outside = (_checked_scores(s, what) for s, what in ((scores_in, "scores_in"), (scores_out, "scores_out")))
    inside, outside = inside.sort().values, outside.to(inside.device)
    below, up_to = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(inside))


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """`risk[k]`: the error rate on the most certain fraction `coverage[k]` of the inputs; `area` under that curve."""

    coverage: Tensor
    risk: Tensor
    area: float

    def __repr__(self) -> str:
        return f"RiskCoverage({len(self.risk)} inputs, error rate {float(self.risk[-1]):.4g}, area {self.area:.4g})"


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """The error rate when only the most certain inputs are answered, for every number of them.

    Inputs of equal uncertainty share their error rate, so that their order does not matter. The area is the mean risk
    over all coverages, smaller is better.
    """
    uncertainty = _checked_scores(uncertainty, "uncertainty")
    if wrong.shape != uncertainty.shape:
        raise ShapeError(
            f"wrong must have one entry per uncertainty, got shapes {tuple(wrong.shape)} and "
            f"{tuple(uncertainty.shape)}. Pass prediction.classes != labels."
        )
    wrong = as_double(wrong).to(uncertainty.device)
    if not bool(((wrong == 0) | (wrong == 1)).all()):
        raise ConfigError("wrong must be true or false, got other numbers. Pass prediction.classes != labels.")
    _, group, counts = torch.unique(uncertainty, sorted=True, return_inverse=True, return_counts=True)
    rates = torch.zeros(len(counts), dtype=wrong.dtype, device=wrong.device).index_add(0, group, wrong) / counts
    answered = torch.arange(1, len(wrong) + 1, dtype=wrong.dtype, device=wrong.device)
    risk = rates.repeat_interleave(counts).cumsum(0) / answered
    return RiskCoverage(answered / len(wrong), risk, float(risk.mean()))


def _checked_scores(scores: Tensor, what: str) -> Tensor:
    """One score per input, in double precision."""
    if scores.ndim != 1 or len(scores) == 0:
        raise ShapeError(
            f"{what} must have shape (N,) with N at least 1, got {tuple(scores.shape)}. "
            "Pass one number per input, such as prediction.epistemic."
        )
    if bool(scores.isnan().any()):
        number = int(scores.isnan().sum())
        raise ConfigError(f"{what} must be numbers, got {number} NaN of {len(scores)}. Find out where they come from.")
    return as_double(scores)
