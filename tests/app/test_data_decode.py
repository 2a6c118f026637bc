"""The decoders of the published file formats."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from bayestrain import data
from bayestrain.app.data import images as decode

IMAGES = gzip.decompress((Path(data.__file__).parent / "mnist_mini" / "t10k-images-idx3-ubyte.gz").read_bytes())


def test_a_real_idx_file_is_read_byte_for_byte() -> None:
    images = decode.idx(IMAGES)
    assert images.shape == (2000, 28, 28)
    assert images.dtype == torch.uint8
    assert images[1234, 5].tolist() == list(IMAGES[16 + 1234 * 784 + 5 * 28 :][:28])
    images.zero_()  # it owns its memory: no warning, and the bytes it was read from stay
    assert decode.idx(IMAGES).any()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_shape_is_read(shape: list[int], data: st.DataObject) -> None:
    size = int(torch.tensor(shape).prod())
    content = data.draw(st.binary(min_size=size, max_size=size))
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    tensor = decode.idx(header + content)
    assert list(tensor.shape) == shape
    assert bytes(tensor.flatten().tolist()) == content


def test_a_cifar_record_is_a_label_and_three_planes() -> None:
    record = bytes([7]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes(range(32)) * 32
    images, labels = decode.cifar_batch(record * 10_000)
    assert images.shape == (10_000, 3, 32, 32)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == [7]
    assert images[9_999, 0].unique().tolist() == [10]
    assert images[0, 1].unique().tolist() == [20]
    assert images[5_000, 2, 13].tolist() == list(range(32))
