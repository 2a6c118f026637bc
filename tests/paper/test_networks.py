"""The dense networks have the sizes the paper reports, and augmentation equals a slow loop over single images."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError
from paper import augment, networks
from paper.published import PAPER

NETWORKS: list[tuple[Callable[..., nn.Sequential], str, tuple[int, ...]]] = [
    (networks.mnist_mlp, "mnist", (1, 28, 28)),
    (networks.cifar10_cnn, "cifar10-cnn", (3, 32, 32)),
    (networks.resnet110, "cifar10-resnet110", (3, 32, 32)),
    (networks.resnet110_keras, "cifar10-resnet110", (3, 32, 32)),
]


@pytest.mark.parametrize(("build", "experiment", "shape"), NETWORKS)
def test_the_sizes_are_the_papers(build: Callable[..., nn.Sequential], experiment: str, shape: tuple[int, ...]) -> None:
    model = build().eval()
    assert bt.count_parameters(model) == PAPER[experiment].dense_parameters
    x = torch.rand(2, *shape)
    with torch.no_grad():
        logits = model(x)
        assert logits.shape == (2, 10)
        assert logits.isfinite().all()
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), logits)
        assert build(num_classes=3)(x).shape == (2, 3)


def test_depths_and_blocks_that_start_at_zero() -> None:
    for depth in (8, 20, 110):
        model = networks.resnet_cifar(depth)
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
        assert len(layers) == depth
    for depth in (2, 18, 109, -4):
        with pytest.raises(ValueError, match=rf"depth 6 n \+ 2 \(8, 14, 20, \.\.\., 110\), not {depth}"):
            networks.resnet_cifar(depth)
    model = networks.resnet_cifar(8, zero_start=True)
    inside = torch.randn(4, 16, 8, 8)
    torch.testing.assert_close(model.get_submodule("stack1.0")(inside), inside.relu())
    zero = [n for n, m in networks.resnet110().named_modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any()]
    assert len(zero) == 54
    assert all(name.endswith("bn2") for name in zero)
    assert all(p.any() for name, p in networks.resnet110_keras().named_parameters() if name.endswith("weight"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
    assert model.get_submodule("stack3.0.conv1").weight.grad.any()


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """The obvious way: copy pixel by pixel, leave zero what comes from outside."""
    out = torch.zeros_like(image)
    height, width = image.shape[1:]
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                out[:, row, column] = image[:, row - down, column - right]
    return out


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    st.integers(0, 7),
    st.integers(0, 2**31),
)
def test_pad_crop_and_shift_equal_the_slow_reference(shape: tuple[int, ...], pad: int, seed: int) -> None:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    twin = torch.Generator().manual_seed(seed)
    tops = torch.randint(2 * pad + 1, shape[:1], generator=twin)
    lefts = torch.randint(2 * pad + 1, shape[:1], generator=twin)
    expected = torch.stack(
        [moved(image, pad - int(t), pad - int(s)) for image, t, s in zip(images, tops, lefts, strict=True)]
    )
    for change in (augment.pad_crop, augment.shift):
        assert torch.equal(change(images, pad, torch.Generator().manual_seed(seed)), expected)


def test_flips_equal_the_slow_reference_and_draws_are_uniform() -> None:
    images = data.load("mnist-mini").test.images[:64]
    coins = torch.randint(2, (64,), generator=torch.Generator().manual_seed(3))
    expected = torch.stack([image.flip(2) if coin else image for image, coin in zip(images, coins, strict=True)])
    assert torch.equal(augment.flip(images, torch.Generator().manual_seed(3)), expected)
    dot = torch.zeros(18_000, 1, 5, 5)
    dot[:, 0, 2, 2] = 1
    where = augment.shift(dot, 1, torch.Generator().manual_seed(0)).flatten(1).argmax(1)
    counts = where.bincount(minlength=25).reshape(5, 5)
    assert counts[1:4, 1:4].sum() == 18_000
    chi_square = ((counts[1:4, 1:4] - 2000) ** 2 / 2000).sum()
    assert chi_square < 27.9  # 8 degrees of freedom, p = 0.0005
    right = augment.flip(torch.eye(2).expand(10_000, 1, 2, 2), torch.Generator().manual_seed(0))[:, 0, 0, 1].sum()
    assert abs(right - 5_000) < 200  # four standard deviations


def test_type_and_generator_are_respected_and_one_image_is_refused() -> None:
    images = data.load("mnist-mini").train.images[:16]
    generator = torch.Generator().manual_seed(1)
    first, second = augment.shift(images, 2, generator), augment.shift(images, 2, generator)
    assert first.dtype == torch.uint8
    assert not torch.equal(first, second)
    assert torch.equal(first, augment.shift(images, 2, torch.Generator().manual_seed(1)))
    with pytest.raises(ConfigError, match=r"a batch of images .* not a tensor of shape \(1, 28, 28\).*image\[None\]"):
        augment.flip(torch.zeros(1, 28, 28))


def test_cutout_blanks_one_square_of_each_image() -> None:
    images = torch.ones(200, 3, 12, 10)
    cut = augment.cutout(images, 4, torch.Generator().manual_seed(0))
    blank = cut == 0
    assert torch.equal(blank[:, 0], blank[:, 1])  # all channels alike
    assert torch.equal(cut == 1, ~blank)
    for mask in blank[:, 0]:
        sides = [mask.any(axis).nonzero().flatten() for axis in (0, 1)]
        assert all(2 <= len(side) <= 4 for side in sides)  # the centre is inside, the square may reach beyond
        assert all(side[-1] - side[0] + 1 == len(side) for side in sides)
        assert mask.sum() == len(sides[0]) * len(sides[1])
    assert len({tuple(mask.flatten().tolist()) for mask in blank[:, 0]}) > 50
    assert images.min() == 1  # the images given stay
    again = augment.cutout(images, 4, torch.Generator().manual_seed(0))
    assert torch.equal(cut, again)
