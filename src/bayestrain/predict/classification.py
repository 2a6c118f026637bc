"""Class probabilities of all particles, and the uncertainty in and between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ShapeError
from bayestrain.predict.calibration import at_temperature
from bayestrain.predict.density import JointDensity, joint_density
from bayestrain.predict.metrics import LEAST, checked_labels, classification_metrics
from bayestrain.predict.prediction import Indices, joined, kept, rows, tails


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction:
    """N inputs, each with the probabilities that n particles give to C classes. Entropies are in nats.

    The particles' tensor keeps its precision; all that is computed from it is in double precision. A `temperature`
    other than 1 (`fit_temperature`) makes the probabilities that are reported, and their intervals, surer or less sure;
    what the particles say, one by one and as a mixture, and the uncertainties that follow from it, stay as they are.

    >>> ClassPrediction(torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]))  # each is sure, of different classes
    ClassPrediction(2 particles, 1 input, 2 classes; mean uncertainty 0.693 nats, 0.368 of it epistemic)
    """

    particle_probabilities: Tensor
    """``(n, N, C)``, each row sums to 1."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        probs = self.particle_probabilities
        if probs.ndim != 3 or probs.shape[0] < 1 or probs.shape[2] < 2:
            raise ShapeError(
                "Probabilities must have shape (particles, inputs, classes) with at least 1 particle and 2 classes, "
                f"got {tuple(probs.shape)}. For the (inputs, classes) of one network pass probabilities[None]."
            )
        probs = kept(probs, "probabilities")
        object.__setattr__(self, "particle_probabilities", probs)
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature must be above 0 and finite, got {self.temperature}.")
        tolerance = 1e-4 if probs.dtype in (torch.float32, torch.float64) else 1e-2
        sums = probs.sum(2, dtype=torch.float64)
        bad = ((sums - 1).abs() > tolerance) | (probs < 0).any(2) | sums.isnan()
        if bool(bad.any()):
            particle, index = (int(i) for i in bad.nonzero()[0])
            row = probs[particle, index].double()
            if bool(row.isnan().any()):
                raise ConfigError(
                    f"Probabilities must be numbers, got some that are not (particle {particle}, input {index}). Look "
                    "for inputs or weights that are not finite."
                )
            raise ConfigError(
                "Probabilities must be at least 0 and sum to 1 over the classes, got a row with smallest entry "
                f"{float(row.min()):.4g} and sum {float(row.sum()):.4g} (particle {particle}, input {index}). "
                "Pass logits through .softmax(-1) first."
            )

    def __len__(self) -> int:
        return self.particle_probabilities.shape[1]

    def __repr__(self) -> str:
        n, number, classes = self.particle_probabilities.shape
        size = f"{n} particle{'s' * (n != 1)}, {number} input{'s' * (number != 1)}, {classes} classes"
        if number == 0:
            return f"ClassPrediction({size})"
        total, epistemic = float(self.total.mean()), float(self.epistemic.mean())
        return f"ClassPrediction({size}; mean uncertainty {total:.3f} nats, {epistemic:.3f} of it epistemic)"

    @cached_property
    def mixture(self) -> Tensor:
        """``(N, C)``: the particles' mean."""
        return self.particle_probabilities.mean(0, dtype=torch.float64)

    @cached_property
    def mean(self) -> Tensor:
        """``(N, C)``: what the posterior predicts: the mixture, at the `temperature`."""
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
    def total(self) -> Tensor:
        """``(N,)``: the entropy of the mixture."""
        return _entropy(self.mixture)

    @cached_property
    def aleatoric(self) -> Tensor:
        """``(N,)``: the particles' mean entropy, the doubt that more training data would not remove."""
        # One particle at a time: the whole tensor in double precision may not fit.
        entropies = [_entropy(probs.double()) for probs in self.particle_probabilities]
        return torch.stack(entropies).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """``(N,)``: the mutual information of class and particle, the doubt because particles differ."""
        return (self.total - self.aleatoric).clamp_min(0)

    @property
    def disagreement(self) -> Tensor:
        """``(N,)``: the fraction of particles whose class is not that of the mean."""
        return (self.particle_probabilities.argmax(2) != self.classes).double().mean(0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper end, each ``(N, C)``, of the central `level` of the particles' probabilities per class.

        Each particle is brought to the `temperature`, as `mean` is; with more than two classes and few particles the
        mean may yet lie outside.
        """
        each = self.particle_probabilities
        if self.temperature != 1.0:
            each = torch.stack([at_temperature(probs.double(), self.temperature) for probs in each])
        ordered = each.sort(0).values  # torch.quantile refuses more than 16 million numbers
        low, high = (_quantile(ordered, q) for q in tails(level))
        return low, high

    def joint_density(self, index: int, classes: tuple[int, int] | None = None, grid: int = 100) -> JointDensity:
        """How the particles' probabilities of two classes of one input spread; by default of its two leading ones."""
        number = self.particle_probabilities.shape[2]
        if not -len(self) <= index < len(self):
            raise ConfigError(f"The index of an input must be below {len(self)}, got {index}. Try index=0.")
        if classes is None:
            first, second = self.mean[index].topk(2).indices.tolist()
        else:
            first, second = classes
        if first == second or not all(0 <= c < number for c in (first, second)):
            raise ConfigError(
                f"A joint density needs two different classes between 0 and {number - 1}, got {(first, second)}. "
                "Leave classes out for the two leading ones."
            )
        return joint_density(self.particle_probabilities[:, index, [first, second]], (first, second), grid)

    def log_likelihood(self, labels: Tensor) -> float:
        """Mean over the data of the log of the mean probability: what the posterior as a whole is worth."""
        labels = checked_labels(labels, self.mean)
        return float(self.mean.gather(1, labels[:, None]).clamp_min(LEAST).log().mean())

    def mean_log_likelihood(self, labels: Tensor) -> float:
        """Mean over the particles of each one's log likelihood (the paper's figure); never above the mixture's."""
        return float(self.particle_log_likelihood(labels).mean())

    def particle_log_likelihood(self, labels: Tensor) -> Tensor:
        """Each particle's own log likelihood, mean over the data: (n,), in double precision."""
        n, number, _ = self.particle_probabilities.shape
        labels = checked_labels(labels, self.particle_probabilities)
        of_label = self.particle_probabilities.gather(2, labels.expand(n, number)[..., None])
        return of_label.double().clamp_min(LEAST).log().mean((1, 2))

    def metrics(self, labels: Tensor) -> dict[str, float]:
        """Accuracy, both log likelihoods, expected calibration error and Brier score."""
        of_mean = classification_metrics(self.mean, labels)
        return {
            "accuracy": of_mean["accuracy"],
            "log_likelihood": of_mean["log_likelihood"],
            "mean_log_likelihood": self.mean_log_likelihood(labels),
            "ece": of_mean["ece"],
            "brier": of_mean["brier"],
        }

    def subset(self, indices: Indices) -> ClassPrediction:
        """The same for some of the inputs."""
        return ClassPrediction(rows(self.particle_probabilities, indices), self.temperature)

    @staticmethod
    def cat(predictions: Sequence[ClassPrediction]) -> ClassPrediction:
        """Batches of one posterior's predictions, one after the other."""
        if len({prediction.temperature for prediction in predictions}) > 1:
            raise ConfigError("Predictions at different temperatures are not those of one posterior.")
        probs = joined([prediction.particle_probabilities for prediction in predictions])
        return ClassPrediction(probs, predictions[0].temperature)


def _entropy(probs: Tensor) -> Tensor:
    """In nats, over the last dimension; classes of probability 0 count nothing."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1).clamp_min(0)


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """Of values in order along the first dimension, linear between neighbours, in double precision."""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below].double(), ordered[above].double(), position - below)
