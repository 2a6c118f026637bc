"""The data of the three experiments: held-out images, normalisation, and augmentation on the device of the batch.

Random numbers come from torch's CPU generator, so that a seed gives the same augmentation on every device and a resumed
run continues in the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayestrain.app.data import Images
from paper import augment, fetch
from paper.published import PAPER

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PaperData:
    """What a run is trained, watched and tested on; `outside` are images of another kind, for uncertainty.

    All seeds hold out the same images. `mean` and `std` are what the images are normalised with.
    """

    train: Images
    validation: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    outside: Images | None = None


def mnist() -> PaperData:
    """MNIST, pixels in [0, 1]; training images shifted by up to one pixel."""
    return _prepared("mnist", lambda x: augment.shift(x, 1, torch.default_generator), normalize=False)


def mnist_plain() -> PaperData:
    """MNIST, pixels in [0, 1], without augmentation."""
    return _prepared("mnist", normalize=False)


def mnist_beside() -> PaperData:
    """MNIST as `mnist`, beside Fashion-MNIST."""
    return _beside_fashion(mnist())


def mnist_plain_beside() -> PaperData:
    """MNIST as `mnist_plain`, beside Fashion-MNIST."""
    return _beside_fashion(mnist_plain())


def cifar10() -> PaperData:
    """CIFAR-10, normalised; training images cropped and mirrored at random."""
    return _prepared("cifar10", crop_and_flip)


def cifar10_beside() -> PaperData:
    """CIFAR-10 as `cifar10`, beside its test images with their patches shuffled."""
    return _beside_patches(cifar10())


def cifar10_cutout() -> PaperData:
    """CIFAR-10 as `cifar10`, with a random square of 8 pixels of every training image set to the mean."""
    return _prepared("cifar10", crop_and_flip, lambda x: augment.cutout(x, 8, torch.default_generator))


def cifar10_cutout_beside() -> PaperData:
    """CIFAR-10 as `cifar10_cutout`, beside its test images with their patches shuffled."""
    return _beside_patches(cifar10_cutout())


def crop_and_flip(x: Tensor) -> Tensor:
    """Pad by 4 pixels, crop a random window, mirror half of the images."""
    return augment.flip(augment.pad_crop(x, 4, torch.default_generator), torch.default_generator)


def shuffled_patches(images: Tensor, side: int = 4, seed: int = 0) -> Tensor:
    """Images cut into `side` x `side` patches that are put together in a random order; a rest at the edges stays."""
    n, channels, height, width = images.shape
    tall, wide = height // side, width // side
    inner = images[:, :, : tall * side, : wide * side]
    patches = inner.reshape(n, channels, side, tall, side, wide).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(n, side**2, channels, tall, wide)
    order = torch.rand(n, side**2, generator=torch.Generator().manual_seed(seed)).argsort(1)
    mixed = patches[torch.arange(n)[:, None], order].reshape(n, side, side, channels, tall, wide)
    found = images.clone()
    found[:, :, : tall * side, : wide * side] = mixed.permute(0, 3, 1, 4, 2, 5).reshape(inner.shape)
    return found


def _beside_fashion(found: PaperData) -> PaperData:
    return replace(found, outside=_named(fetch.load("fashion-mnist").test, "fashion-mnist"))


def _beside_patches(found: PaperData) -> PaperData:
    test = found.test
    return replace(found, outside=_named(Images(shuffled_patches(test.images), test.labels, test.augment), "patches"))


def _named(images: Images, name: str) -> Images:
    """The images with a name, by which a run records how well they are told from the test images."""
    images.name = name
    return images


def _prepared(
    name: str, before: Change | None = None, after: Change | None = None, *, normalize: bool = True
) -> PaperData:  # fmt: skip
    """Training images are changed `before` and `after` they are normalised, the others only normalised."""
    splits = fetch.load(name)
    held_out = PAPER["mnist" if name == "mnist" else "cifar10-cnn"].held_out
    train, validation = splits.train.split(held_out, seed=0)
    scale = splits.normalize if normalize else None
    changes = [change for change in (before, scale, after) if change is not None]

    def prepare(x: Tensor) -> Tensor:
        for change in changes:
            x = change(x)
        return x

    scaled = (splits.mean, splits.std) if normalize else (None, None)
    return PaperData(
        train.augmented(prepare), validation.augmented(scale), splits.test.augmented(scale), splits.classes, *scaled
    )  # fmt: skip
