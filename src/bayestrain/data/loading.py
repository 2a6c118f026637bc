"""`load`: from a data set's name to its training and test images."""

from __future__ import annotations

import os

import torch

from bayestrain.data import cifar, idx
from bayestrain.data.datasets import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, find_spec
from bayestrain.data.fetch import get
from bayestrain.data.images import Images, Splits


def load(name: str, folder: str | os.PathLike[str] | None = None) -> Splits:
    """The data set `name`: "mnist-mini", "mnist", "fashion-mnist" or "cifar10".

    "mnist-mini" ships with BayesTrain. The others are looked for, and fetched if need be, as `get` says;
    their checksums are checked each time.

    >>> digits = load("mnist-mini")
    >>> digits.train
    Images(10000 of shape (1, 28, 28) on cpu)
    >>> images, labels = next(digits.train.batches(32, shuffle=False))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([32, 1, 28, 28]), torch.float32, torch.Size([32]))
    """
    found = get(name, folder)
    spec = find_spec(name)
    contents = {file.name: file.content(found.paths[file.name]) for file in spec.files}
    train, test = cifar_images(contents) if spec.format == "cifar" else idx_images(contents)
    return Splits(name, train, test, spec.classes, spec.mean, spec.std, found.source)


def idx_images(contents: dict[str, bytes]) -> tuple[Images, Images]:
    """Training and test set from the contents of four idx files, by file name."""
    tensors = {name: idx.parse(content, name) for name, content in contents.items()}
    return (
        Images(tensors[TRAIN_IMAGES][:, None], tensors[TRAIN_LABELS].long()),
        Images(tensors[TEST_IMAGES][:, None], tensors[TEST_LABELS].long()),
    )


def cifar_images(contents: dict[str, bytes]) -> tuple[Images, Images]:
    """Training and test set from the contents of the six CIFAR-10 batches, the test batch last."""
    *train, test = (cifar.parse(content, name) for name, content in contents.items())
    return Images(torch.cat([x for x, _ in train]), torch.cat([y for _, y in train])), Images(*test)
