"""The binary format of CIFAR-10, and its pictures turned into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from bayestrain.data import cifar
from bayestrain.errors import DataError


def test_a_record_is_a_label_and_three_planes() -> None:
    record = bytes([7]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes(range(32)) * 32
    images, labels = cifar.parse(record * 10_000, "batch")
    assert images.shape == (10_000, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == [7]
    assert images[9_999, 0].unique().tolist() == [10]
    assert images[0, 1].unique().tolist() == [20]
    assert images[5_000, 2, 13].tolist() == list(range(32))


def test_another_length_or_label_is_refused() -> None:
    with pytest.raises(DataError, match=r"batch is truncated .* has 30730000 bytes: this one has 30729999"):
        cifar.parse(bytes(30_729_999), "batch")
    with pytest.raises(DataError, match="label 10: CIFAR-10 labels are 0 to 9"):
        cifar.parse((bytes([10]) + bytes(3072)) * 10_000, "batch")


def test_a_picture_becomes_the_batch_it_was_made_from(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (10, 3, 32, 32), generator=generator, dtype=torch.uint8).repeat(1000, 1, 1, 1)
    rows = images.reshape(10_000, 3, 1024).transpose(1, 2)  # one row an image, pixels in order, RGB
    picture = Image.frombytes("RGB", (1024, 10_000), rows.contiguous().numpy().tobytes())
    picture.save(tmp_path / "batch.png", compress_level=1)
    labels = bytes(range(10)) * 1000
    found, found_labels = cifar.parse(bytes(cifar.batch_from_png(tmp_path / "batch.png", labels)), "batch")
    assert torch.equal(found, images)
    assert bytes(found_labels.tolist()) == labels


def test_a_picture_of_another_size_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "batch.png")
    with pytest.raises(DataError, match=r"batch.png .* 1024 x 10000 pixels .* not RGB, 32 x 32"):
        cifar.batch_from_png(tmp_path / "batch.png", bytes(10_000))
