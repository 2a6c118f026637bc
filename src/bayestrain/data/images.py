"""Images and labels in memory: a PyTorch `Dataset` that also serves whole batches fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from bayestrain.errors import ConfigError, DataError

BLOCK_BYTES = 32 * 2**20
"""How much of an epoch, as float images, a GPU prepares at once."""


class Images(Dataset[tuple[Tensor, int]]):
    """Labelled images: `images` is uint8 (N, C, H, W), `labels` int64 (N,).

    Indexing with an int gives (float image in [0, 1], int label), so an ordinary `DataLoader` works.
    `batches` does the same a batch at a time, without touching single images in Python.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if not (isinstance(images, Tensor) and isinstance(labels, Tensor)):
            wrong = images if not isinstance(images, Tensor) else labels
            raise DataError(f"images and labels must be tensors, not {type(wrong).__name__}. Type torch.as_tensor(..).")
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(f"images must be uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"labels must be int64 ({len(images)},), one per image, not {labels.dtype} {tuple(labels.shape)}"
            )
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])

    def __repr__(self) -> str:
        return f"Images({len(self)} of shape {tuple(self.images.shape[1:])} on {self.images.device})"

    def to(self, device: torch.device | str) -> Images:
        """The same images held on `device`; `batches` then copies nothing between devices."""
        return Images(self.images.to(device), self.labels.to(device))

    def subset(self, indices: Tensor | Sequence[int]) -> Images:
        """The images at `indices`, in that order, as a new set."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return Images(self.images[chosen], self.labels[chosen])

    def split(self, fraction: float, seed: int) -> tuple[Images, Images]:
        """(rest, held out): put `fraction` of every class aside, for example for validation.

        Which images are held out depends only on the labels, `fraction` and `seed`. Both parts keep the order
        of this set.
        """
        if not 0 < fraction < 1:
            raise ConfigError(f"fraction, the part held out, must lie strictly between 0 and 1, not {fraction}")
        generator = torch.Generator().manual_seed(seed)
        labels = self.labels.cpu()
        held_out = torch.zeros(len(self), dtype=torch.bool)
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1)
            shuffled = members[torch.randperm(len(members), generator=generator)]
            held_out[shuffled[: round(fraction * len(members))]] = True
        if held_out.all() or not held_out.any():
            raise ConfigError(
                f"holding out the fraction {fraction} of each class of {len(self)} images leaves a part empty. "
                "Use a fraction nearer to 0.5, or more images"
            )
        return self.subset((~held_out).nonzero().squeeze(1)), self.subset(held_out.nonzero().squeeze(1))

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool,
        generator: Generator | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        augment: Callable[[Tensor], Tensor] | None = None,
        block: int | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass: (float images in [0, 1], int64 labels) on `device`, `batch_size` at a time.

        `shuffle` draws one permutation from `generator` (the global one if None). `device` defaults to where
        this set lives. `drop_last` leaves a smaller last batch out. `augment` is applied to the float images,
        on their device: `lambda x: flip(x, generator)`. It gets `block` batches at once: on a GPU by default as many
        as fit into 32 MiB, because there each small operation costs more than its work; elsewhere one. What is drawn
        at random for an image depends on `block`, nothing else does.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be 1 or more, not {batch_size}")
        if drop_last and batch_size > len(self):
            raise ConfigError(
                f"with drop_last, a batch_size of {batch_size} leaves no batch of {len(self)} images. "
                "Lower batch_size or keep the last batch"
            )
        if block is not None and block < 1:
            raise ConfigError(f"block must be 1 batch or more, not {block}")
        target = self.labels.device if device is None else torch.device(device)
        if block is None:
            image_bytes = 4 * self.images[0].numel() if len(self) else 1
            block = max(1, BLOCK_BYTES // (image_bytes * batch_size)) if target.type == "cuda" else 1
        return self._batches(batch_size, shuffle, generator, target, drop_last, augment, block)

    def _batches(
        self,
        batch_size: int,
        shuffle: bool,
        generator: Generator | None,
        target: torch.device,
        drop_last: bool,
        augment: Callable[[Tensor], Tensor] | None,
        block: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        home = self.labels.device
        order = None
        if shuffle:
            drawn_on = home if generator is None else generator.device
            order = torch.randperm(len(self), generator=generator, device=drawn_on).to(home)
        stop = len(self) - len(self) % batch_size if drop_last else len(self)
        for start in range(0, stop, block * batch_size):
            window = slice(start, min(start + block * batch_size, stop))
            chosen = window if order is None else order[window]
            images = self.images[chosen].to(target).float() / 255
            labels = self.labels[chosen].to(target)
            images = images if augment is None else augment(images)
            yield from zip(images.split(batch_size), labels.split(batch_size), strict=True)


def normalizer(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """``(images - mean) / std`` per channel, for a float batch (N, C, H, W) or one image (C, H, W).

    The numbers move to the images' device once, since that makes the processor wait for it.
    """
    numbers = torch.empty(0)

    def normalize(images: Tensor) -> Tensor:
        nonlocal numbers
        if not len(numbers) or (numbers.dtype, numbers.device) != (images.dtype, images.device):
            numbers = torch.tensor([list(mean), list(std)], dtype=images.dtype, device=images.device)[..., None, None]
        return (images - numbers[0]) / numbers[1]

    return normalize


@dataclass(frozen=True)
class Splits:
    """A data set as `load` returns it.

    `mean` and `std` are those of the [0, 1] training pixels, one per channel. Nothing applies them for you:
    normalise in the model, or with `normalize`. `source` says where the files came from.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    def normalize(self, images: Tensor) -> Tensor:
        """(images - mean) / std per channel, for a float batch (N, C, H, W) or one image (C, H, W)."""
        return normalizer(self.mean, self.std)(images)
