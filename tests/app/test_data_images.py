"""`Images` and `Splits`, on the digits that ship with the package and the decoder of their format."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bayestrain import data
from bayestrain.app.data import images
from bayestrain.errors import ConfigError, DataError

IMAGES = gzip.decompress((Path(data.__file__).parent / "mnist_mini" / "t10k-images-idx3-ubyte.gz").read_bytes())


@pytest.fixture(scope="module")
def digits() -> data.Splits:
    return data.load("mnist-mini")


def test_mnist_mini_is_balanced(digits: data.Splits) -> None:
    assert digits.classes == tuple("0123456789")
    for part, each in ((digits.train, 1_000), (digits.test, 200)):
        assert part.images.shape == (10 * each, 1, 28, 28)
        assert part.labels.bincount().tolist() == [each] * 10
    assert digits.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]  # as MNIST begins


def test_an_item_is_a_float_image_and_an_int_label(digits: data.Splits) -> None:
    image, label = digits.train[3]
    assert image.dtype == torch.float32
    assert image.shape == (1, 28, 28)
    assert image.min() == 0
    assert image.max() == 1
    assert (type(label), label) == (int, 1)
    assert torch.equal(digits.train[-1][0], digits.train[9_999][0])
    with pytest.raises(IndexError):
        digits.train[10_000]


def test_batches_give_what_a_data_loader_gives(digits: data.Splits) -> None:
    slow = list(DataLoader(digits.test, batch_size=300))
    fast = list(digits.test.batches(300, shuffle=False))
    assert [len(y) for _, y in fast] == [300] * 6 + [200]
    for (x, y), (x_slow, y_slow) in zip(fast, slow, strict=True):
        assert torch.equal(x, x_slow)
        assert torch.equal(y, y_slow)


def test_shuffled_batches_are_a_reproducible_permutation(digits: data.Splits) -> None:
    def labels(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.cat([y for _, y in digits.test.batches(128, shuffle=True, generator=generator)])

    order = torch.randperm(2_000, generator=torch.Generator().manual_seed(7))
    assert torch.equal(labels(7), digits.test.labels[order])
    assert not torch.equal(labels(7), labels(8))
    first = next(digits.test.batches(50, shuffle=True, generator=torch.Generator().manual_seed(7)))[0]
    assert torch.equal(first, digits.test.images[order[:50]].float() / 255)


def test_augment_and_device(digits: data.Splits) -> None:
    inverted = digits.test.augmented(lambda x: 1 - x)
    batches = list(inverted.batches(300, shuffle=False, device="cpu"))
    assert torch.equal(batches[0][0], 1 - digits.test.images[:300].float() / 255)
    assert torch.equal(inverted.to("cpu").labels, digits.test.labels)
    rest, held_out = inverted.to("cpu").split(0.5, seed=0)
    assert next(rest.batches(1, shuffle=False))[0].mean() > 0.5 > next(held_out.batches(1, shuffle=False))[0].mean()


def test_subset_takes_indices_in_order(digits: data.Splits) -> None:
    few = digits.test.subset([5, 1, 5])
    assert torch.equal(few.images, digits.test.images[[5, 1, 5]])
    assert torch.equal(few.labels, digits.test.subset(torch.tensor([5, 1, 5])).labels)


def test_split_is_balanced_deterministic_and_complete(digits: data.Splits) -> None:
    rest, held_out = digits.train.split(0.1, seed=0)
    assert held_out.labels.bincount().tolist() == [100] * 10
    assert rest.labels.bincount().tolist() == [900] * 10
    again = digits.train.split(0.1, seed=0)
    assert torch.equal(again[1].images, held_out.images)
    assert torch.equal(again[0].images, rest.images)
    assert not torch.equal(digits.train.split(0.1, seed=1)[1].images, held_out.images)
    together = torch.cat([rest.images, held_out.images]).flatten(1).double().sum(1).sort().values
    assert torch.equal(together, digits.train.images.flatten(1).double().sum(1).sort().values)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 1e-9])
def test_a_split_with_an_empty_part_is_refused(digits: data.Splits, fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        digits.train.split(fraction, seed=0)


def test_wrong_tensors_and_batch_sizes_are_refused_at_once() -> None:
    good = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"images must be uint8 \(N, C, H, W\), not torch.float32 \(2, 1, 4, 4\)"):
        data.Images(good.float(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"labels must be int64 \(2,\), not torch.int64 \(3,\)"):
        data.Images(good, torch.zeros(3, dtype=torch.int64))
    for size in (0, -3):
        with pytest.raises(ConfigError, match=f"batch_size must be an integer of at least 1, got {size}"):
            data.Images(good, torch.zeros(2, dtype=torch.int64)).batches(size, shuffle=False).__next__()


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"name must be one of \('mnist-mini',\), got 'mnits'"):
        data.load("mnits")


def test_importing_and_loading_does_not_import_pillow() -> None:
    code = "import sys; from bayestrain import data; data.load('mnist-mini'); assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


class OnGpu:
    """Stands for a GPU: blocks of batches are made for it, on this machine's processor."""

    type = "cuda"


def test_blocks_for_a_gpu_are_the_same_batches_augmented_at_once(
    digits: data.Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "BLOCK_BYTES", 3 * 300 * 784 * 4)  # three batches
    seen = []

    def epoch(place: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", lambda self, *_: self)
            patch.setattr(torch, "device", lambda _: place)
            augment = lambda x: seen.append(len(x)) or x  # type: ignore[func-returns-value]  # noqa: E731
            return list(digits.test.augmented(augment).batches(300, shuffle=True, generator=generator, device="x"))

    blocks, one_by_one = epoch(OnGpu()), epoch(torch.device("cpu"))
    assert seen == [900, 900, 200, *[300] * 6, 200]
    for (x, y), (expected, labels) in zip(blocks, one_by_one, strict=True):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)


def test_a_real_idx_file_is_read_byte_for_byte() -> None:
    found = images.idx(IMAGES)
    assert (found.shape, found.dtype) == ((2000, 28, 28), torch.uint8)
    assert found[1234, 5].tolist() == list(IMAGES[16 + 1234 * 784 + 5 * 28 :][:28])
    found.zero_()  # it owns its memory: no warning, and the bytes it was read from stay
    assert images.idx(IMAGES).any()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_shape_is_read(shape: list[int], drawn: st.DataObject) -> None:
    size = int(torch.tensor(shape).prod())
    content = drawn.draw(st.binary(min_size=size, max_size=size))
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    tensor = images.idx(header + content)
    assert list(tensor.shape) == shape
    assert bytes(tensor.flatten().tolist()) == content
