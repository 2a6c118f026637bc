"""How probable targets are given the outputs of a network, and what those outputs predict."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.infer.anchored import normals
from bayestrain.posterior.prediction import (
    ClassPrediction,
    Prediction,
    RegressionPrediction,
    check_temperature,
    checked_labels,
    checked_targets,
    gaussian_log_prob,
)  # fmt: skip

LogProb = Callable[[Tensor, Tensor], Tensor]
"""``(outputs, targets) -> (B,)``: the log probability of each datum."""


class Likelihood(nn.Module, ABC):
    """A distribution of the targets given the outputs of a network.

    The log probability of a datum is a sum over all that belongs to it: outputs, tokens, pixels. Then the prior, which
    counts data, has its right strength for any number of them; with a mean it would be as many times too strong.

    ``-likelihood.log_prob(model(x), y).mean()`` is the loss of one network. A posterior runs `forward` and `describe`
    under `torch.vmap`, so they must not branch on values; a likelihood's parameters are part of each particle.
    """

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log probability of each datum, ``(B,)``: a sum over its outputs."""

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return what one network predicts for a batch; the first size of every tensor is B."""
        return {"outputs": outputs}

    def prediction(self, described: Mapping[str, Tensor]) -> Prediction:  # noqa: ARG002
        """Build the prediction from what all particles described, stacked: every tensor is ``(n, N, ...)``."""
        raise ConfigError(
            "This likelihood does not say what to predict. Use posterior.outputs(x), or write a Likelihood with "
            "describe() and prediction()."
        )

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:  # noqa: ARG002
        """Return the expected log probability ``(B,)`` of targets drawn as a teacher's outputs predict them."""
        raise ConfigError("This likelihood cannot learn from a teacher. Give it a method taught(outputs, teacher).")

    def perturbed(self, outputs: Tensor, targets: Tensor, keys: Tensor) -> Tensor:
        """Return the log probabilities ``(B,)`` with what is random in them determined by `keys` ``(B,)``.

        Their gradients must vary as those of new data would. Here data have weights as in the Bayesian bootstrap.
        """
        weights: Tensor = -torch.special.ndtr(normals(keys, ())).log()  # Exponential(1)
        found: Tensor = weights * self(full_precision(outputs), targets)
        return found

    @property
    def predicts(self) -> bool:
        """Whether it says what to predict."""
        return type(self).prediction is not Likelihood.prediction

    def log_prob(self, outputs: object, targets: Tensor) -> Tensor:
        """Return `forward`, having checked what the network and `forward` returned."""
        values = self(full_precision(one_tensor(outputs)), targets)
        if not isinstance(values, Tensor) or values.shape != (len(targets),):
            raise ShapeError(
                f"A likelihood must return the log probability of each datum, shape ({len(targets)},), got "
                f"{getattr(values, 'shape', values)}. Sum over what belongs to one datum (outputs, tokens, pixels), as "
                'in values.flatten(1).sum(1), not over the batch (reduction="none"), and return no losses.'
            )
        return values


class Classification(Likelihood):
    """Outputs are logits ``(B, C)``, targets class numbers ``(B,)``.

    Predictions are reported at `temperature` (below 1 sharpens, see `fit_temperature`), which training ignores.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        check_temperature(temperature)
        self.temperature = float(temperature)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self._check(outputs)
        # On a GPU, reading labels would make every step wait.
        labels = checked_labels(targets, outputs, read=targets.device.type == "cpu")
        return full_precision(outputs).log_softmax(1).gather(1, labels[:, None]).squeeze(1)

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        self._check(outputs)
        return (full_precision(teacher).softmax(1) * full_precision(outputs).log_softmax(1)).sum(1)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``probabilities`` ``(B, C)``."""
        self._check(outputs)
        # In single precision a probability underflows at a logit gap of 104, and its log likelihood is lost.
        precision = torch.float32 if outputs.device.type == "mps" else torch.float64
        return {"probabilities": outputs.to(precision).softmax(1)}

    def prediction(self, described: Mapping[str, Tensor]) -> ClassPrediction:
        return ClassPrediction(described["probabilities"], self.temperature)

    def _check(self, outputs: Tensor) -> None:
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise ShapeError(
                "Classification needs outputs of shape (B, C), a logit for each of at least 2 classes, got "
                f"{tuple(outputs.shape)}. For a yes-or-no question give the network two outputs; for tokens or pixels "
                "pass a function that sums over them: lambda outputs, targets: -F.cross_entropy(outputs, targets, "
                'reduction="none").flatten(1).sum(1), with outputs (B, C, ..) and targets (B, ..).'
            )


class Regression(Likelihood):
    """Targets are the outputs, ``(B,)`` or ``(B, K)``, plus Gaussian noise of one standard deviation.

    Args:
        noise: the standard deviation. None learns it: `log_variance` is then a parameter of each particle.
    """

    log_variance: Tensor

    def __init__(self, noise: float | None = None) -> None:
        super().__init__()
        if noise is not None and not 0 < noise < math.inf:
            raise ConfigError(f"noise is a standard deviation, positive and finite, got {noise}. Omit it to learn it.")
        self.noise = noise
        if noise is None:
            self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.describe(outputs).values()
        return gaussian_log_prob(checked_targets(targets, outputs.shape).to(mean.dtype), mean, variance)

    def taught(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return self.forward(outputs, full_precision(teacher))

    def perturbed(self, outputs: Tensor, targets: Tensor, keys: Tensor) -> Tensor:
        """Return log probabilities of targets with noise added; the noise itself is learned from those without."""
        mean, variance = self.describe(outputs).values()
        targets, known = checked_targets(targets, outputs.shape).to(mean.dtype), variance.detach()
        noisy = targets + known.sqrt() * normals(keys, mean.shape[1:])
        found = gaussian_log_prob(noisy, mean, known)
        return found if self.noise is not None else found + gaussian_log_prob(targets, mean.detach(), variance)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``mean`` and ``variance``, both in the outputs' shape."""
        if outputs.ndim not in (1, 2):
            raise ShapeError(
                f"Regression needs outputs of shape (B,) or (B, K), got {tuple(outputs.shape)}. "
                "Flatten what belongs to one datum: outputs.flatten(1)."
            )
        mean = full_precision(outputs)
        if self.noise is not None:
            return {"mean": mean, "variance": torch.full_like(mean, self.noise**2)}
        return {"mean": mean, "variance": self.log_variance.to(mean.dtype).exp().expand_as(mean)}

    def prediction(self, described: Mapping[str, Tensor]) -> RegressionPrediction:
        return RegressionPrediction(described["mean"], described["variance"])


class FunctionLikelihood(Likelihood):
    """A plain function as a likelihood: enough to train, not to predict."""

    def __init__(self, function: LogProb) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)


def as_likelihood(likelihood: Likelihood | LogProb | str) -> Likelihood:
    """Return the likelihood that "classification", "regression", a `Likelihood` or a function stands for."""
    if likelihood in ("classification", "regression"):
        return Classification() if likelihood == "classification" else Regression()
    if isinstance(likelihood, str) or not callable(likelihood):
        raise ConfigError(
            'likelihood must be "classification", "regression", a Likelihood, or a function (outputs, targets) -> log '
            f"probability of each datum, got {likelihood!r}."
        )
    return likelihood if isinstance(likelihood, Likelihood) else FunctionLikelihood(likelihood)


def one_tensor(outputs: object) -> Tensor:
    """Return what a network returned, or raise if that is not a tensor."""
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"The network must return one tensor, got {type(outputs).__name__}. Wrap it in a module that selects one."
        )
    return outputs


def full_precision(values: Tensor) -> Tensor:
    """Convert half precision to single: it holds neither sums of exponentials nor squares."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
