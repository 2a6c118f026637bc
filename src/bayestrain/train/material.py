"""The images of a run: to train on, to hold out, to test on, and to be unsure of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain import data
from bayestrain.data import Images, Splits
from bayestrain.train.config import DataConfig, RunConfig

PATCHES = 4
"""Each side of an image is cut into so many patches."""


@dataclass(frozen=True)
class Material:
    """All images of a run; `outside` are unlike the training data, None if the config names none."""

    splits: Splits
    train: Images
    validation: Images | None
    outside: Images | None


def load_material(config: RunConfig, with_outside: bool) -> Material:
    """Load and split what the config names."""
    splits = data.load(config.data.name, config.data.folder or None)
    if not config.data.normalize:
        splits = dataclasses.replace(splits, mean=(0.0,) * len(splits.mean), std=(1.0,) * len(splits.std))
    train, validation = splits.train, None
    if config.data.validation_fraction:
        train, validation = splits.train.split(config.data.validation_fraction, seed=config.experiment.seed)
    outside = outside_images(config.posterior.outside, splits, config.experiment.seed) if with_outside else None
    return Material(splits, train, validation, outside)


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


def augmentation(config: DataConfig, splits: Splits) -> Callable[[Tensor, torch.Generator], Tensor]:
    """What happens to a training batch on the device: crop, shift, flip, normalisation, cutout."""
    normalize = data.normalizer(splits.mean, splits.std)

    def augment(images: Tensor, generator: torch.Generator) -> Tensor:
        if config.pad_crop:
            images = data.pad_crop(images, config.pad_crop, generator)
        if config.shift:
            images = data.shift(images, config.shift, generator)
        if config.flip:
            images = data.flip(images, generator)
        images = normalize(images)
        return data.cutout(images, config.cutout, generator) if config.cutout else images

    return augment
