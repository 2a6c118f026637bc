"""The most uncertain test images, with what the network thought of them."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bayestrain.report.figures.density import density_plot
from bayestrain.report.run import Evaluation, Run
from bayestrain.report.svg import Plot


@dataclass(frozen=True)
class Guess:
    """One class and its probability."""

    name: str
    probability: float
    true: bool


@dataclass(frozen=True)
class Picture:
    """A test image as a data address, its true class and the classes the network thought likeliest."""

    source: str
    width: int
    height: int
    index: int
    truth: str
    right: bool
    guesses: tuple[Guess, ...]


@dataclass(frozen=True)
class Doubt:
    """A picture beside the joint density of its two leading classes; `epistemic` in nats."""

    picture: Picture
    plot: Plot
    epistemic: float


@dataclass(frozen=True)
class Stranger:
    """An image of another data set; `total` uncertainty in nats where known."""

    source: str
    width: int
    height: int
    total: float | None


def hardest_pictures(run: Run, guesses: int = 3) -> list[Picture]:
    """The run's most uncertain images, as it ordered them; the true class is always among the guesses shown."""
    evaluation = run.evaluation
    if evaluation is None:
        return []
    return [_picture(run, evaluation, place, guesses) for place in range(len(evaluation.hardest))]


def doubts(run: Run, most: int = 9) -> list[Doubt]:
    """Those of the most uncertain images on which the particles disagree most."""
    evaluation = run.evaluation
    if evaluation is None or evaluation.particles is None:
        return []
    particles = evaluation.particles[np.isfinite(evaluation.particles).all((1, 2))]
    if len(particles) < 2:
        return []
    epistemic = _entropy(particles.mean(0)) - _entropy(particles).mean(0)
    single = run.map.evaluation.probabilities if run.map and run.map.evaluation else None
    found = []
    for place in np.argsort(-epistemic, kind="stable")[:most].tolist():
        index = int(evaluation.hardest[place])
        plot = density_plot(
            f"density-{place + 1}", particles[:, place], run.classes, None if single is None else single[index]
        )
        found.append(Doubt(_picture(run, evaluation, place, 3), plot, float(epistemic[place])))
    return found


def strangers(run: Run, most: int = 10) -> list[Stranger]:
    """Some images of the other data set."""
    evaluation = run.evaluation
    if evaluation is None:
        return []
    totals = evaluation.ood_images_total
    return [
        Stranger(data_address(pixels), pixels.shape[2], pixels.shape[1], None if totals is None else float(totals[k]))
        for k, pixels in enumerate(evaluation.ood_images[:most])
    ]


def _picture(run: Run, evaluation: Evaluation, place: int, guesses: int) -> Picture:
    def name(label: int) -> str:
        return run.classes[label] if label < len(run.classes) else str(label)

    index, pixels = int(evaluation.hardest[place]), evaluation.images[place]
    probabilities, truth = evaluation.probabilities[index], int(evaluation.labels[index])
    order = np.argsort(-probabilities, kind="stable").tolist()
    top = order[:guesses] if truth in order[:guesses] else [*order[: guesses - 1], truth]
    shown = tuple(Guess(name(label), float(probabilities[label]), label == truth) for label in top)
    height, width = pixels.shape[1:]
    return Picture(data_address(pixels), width, height, index, name(truth), order[0] == truth, shown)


def _entropy(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum(-1))


def data_address(pixels: NDArray[np.uint8]) -> str:
    """Pixels (channels, height, width) as a PNG in a ``data:`` address; the page enlarges it without blurring."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
