"""The most uncertain test images, with what the network thought of them."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bayestrain.report.run import Run


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


def hardest_pictures(run: Run, guesses: int = 3) -> list[Picture]:
    """The run's most uncertain images, as it ordered them; the true class is always among the guesses shown."""
    evaluation = run.evaluation
    if evaluation is None:
        return []

    def name(label: int) -> str:
        return run.classes[label] if label < len(run.classes) else str(label)

    pictures = []
    for index, pixels in zip(evaluation.hardest.tolist(), evaluation.images, strict=True):
        probabilities, truth = evaluation.probabilities[index], int(evaluation.labels[index])
        order = np.argsort(-probabilities, kind="stable").tolist()
        top = order[:guesses] if truth in order[:guesses] else [*order[: guesses - 1], truth]
        shown = tuple(Guess(name(label), float(probabilities[label]), label == truth) for label in top)
        height, width = pixels.shape[1:]
        pictures.append(Picture(data_address(pixels), width, height, index, name(truth), order[0] == truth, shown))
    return pictures


def data_address(pixels: NDArray[np.uint8]) -> str:
    """Pixels (channels, height, width) as a PNG in a ``data:`` address; the page enlarges it without blurring."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
