"""Random changes to whole batches of images, on the device of the batch.

Every function takes and returns a batch (N, C, H, W) and draws one random number or pair per image from `generator`.
The generator may live on another device than the images: one CPU generator gives the same augmentation everywhere.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from bayestrain.errors import ConfigError


def pad_crop(images: Tensor, pad: int, generator: Generator | None = None) -> Tensor:
    """Pad every side with `pad` zeros and crop a random window of the original size from each image.

    The offset of the window is uniform on 0 ... 2 pad, independently for rows and columns.
    """
    n, _, height, width = _checked(images).shape
    top, left = _integers(images, 2 * pad + 1, generator), _integers(images, 2 * pad + 1, generator)
    padded = F.pad(images, (pad, pad, pad, pad))
    image = torch.arange(n, device=images.device)[:, None, None]  # (N, 1, 1)
    rows = (top[:, None] + torch.arange(height, device=images.device))[:, :, None]  # (N, H, 1)
    columns = (left[:, None] + torch.arange(width, device=images.device))[:, None, :]  # (N, 1, W)
    # The three indices broadcast to (N, H, W); the channels, sliced between them, come last.
    return padded[image, :, rows, columns].permute(0, 3, 1, 2).contiguous()


def shift(images: Tensor, pixels: int, generator: Generator | None = None) -> Tensor:
    """Move each image by up to `pixels` along each axis, uniformly, and fill with zeros: `pad_crop` for digits."""
    return pad_crop(images, pixels, generator)


def flip(images: Tensor, generator: Generator | None = None) -> Tensor:
    """Mirror each image left to right with probability one half."""
    mirrored = _integers(_checked(images), 2, generator).bool()
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def cutout(images: Tensor, side: int, generator: Generator | None = None) -> Tensor:
    """Set a square of `side` pixels to zero in each image, its centre anywhere in it (DeVries & Taylor 2017)."""
    inside = []
    for length in _checked(images).shape[2:]:
        first = _integers(images, length, generator)[:, None] - side // 2
        position = torch.arange(length, device=images.device)
        inside.append((position >= first) & (position < first + side))  # (N, length)
    rows, columns = inside
    return images.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0.0)


def _integers(images: Tensor, high: int, generator: Generator | None) -> Tensor:
    """Draw one integer of 0 ... high - 1 per image on the generator's device and move it to the images."""
    device = images.device if generator is None else generator.device
    return torch.randint(high, (images.shape[0],), generator=generator, device=device).to(images.device)


def _checked(images: Tensor) -> Tensor:
    if images.dim() != 4:
        raise ConfigError(
            f"augmentation takes a batch of images (N, C, H, W), not a tensor of shape {tuple(images.shape)}. "
            "For one image, add the batch axis with image[None]"
        )
    return images
