"""What the particles of a posterior predict, and the uncertainty within and between them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.special import entr, ndtr, ndtri

from bayestrain.errors import ConfigError, ShapeError


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """What all particles of a posterior predict for N inputs, as tensors ``(n, N, ...)``, one per field.

    The `total` uncertainty is `aleatoric` (each particle reports it; more data would not remove it) plus `epistemic`
    (the particles disagree; more data would remove it). Results are in double precision.
    """

    def __post_init__(self) -> None:
        for name, values in self._tensors().items():
            broken = int((~values.isfinite()).sum())
            if not values.is_floating_point() or values.ndim not in (2, 3) or len(values) == 0 or broken:
                raise ShapeError(
                    f"{name} must be finite floating-point numbers (particles, inputs[, outputs]), got {values.dtype} "
                    f"{tuple(values.shape)}, {broken} of them not finite. For those of one network pass {name}[None]."
                )
            values = values.cpu() if values.device.type == "mps" else values  # MPS has no double precision
            object.__setattr__(self, name, values.detach())

    @property
    @abstractmethod
    def mean(self) -> Tensor: ...
    @property
    @abstractmethod
    def aleatoric(self) -> Tensor: ...
    @property
    @abstractmethod
    def epistemic(self) -> Tensor: ...
    @property
    def total(self) -> Tensor:
        """All of the uncertainty."""
        return self.aleatoric + self.epistemic

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends of a central interval."""

    @abstractmethod
    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        """Return the log probability ``(n, N)`` of every target under every particle."""

    @abstractmethod
    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return how good the prediction is."""

    def log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the data of the log of the particles' mean probability."""
        each = self.particle_log_likelihoods(targets)
        return float((each.logsumexp(0) - math.log(len(each))).mean())

    def mean_log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the particles of their log likelihoods (the paper's figure); never the larger one."""
        return float(self.particle_log_likelihoods(targets).mean())

    @classmethod
    def cat(cls, predictions: Sequence[Self]) -> Self:
        """Concatenate the predictions of one posterior for several batches of inputs."""
        batches = [{field.name: getattr(own, field.name) for field in fields(own)} for own in predictions]
        forms = [{k: (len(v), *v.shape[2:]) if isinstance(v, Tensor) else v for k, v in own.items()} for own in batches]
        if not forms or any(form != forms[0] for form in forms):
            raise ShapeError(f"Predictions to concatenate must be of one posterior at one temperature, got {forms}.")
        joined = {name: torch.cat([own[name] for own in batches], dim=1) for name in predictions[0]._tensors()}
        return replace(predictions[0], **joined)

    def __len__(self) -> int:
        return next(iter(self._tensors().values())).shape[1]

    def __repr__(self) -> str:
        parts = [f"particles={len(next(iter(self._tensors().values())))}", f"inputs={len(self)}"]
        parts += [f"{name}={float(getattr(self, name).mean()):.4g}" for name in ("total", "epistemic") if len(self)]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _tensors(self) -> dict[str, Tensor]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in own.items() if isinstance(value, Tensor)}


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
        check_temperature(self.temperature)
        probs = self.particle_probabilities
        tolerance = 1e-4 if probs.dtype in (torch.float32, torch.float64) else 1e-2
        wrong = ((probs.sum(-1, dtype=torch.float64) - 1).abs() > tolerance) | (probs < 0).any(-1)
        if probs.ndim != 3 or probs.shape[2] < 2 or bool(wrong.any()):
            raise ShapeError(
                "Probabilities (n, N, C) of at least 2 classes must be at least 0 and sum to 1, got "
                f"{tuple(probs.shape)} with {int(wrong.sum())} rows that do not. Pass logits through .softmax(-1)."
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
    def aleatoric(self) -> Tensor:
        """``(N,)``: the mean entropy of the particles."""
        # One particle at a time: the whole tensor in double precision may not fit into memory.
        return torch.stack([_entropy(probs.double()) for probs in self.particle_probabilities]).mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """``(N,)``: the mutual information of class and particle; the total is the entropy of the mixture."""
        return (_entropy(self.mixture) - self.aleatoric).clamp_min(0)

    def reasons(self) -> list[str]:
        """Say why each input is uncertain: "clear" (less than 0.1 nats), "ambiguous input" or "particles disagree".

        Networks that agree on an even split see an ambiguous input; those that contradict each other lack data like it.
        """
        return [
            "clear" if total < 0.1 else "particles disagree" if epistemic > total / 2 else "ambiguous input"
            for total, epistemic in zip(self.total.tolist(), self.epistemic.tolist(), strict=True)
        ]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends ``(N, C)`` of the central `level` of the particles' probabilities at the `temperature`."""
        each = torch.stack([at_temperature(probs.double(), self.temperature) for probs in self.particle_probabilities])
        # torch.quantile refuses more than 16 million numbers.
        low, high = torch.as_tensor(np.quantile(each.cpu().numpy(), _tails(level), axis=0)).to(each.device)
        return low, high

    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        return label_log_probs(self.particle_probabilities, targets)

    def log_likelihood(self, targets: Tensor) -> float:
        """Return the mean over the data of the log of the predicted probability, which is at the `temperature`."""
        return float(label_log_probs(self.mean, targets).mean())

    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return accuracy, both log likelihoods, calibration error (Guo et al. 2017, 15 bins) and Brier score."""
        labels = checked_labels(targets, self.mean)
        right = (self.classes == labels).double()
        bins = (self.confidence * 15).long().clamp_max(14)
        gaps = right.new_zeros(15).index_add(0, bins, self.confidence - right)
        return {
            "accuracy": float(right.mean()),
            "log_likelihood": self.log_likelihood(labels),
            "ece": float(gaps.abs().sum() / len(labels)),
            "brier": float((self.mean - one_hot(labels, self.mean.shape[1])).square().sum(1).mean()),
            "mean_log_likelihood": self.mean_log_likelihood(labels),
        }


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
        if means.shape != variances.shape or not bool((variances > 0).all()):
            raise ShapeError(
                f"Variances must be positive and have the shape of the means, {tuple(means.shape)}, got "
                f"{tuple(variances.shape)} from {float(variances.min()):.4g}. One for all: variance.expand_as(means)."
            )

    @cached_property
    def mean(self) -> Tensor:
        return self.particle_means.mean(0, dtype=torch.float64)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self.particle_variances.mean(0, dtype=torch.float64)

    @cached_property
    def epistemic(self) -> Tensor:
        return (self.particle_means.double() - self.mean).square().mean(0)

    @property
    def std(self) -> Tensor:
        return self.total.sqrt()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return both ends of the central interval to which the mixture of Gaussians gives this probability."""
        means, stds = self.particle_means.double(), self.particle_variances.double().sqrt()
        ends = []
        for q in _tails(level):  # by bisection between the extreme quantiles of the Gaussians
            each = means + stds * ndtri(means.new_tensor(q))
            low, high = each.amin(0), each.amax(0)
            for _ in range(60):  # to the last bit of a double
                middle = (low + high) / 2
                below = ndtr((middle - means) / stds).mean(0) < q
                low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            ends.append((low + high) / 2)
        return ends[0], ends[1]

    def particle_log_likelihoods(self, targets: Tensor) -> Tensor:
        means, variances = self.particle_means.double(), self.particle_variances.double()
        return gaussian_log_prob(self._checked(targets), means, variances, own=2)

    def metrics(self, targets: Tensor) -> dict[str, float]:
        """Return root mean squared error, both log likelihoods, and the fraction of targets in the 90 % interval."""
        targets = self._checked(targets)
        low, high = self.interval()
        return {
            "rmse": float((self.mean - targets).square().mean().sqrt()),
            "log_likelihood": self.log_likelihood(targets),
            "mean_log_likelihood": self.mean_log_likelihood(targets),
            "coverage_90": float(((low <= targets) & (targets <= high)).double().mean()),
        }

    def _checked(self, targets: Tensor) -> Tensor:
        means = self.particle_means
        return checked_targets(targets, means.shape[1:]).detach().to(means.device).double()


def label_log_probs(probs: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithms, in double precision, of the probabilities ``(.., N, C)`` of the labels ``(N,)``."""
    labels = checked_labels(labels, probs).expand(probs.shape[:-1])
    return probs.gather(-1, labels[..., None]).squeeze(-1).double().clamp_min(1e-300).log()


def checked_labels(labels: Tensor, probs: Tensor, read: bool = True) -> Tensor:
    """Check the labels of N inputs against ``(.., N, C)``, their values if they may be `read`; return them as int64."""
    number, classes = probs.shape[-2:]
    if number == 0 or labels.shape != (number,) or labels.is_floating_point():
        raise ShapeError(
            f"There must be one whole class number per input and at least one input, got {labels.dtype} of shape "
            f"{tuple(labels.shape)} for {number} inputs. Type labels.argmax(1) for one-hot rows, else labels.long()."
        )
    if read and not 0 <= labels.min() <= labels.max() < classes:
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise ConfigError(f"Labels must lie between 0 and {classes - 1}, got {found}. Number the classes from 0.")
    return labels.to(probs.device, torch.int64)


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return the probability that an out-of-distribution input is more uncertain than one inside; ties count half.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))
    0.9166666666666666
    """
    inside, outside = (scores.detach().cpu().double().flatten() for scores in (scores_in, scores_out))
    if not (len(inside) and len(outside)) or bool(torch.cat([inside, outside]).isnan().any()):
        raise ConfigError("There must be at least one score inside and one outside, and none may be NaN.")
    inside = inside.sort().values
    below, up_to = (torch.searchsorted(inside, outside, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(inside))


def check_temperature(temperature: float) -> None:
    """Raise unless probabilities can be raised to the power 1 / temperature."""
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be positive and finite, got {temperature}.")


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Return ``probs ** (1 / temperature)``, normalised over the last dimension."""
    return probs if temperature == 1.0 else (_logs(probs) / temperature).softmax(-1)


def fit_temperature(particle_probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the mean of the particles' ``(n, N, C)`` has the largest log likelihood.

    The mean of well calibrated particles is underconfident where they disagree; a network that memorised its training
    data is overconfident. One temperature, fitted to held-out labels ``(N,)``, fixes both (Rahaman & Thiery 2021).
    """
    labels = checked_labels(labels, particle_probabilities)
    logs = _logs(particle_probabilities.detach().mean(0, dtype=torch.float64))
    of_labels = float(logs.gather(1, labels[:, None]).mean())
    # The log likelihood is concave in 1 / temperature. It rises while the labels' logs exceed those expected.
    low, high = math.log(0.1), math.log(10.0)  # temperatures beyond these are not sought
    while high - low > 1e-3:
        middle = (low + high) / 2
        expected = float(((logs / math.exp(middle)).softmax(1) * logs).sum(1).mean())
        low, high = (low, middle) if of_labels > expected else (middle, high)
    return math.exp((low + high) / 2)


def checked_targets(targets: Tensor, shape: torch.Size) -> Tensor:
    """Return the targets of a regression if they have the shape of the outputs."""
    if targets.shape != shape or 0 in shape:
        raise ShapeError(
            f"Targets must have the shape of the outputs, {tuple(shape)}, got {tuple(targets.shape)}. For one output "
            "per datum type outputs.squeeze(1) in the network, or targets[:, None]."
        )
    return targets


def _logs(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _entropy(probs: Tensor) -> Tensor:
    return entr(probs).sum(-1).clamp_min(0)  # type: ignore[no-any-return]


def gaussian_log_prob(values: Tensor, mean: Tensor, variance: Tensor, own: int = 1) -> Tensor:
    """Return the log density of every datum: a sum over all but the first `own` dimensions."""
    each = -0.5 * ((values - mean).square() / variance + variance.log() + math.log(2 * math.pi))
    return each.sum(-1) if each.ndim > own else each


def _tails(level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ConfigError(f"level must lie between 0 and 1, got {level}. Try level=0.9.")
    return (1 - level) / 2, (1 + level) / 2
