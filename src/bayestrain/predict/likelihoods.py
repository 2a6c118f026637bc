"""What the outputs of a network say about targets: the log probability of a datum, and what is predicted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict.classification import ClassPrediction
from bayestrain.predict.prediction import Prediction
from bayestrain.predict.regression import RegressionPrediction


class Likelihood(nn.Module, ABC):
    """A distribution of the targets given the outputs of a network.

    `forward` and `describe` see the outputs of one particle and run under ``torch.func.vmap`` over many: no Python
    branch may depend on a tensor's values. Parameters of a likelihood are part of a particle, as the network's are.
    """

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(B,)``: the log probability of each datum."""

    @abstractmethod
    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """What one particle predicts for a batch; every tensor's first size is B."""

    @abstractmethod
    def prediction(self, described: Mapping[str, Tensor]) -> Prediction:
        """The prediction made of what all particles described, stacked: every tensor is ``(n, N, ..)``."""


class Classification(Likelihood):
    """Outputs are logits ``(B, C)``, targets class numbers ``(B,)``.

    Predictions are reported at `temperature`: below 1 is surer, above 1 less sure. Training knows nothing of it; see
    `fit_temperature`.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature must be above 0 and finite, got {temperature}.")
        self.temperature = float(temperature)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs)
        if targets.shape != outputs.shape[:1]:
            raise ShapeError(
                f"Targets must have shape {tuple(outputs.shape[:1])}, one class number per row of the outputs "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}. For one-hot rows type targets.argmax(1)."
            )
        if targets.is_floating_point():
            raise ConfigError(f"Targets must be whole class numbers, got {targets.dtype}. Type targets.long().")
        log_probs = _at_least_single(outputs).log_softmax(1)
        return log_probs.gather(1, targets.long()[:, None]).squeeze(1)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """``probabilities`` ``(B, C)``."""
        self._check(outputs)
        # In single precision a confident error has probability 0 from a logit gap of 104 on, and no log likelihood.
        precision = torch.float32 if outputs.device.type == "mps" else torch.float64
        return {"probabilities": outputs.to(precision).softmax(1)}

    def prediction(self, described: Mapping[str, Tensor]) -> ClassPrediction:
        """Of ``probabilities`` ``(n, N, C)``."""
        return ClassPrediction(described["probabilities"], self.temperature)

    def extra_repr(self) -> str:
        return "" if self.temperature == 1.0 else f"temperature={self.temperature:.4g}"

    def _check(self, outputs: Tensor) -> None:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ShapeError(
                "Classification needs outputs of shape (B, C), a logit for each of at least 2 classes, got "
                f"{tuple(outputs.shape)}. For a yes-or-no question give the network two outputs."
            )


class Regression(Likelihood):
    """Targets are the outputs, ``(B,)`` or ``(B, K)``, plus Gaussian noise, the same for all of them.

    `noise` is its standard deviation. None learns it: `log_variance` is then a parameter, each particle's own.
    """

    log_variance: nn.Parameter | None

    def __init__(self, noise: float | None = None) -> None:
        super().__init__()
        if noise is not None and not 0 < noise < math.inf:
            raise ConfigError(
                f"noise is a standard deviation and must be above 0 and finite, got {noise}. Leave it out to learn it."
            )
        self.noise = noise
        self.register_parameter("log_variance", nn.Parameter(torch.zeros(())) if noise is None else None)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs)
        if targets.shape != outputs.shape:
            raise ShapeError(
                f"Targets must have the shape of the outputs, {tuple(outputs.shape)}, got {tuple(targets.shape)}. "
                "For one output per datum type outputs.squeeze(1) in the network, or targets[:, None]."
            )
        outputs = _at_least_single(outputs)
        log_variance = self._log_variance(outputs)
        squares = (targets.to(outputs.dtype) - outputs).square()
        each = -0.5 * (squares * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi))
        return each.sum(1) if each.ndim == 2 else each

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """``mean`` and ``variance``, both of the outputs' shape."""
        self._check(outputs)
        outputs = _at_least_single(outputs)
        return {"mean": outputs, "variance": self._log_variance(outputs).exp().expand_as(outputs)}

    def prediction(self, described: Mapping[str, Tensor]) -> RegressionPrediction:
        """Of ``mean`` and ``variance``, both ``(n, N)`` or ``(n, N, K)``."""
        return RegressionPrediction(described["mean"], described["variance"])

    def extra_repr(self) -> str:
        return "noise learned" if self.noise is None else f"noise={self.noise}"

    def _log_variance(self, outputs: Tensor) -> Tensor:
        """A scalar, in the precision and on the device of the outputs."""
        if self.log_variance is not None:
            return self.log_variance.to(outputs.dtype)
        assert self.noise is not None
        return outputs.new_full((), 2 * math.log(self.noise))

    def _check(self, outputs: Tensor) -> None:
        if outputs.ndim not in (1, 2):
            raise ShapeError(
                f"Regression needs outputs of shape (B,) or (B, K), got {tuple(outputs.shape)}. "
                "Flatten what belongs to one datum: outputs.flatten(1)."
            )


def check_log_prob(values: object, batch: int) -> Tensor:
    """Refuse what a likelihood returned unless it is one log probability per datum."""
    if not isinstance(values, Tensor) or values.shape != (batch,):
        found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ShapeError(
            f"A likelihood must return the log probability of each datum, a tensor of shape ({batch},), got {found}. "
            'Sum over the outputs of a datum, never over the batch (reduction="none"), and mind the sign: '
            "log probabilities, not losses."
        )
    return values


def _at_least_single(values: Tensor) -> Tensor:
    """Half precision can hold neither sums of exponentials nor squares."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
