"""Labelled images in memory, and the digits that ship with the package."""

import gzip
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from bayestrain.errors import ConfigError, DataError, check_choice, check_counts

MINI = Path(__file__).with_name("mnist_mini")

BLOCK_BYTES = 32 * 2**20  # of float images that are prepared at once on a GPU, where small operations cost launches


@dataclass(eq=False, repr=False)
class Images(Dataset[tuple[Tensor, int]]):
    """Labelled images: `images` is uint8 (N, C, H, W), `labels` is int64 (N,).

    Indexing returns (float image in [0, 1], label), so an ordinary `DataLoader` works; `batches` is faster, and applies
    `augment`, a function of float images such as ``lambda x: x.flip(3)``, on a GPU to several batches at once.
    """

    images: Tensor
    labels: Tensor
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(f"images must be uint8 (N, C, H, W), not {images.dtype} {tuple(images.shape)}")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(f"labels must be int64 ({len(images)},), not {labels.dtype} {tuple(labels.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])

    def to(self, device: torch.device | str) -> Self:
        """The same images on `device`; `batches` then copies nothing between devices."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def augmented(self, augment: Callable[[Tensor], Tensor] | None) -> Self:
        """The same images, whose batches are augmented by `augment`."""
        return replace(self, augment=augment)

    def subset(self, indices: Tensor | Sequence[int]) -> Self:
        """The images at `indices`, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """(rest, held out): holds out `fraction` of every class, by labels and `seed` alone, without augmentation."""
        generator, labels = torch.Generator().manual_seed(seed), self.labels.cpu()
        held = torch.zeros(len(self), dtype=torch.bool)
        for label in labels.unique():
            members = (labels == label).nonzero().squeeze(1)
            shuffled = members[torch.randperm(len(members), generator=generator)]
            held[shuffled[: round(fraction * len(members))]] = True
        if not 0 < fraction < 1 or held.all() or not held.any():
            raise ConfigError(f"The fraction {fraction} of {len(self)} images leaves a part empty. Try one near 0.5.")
        rest, held_out = (self.subset(chosen.nonzero().squeeze(1)) for chosen in (~held, held))
        return rest, held_out.augmented(None)

    def batches(
        self, batch_size: int, *, shuffle: bool, generator: Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """One pass of (float images in [0, 1], int64 labels) on `device`, by default theirs; `generator` shuffles."""
        check_counts(batch_size=batch_size)
        home, block = self.labels.device, batch_size
        target = home if device is None else torch.device(device)
        if target.type == "cuda":
            block *= max(1, BLOCK_BYTES // (4 * self.images.shape[1:].numel() * batch_size))

        drawn_on = home if generator is None else generator.device
        order = torch.randperm(len(self), generator=generator, device=drawn_on).to(home) if shuffle else None
        for start in range(0, len(self), block):
            window = slice(start, start + block)
            chosen = window if order is None else order[window]
            images = self.images[chosen].to(target).float() / 255
            images = images if self.augment is None else self.augment(images)
            yield from zip(images.split(batch_size), self.labels[chosen].to(target).split(batch_size), strict=True)


class Splits(NamedTuple):
    """Images to train with and to test, and the names of their labels."""

    train: Images
    test: Images
    classes: tuple[str, ...]


def load(name: str) -> Splits:
    """Load "mnist-mini", which ships with BayesTrain: 10,000 and 2,000 digits of MNIST.

    >>> digits = load("mnist-mini")
    >>> images, labels = next(digits.train.batches(32, shuffle=False))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([32, 1, 28, 28]), torch.float32, torch.Size([32]))
    """
    check_choice("name", name, ("mnist-mini",))

    def read(part: str) -> Images:
        files = (MINI / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
        images, labels = (idx(gzip.decompress(file.read_bytes())) for file in files)
        return Images(images[:, None], labels.long())

    return Splits(read("train"), read("t10k"), tuple("0123456789"))


def idx(content: bytes) -> Tensor:
    """The uint8 tensor of an idx file: a big-endian header of type, number of dimensions and sizes, then the bytes."""
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:start].ljust(4 * axes, b"\0"))
    if content[:3] != b"\0\0\x08" or len(content) != start + math.prod(shape):
        raise DataError(f"It is no idx file of bytes with shape {shape}: it has {len(content)} bytes.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(shape)  # torch warns on bytes
