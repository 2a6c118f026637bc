"""What a run folder holds, as plain data. `load` fills it; the figures read it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Diagnostics:
    """How the particles stand to each other; None where the method has no such figure."""

    bandwidth: float | None = None
    kernel_mass: float | None = None
    effective_particles: float | None = None
    disagreement: float | None = None
    ksd: float | None = None


@dataclass(frozen=True)
class Epoch:
    """One line of ``history.jsonl``. `ranks` are the inner ones, one per bond."""

    epoch: int
    phase: str
    params: int | None
    train_loss: float | None
    train_accuracy: float | None
    validation_accuracy: float | None
    ranks: dict[str, tuple[int, ...]]
    lambdas: dict[str, list[list[float]]]
    validation_log_likelihood: float | None = None
    validation_mean_log_likelihood: float | None = None
    diagnostics: Diagnostics | None = None


@dataclass(frozen=True)
class Layer:
    """One layer: `ranks` and `max_ranks` are inner ranks, empty for a layer left dense.

    `dense`, `start` and `now` count parameters: as an ordinary layer, at the maximal ranks, and at the end.
    `sizes` are the sizes of the cores between the bonds, where known.
    """

    name: str
    ranks: tuple[int, ...] = ()
    max_ranks: tuple[int, ...] = ()
    dense: int | None = None
    start: int | None = None
    now: int | None = None
    sizes: tuple[int, ...] = ()
    modes: str = ""


@dataclass(frozen=True)
class Spectra:
    """Singular values per layer and bond just before the final cut, and the ranks it kept.

    `tol` is the tolerance of the rounding; of a run whose `rule` is "lambda" it is the threshold on lambda. `earlier`
    are those that training cut on the way, relative to the largest of the bond at that moment. `change` is
    the most that a cut changed of a weight, where a size was asked for; else None.
    """

    tol: float
    bonds: dict[str, list[list[float]]]
    cut: dict[str, tuple[int, ...]]
    earlier: dict[str, list[list[float]]]
    change: float | None = None

    def all_values(self, name: str) -> list[list[float]]:
        """A layer's singular values per bond, those that training cut on the way at the end."""
        return [
            values + [share * values[0] for share in sorted(cut, reverse=True)]
            for values, cut in zip(self.bonds[name], self.earlier[name], strict=True)
        ]


@dataclass(frozen=True)
class Uncertainty:
    """Per image, in nats: the entropy of the mean answer, the part each particle has, the part they disagree on."""

    total: NDArray[np.float64]
    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]


def no_images() -> NDArray[np.uint8]:
    """No image at all."""
    return np.zeros((0, 1, 1, 1), np.uint8)


@dataclass(frozen=True)
class Evaluation:
    """Predictions on the test set, and its most uncertain images.

    Only several particles have an `uncertainty`, and `particles`: their probabilities (particles, images, classes) of
    the hardest images. `ood` is the uncertainty on images of another data set.
    """

    probabilities: NDArray[np.float64]
    labels: NDArray[np.int64]
    hardest: NDArray[np.int64]
    images: NDArray[np.uint8]
    particles: NDArray[np.float64] | None = None
    uncertainty: Uncertainty | None = None
    ood: Uncertainty | None = None
    ood_images: NDArray[np.uint8] = field(default_factory=no_images)
    ood_images_total: NDArray[np.float64] | None = None

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which images are classified right."""
        return np.asarray(self.probabilities.argmax(1) == self.labels)

    def at(self, temperature: float) -> "Evaluation":
        """The same with every answer at a temperature."""
        sharp = self.probabilities ** (1 / temperature)
        return replace(self, probabilities=sharp / sharp.sum(1, keepdims=True))

    @property
    def entropy(self) -> NDArray[np.float64]:
        """Entropy of each answer in nats: the total uncertainty."""
        p = self.probabilities
        return np.asarray(-(p * np.log(np.maximum(p, 1e-12))).sum(1))


@dataclass(frozen=True)
class Scores:
    """The headline figures; None where the run has none (yet)."""

    dense_params: int | None = None
    params: int | None = None
    accuracy: float | None = None
    log_likelihood: float | None = None
    ece: float | None = None
    brier: float | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    temperature: float | None = None
    """What the held-out images ask for; what is calibrated is taken at it."""
    calibrated_ece: float | None = None
    calibrated_log_likelihood: float | None = None
    calibrated_brier: float | None = None

    def at_their_temperature(self) -> "Scores":
        """A single network's figures at its own temperature, if it has one."""
        if self.temperature is None:
            return self
        return replace(
            self, ece=self.calibrated_ece, log_likelihood=self.calibrated_log_likelihood, brier=self.calibrated_brier
        )

    @property
    def ratio(self) -> float | None:
        """How many times smaller than the dense network."""
        return self.dense_params / self.params if self.dense_params and self.params else None


@dataclass(frozen=True)
class Ood:
    """How well uncertainty tells images of another data set from the test images."""

    name: str
    auroc: float | None
    auroc_epistemic: float | None


@dataclass(frozen=True)
class Posterior:
    """Several particles. `own_ranks` has, per layer and inner bond, the rank that each would need alone."""

    method: str
    particles: int
    start: str = ""
    mean_log_likelihood: float | None = None
    accuracies: tuple[float | None, ...] = ()
    log_likelihoods: tuple[float | None, ...] = ()
    own_ranks: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    within_one: tuple[int, int] | None = None
    """On how many bonds, of how many, the particles' own ranks lie within one of each other."""
    diagnostics: Diagnostics | None = None
    temperature: float | None = None
    plain_ece: float | None = None
    """Calibration error without the temperature."""
    plain_log_likelihood: float | None = None
    map_calibrated_ece: float | None = None
    """The MAP point's calibration error at a temperature found in the same way."""


@dataclass(frozen=True)
class MapRun:
    """The same network trained to a single point, for comparison."""

    scores: Scores
    ood_auroc: float | None = None
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Begun:
    """The finished run whose network a run began with, and how long that had been trained."""

    run: str
    params: int | None
    epochs: int | None
    seconds: float | None

    @property
    def sentence(self) -> str:
        """In words, with what is known of it."""
        known = [f"of {self.params:,} parameters"] if self.params is not None else []
        if self.epochs is not None:
            known.append(f"trained for {self.epochs} {'epoch' if self.epochs == 1 else 'epochs'}")
        return ", ".join([f"The training went on from {self.run}", *known]) + "."


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    experiment: str
    preset: str
    kind: str
    """"low-rank", "tensorized" or "dense"."""
    rule: str
    """How the final ranks were found: by "rounding", or by the paper's threshold on "lambda"."""
    round_tol: float | None
    """The tolerance set; `Spectra.tol` is the one used: finer if a ratio was asked for and epochs were left."""
    target_ratio: float | None
    """How many times smaller it had to be, if that was asked for."""
    seed: int | None
    finished: bool
    total_epochs: int | None
    begun: Begun | None
    """None if it began with a network of its own."""
    scores: Scores
    layers: tuple[Layer, ...]
    history: tuple[Epoch, ...]
    spectra: Spectra | None
    evaluation: Evaluation | None
    posterior: Posterior | None
    map: MapRun | None
    ood: Ood | None
    warnings: tuple[str, ...]
    classes: tuple[str, ...]
    config_text: str
    environment: dict[str, str]
    commits: str
    """The commit of the source, of a run in several parts all of them in their order; whether it was changed."""
    command: str
    device: str
    evaluated_on: str
    """The device on which its figures were taken anew, if they were."""
    missing: tuple[str, ...]
    """Files that were not there; the page says what it leaves out."""

    @property
    def rival(self) -> MapRun | None:
        """The MAP run as the posterior is compared with it: at its own temperature if the posterior is at one."""
        if self.map is None or self.posterior is None or self.posterior.temperature in (None, 1.0):
            return self.map
        scores, evaluation = self.map.scores, self.map.evaluation
        if evaluation is not None and scores.temperature is not None:
            evaluation = evaluation.at(scores.temperature)
        return replace(self.map, scores=scores.at_their_temperature(), evaluation=evaluation)

    @property
    def tensor_layers(self) -> tuple[Layer, ...]:
        """The layers with bonds."""
        return tuple(layer for layer in self.layers if layer.ranks)

    @property
    def sought(self) -> bool:
        """Whether this training sought ranks: not of other kinds, nor around a MAP point that had found them."""
        around = self.posterior is not None and self.posterior.start == "jitter"
        return self.kind not in ("dense", "tensorized") and not around

    @property
    def sized(self) -> float | None:
        """The most that a cut changed of a weight, if the size that was asked for took more than a rounding would."""
        change = self.spectra.change if self.spectra is not None else None
        return change if change is not None and change > (self.round_tol or 0.0) else None

    @property
    def reached(self) -> bool:
        """Whether the search itself reached the size that was asked for."""
        return self.spectra is not None and self.spectra.change is not None and self.sized is None

    @property
    def path(self) -> tuple[Epoch, ...]:
        """The epochs; if the search was the last of them, also what the final cut left, within the last epoch."""
        last = self.history[-1] if self.history else None
        if last is None or last.phase != "search" or not self.finished or not self.sought:
            return self.history
        ranks = {layer.name: layer.ranks for layer in self.tensor_layers}
        end = replace(last, ranks=ranks, params=self.scores.params, lambdas={}, train_accuracy=None)
        return (*self.history, replace(end, validation_accuracy=None))

    @property
    def finetune_start(self) -> int | None:
        """Epoch after which the ranks are fixed, or None."""
        tuned = [record.epoch for record in self.history if record.phase == "finetune"]
        return min(tuned) - 1 if tuned else None
