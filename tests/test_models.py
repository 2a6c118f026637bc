"""The dense networks have the sizes the paper reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bayestrain import models
from bayestrain.errors import ConfigError
from bayestrain.sizes import count_parameters

NETWORKS: list[tuple[Callable[..., nn.Sequential], tuple[int, ...], int]] = [
    (models.mnist_mlp, (1, 28, 28), 496_885),
    (models.cifar10_cnn, (3, 32, 32), 1_569_418),
    (models.resnet110, (3, 32, 32), 1_742_762),
]


@pytest.mark.parametrize(("build", "shape", "parameters"), NETWORKS)
def test_the_size_is_the_papers_and_the_forward_pass_gives_logits(
    build: Callable[..., nn.Sequential], shape: tuple[int, ...], parameters: int
) -> None:
    model = build()
    assert count_parameters(model) == parameters
    with torch.no_grad():
        logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()


@pytest.mark.parametrize(("build", "shape"), [(build, shape) for build, shape, _ in NETWORKS])
def test_symbolic_trace_computes_the_same(build: Callable[..., nn.Sequential], shape: tuple[int, ...]) -> None:
    model = build(num_classes=3).eval()
    traced = torch.fx.symbolic_trace(model)
    x = torch.rand(2, *shape)
    with torch.no_grad():
        assert model(x).shape == (2, 3)
        torch.testing.assert_close(traced(x), model(x))


def test_layer_names_are_readable() -> None:
    linear = [n for n, m in models.mnist_mlp().named_modules() if isinstance(m, nn.Linear)]
    assert linear == ["1", "3"]
    weighted = [n for n, m in models.cifar10_cnn().named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert weighted == ["conv1", "conv2", "conv3", "conv4", "fc1", "fc2"]
    names = [n for n, m in models.resnet_cifar(8).named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert names == [
        "stem.conv",
        "stack1.0.conv1", "stack1.0.conv2",
        "stack2.0.conv1", "stack2.0.conv2", "stack2.0.shortcut",
        "stack3.0.conv1", "stack3.0.conv2", "stack3.0.shortcut",
        "fc",
    ]  # fmt: skip


def test_a_resnet_has_the_depth_it_is_asked_for() -> None:
    for depth in (8, 20, 110):
        layers = [
            n
            for n, m in models.resnet_cifar(depth).named_modules()
            if isinstance(m, nn.Conv2d | nn.Linear) and not n.endswith("shortcut")
        ]
        assert len(layers) == depth


def test_blocks_that_start_at_zero_add_nothing_yet_but_learn() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    block = models.resnet_cifar(8, zero_start=True).get_submodule("stack1.0")
    inside = torch.randn(4, 16, 8, 8)
    torch.testing.assert_close(block(inside), inside.relu())
    for start, same in ((True, True), (False, False)):
        model = models.resnet_cifar(8, zero_start=start)
        before = model(x)
        nn.init.normal_(model.get_submodule("stack3.0.conv1").weight)
        assert torch.equal(model(x), before) == same
    norms = {name: m for name, m in models.resnet110().named_modules() if isinstance(m, nn.BatchNorm2d)}
    zero = [name for name, norm in norms.items() if not norm.weight.any()]
    assert zero == [name for name in norms if name.endswith("bn2")]
    assert len(zero) == 54
    assert all(p.any() for name, p in models.resnet110_keras().named_parameters() if name.endswith("weight"))
    model = models.resnet_cifar(8, zero_start=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    assert model.get_submodule("stack3.0.conv1").weight.grad.any()


@pytest.mark.parametrize("depth", [2, 18, 109, -4])
def test_a_depth_that_no_resnet_has_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"depth 6 n \+ 2 \(8, 14, 20, \.\.\., 110\), not {depth}"):
        models.resnet_cifar(depth)
