"""Images unlike those a network was trained on, and how well its uncertainty tells them apart."""

from __future__ import annotations

import torch

from bayestrain import data
from bayestrain.data import Images, Splits
from bayestrain.predict import ClassPrediction, auroc

PATCHES = 4
"""Each side of an image is cut into so many patches."""


def outside_images(name: str, splits: Splits, seed: int) -> Images | None:
    """The images that `posterior.outside` names: none, shuffled patches of the test images, or another test set."""
    if name == "none":
        return None
    if name != "patches":
        return data.load(name).test
    images = splits.test.images
    n, channels, height, width = images.shape
    tall, wide = height // PATCHES, width // PATCHES
    cropped = images[:, :, : tall * PATCHES, : wide * PATCHES]
    patches = cropped.reshape(n, channels, PATCHES, tall, PATCHES, wide).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(n, PATCHES**2, channels, tall, wide)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(n, PATCHES**2, generator=generator).argsort(1)
    shuffled = patches[torch.arange(n)[:, None], order].reshape(n, PATCHES, PATCHES, channels, tall, wide)
    mixed = images.clone()
    mixed[:, :, : tall * PATCHES, : wide * PATCHES] = shuffled.permute(0, 3, 1, 4, 2, 5).reshape(cropped.shape)
    return Images(mixed, splits.test.labels)


def told_apart(name: str, inside: ClassPrediction, outside: ClassPrediction) -> dict[str, object]:
    """How well uncertainty ranks outside images above test images: area under the ROC curve, 1 is perfect."""
    return {
        "name": name,
        "auroc": auroc(inside.total, outside.total),
        "auroc_epistemic": auroc(inside.epistemic, outside.epistemic),
    }
