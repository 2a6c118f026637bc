"""``evaluation.safetensors``: predictions on the test set, uncertainty, the hardest images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bayestrain.errors import ReportError
from bayestrain.report.run import Evaluation, Uncertainty, no_images

Tensors = Mapping[str, NDArray[Any]]


def read_evaluation(path: Path) -> Evaluation | None:
    """The predictions, or None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return _evaluation(load_file(path))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ReportError(
            f"{path} is damaged or malformed ({error}). Delete it to leave the test images out of the report."
        ) from error


def _evaluation(tensors: Tensors) -> Evaluation:
    probabilities, labels = tensors["probabilities"].astype(np.float64), tensors["labels"].astype(np.int64)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        raise ValueError(f"probabilities {probabilities.shape} and labels {labels.shape} do not fit each other")
    hardest = tensors.get("hardest", np.zeros(0)).astype(np.int64)
    images = tensors.get("hardest_images", no_images()).astype(np.uint8)
    if images.ndim != 4 or len(images) != len(hardest) or (len(hardest) and hardest.max() >= len(labels)):
        raise ValueError(f"{len(hardest)} hardest indices and images of shape {images.shape} do not fit")
    uncertainty, ood = _uncertainty(tensors, ""), _uncertainty(tensors, "ood_")
    if uncertainty and len(uncertainty.total) != len(labels):
        raise ValueError(f"total has {len(uncertainty.total)} values for {len(labels)} labels")
    return Evaluation(
        probabilities,
        labels,
        hardest,
        images,
        _particles(tensors, (len(hardest), probabilities.shape[1])),
        uncertainty,
        ood,
        *_ood_images(tensors),
    )


def _particles(tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    """Each particle's probabilities of the hardest images."""
    stored = tensors.get("hardest_particle_probabilities")
    if stored is None or not stored.size:
        return None
    if stored.shape[1:] != shape:
        raise ValueError(f"hardest_particle_probabilities {stored.shape} must be (particles, {shape[0]}, {shape[1]})")
    particles = np.asarray(stored, dtype=np.float64)
    sums = particles[np.isfinite(particles).all(2)].sum(1)  # a particle that broke has none
    if len(sums) and float(np.abs(sums - 1).max()) > 1e-2:
        worst = float(sums[np.abs(sums - 1).argmax()])
        raise ValueError(f"hardest_particle_probabilities has rows that sum to {worst:.3g} instead of 1")
    return np.asarray(particles / particles.sum(2, keepdims=True))


def _uncertainty(tensors: Tensors, prefix: str) -> Uncertainty | None:
    names = [prefix + kind for kind in ("total", "aleatoric", "epistemic")]
    if not all(name in tensors for name in names):
        return None
    parts = [tensors[name].astype(np.float64) for name in names]
    if any(part.ndim != 1 or part.shape != parts[0].shape for part in parts):
        raise ValueError(f"{', '.join(names)} have shapes {', '.join(str(part.shape) for part in parts)}")
    usable = len(parts[0]) > 0 and all(bool(np.isfinite(part).all()) for part in parts)
    return Uncertainty(*parts) if usable else None


def _ood_images(tensors: Tensors) -> tuple[NDArray[np.uint8], NDArray[np.float64] | None]:
    images = tensors.get("ood_images", no_images()).astype(np.uint8)
    totals = tensors.get("ood_images_total")
    if images.ndim != 4 or (totals is not None and totals.shape != images.shape[:1]):
        raise ValueError(f"ood_images of shape {images.shape} and their totals do not fit")
    return images, None if totals is None else totals.astype(np.float64)
