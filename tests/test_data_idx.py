"""The idx reader takes real files and refuses every damaged one."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.data import idx
from bayestrain.data.datasets import MNIST_MINI
from bayestrain.errors import DataError

assert MNIST_MINI.embedded is not None
IMAGES = gzip.decompress((MNIST_MINI.embedded / "t10k-images-idx3-ubyte.gz").read_bytes())


def test_a_real_file_is_read_byte_for_byte() -> None:
    images = idx.parse(IMAGES, "images")
    assert images.shape == (2000, 28, 28)
    assert images.dtype == torch.uint8
    assert images[1234, 5].tolist() == list(IMAGES[16 + 1234 * 784 + 5 * 28 :][:28])
    images.zero_()  # it owns its memory: no warning, and the bytes it was read from stay
    assert idx.parse(IMAGES, "images").any()


@given(st.integers(0, len(IMAGES) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(DataError, match=r"truncated|not an idx file"):
        idx.parse(IMAGES[:length], "images")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_any_shape_comes_back(shape: list[int], data: st.DataObject) -> None:
    size = int(torch.tensor(shape).prod())
    content = data.draw(st.binary(min_size=size, max_size=size))
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    tensor = idx.parse(header + content, "any")
    assert list(tensor.shape) == shape
    assert bytes(tensor.flatten().tolist()) == content


def test_messages_say_what_is_wrong() -> None:
    with pytest.raises(DataError, match=r"x is truncated: .* shape \(2000, 28, 28\), that is 1568016 bytes.* has 99"):
        idx.parse(IMAGES[:99], "x")
    with pytest.raises(DataError, match=r"x has bytes left over: .* the file has 1568017"):
        idx.parse(IMAGES + b"!", "x")
    with pytest.raises(DataError, match=r"x is not an idx file .* starts with 00 00 08 .* this one with 89 50 4e 47"):
        idx.parse(b"\x89PNG....", "x")
    with pytest.raises(DataError, match="it is empty"):
        idx.parse(b"", "x")
