"""The dense networks have the sizes the paper reports."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bayestrain as bt
from paper import networks
from paper.published import PAPER

NETWORKS: list[tuple[Callable[..., nn.Sequential], str, tuple[int, ...]]] = [
    (networks.mnist_mlp, "mnist", (1, 28, 28)),
    (networks.cifar10_cnn, "cifar10-cnn", (3, 32, 32)),
    (networks.resnet110, "cifar10-resnet110", (3, 32, 32)),
    (networks.resnet110_keras, "cifar10-resnet110", (3, 32, 32)),
]


@pytest.mark.parametrize(("build", "experiment", "shape"), NETWORKS)
def test_size_is_the_papers_and_outputs_are_logits(
    build: Callable[..., nn.Sequential], experiment: str, shape: tuple[int, ...]
) -> None:
    model = build().eval()
    assert bt.count_parameters(model) == PAPER[experiment].dense_parameters
    x = torch.rand(2, *shape)
    with torch.no_grad():
        logits = model(x)
        assert logits.shape == (2, 10)
        assert logits.isfinite().all()
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), logits)
        assert build(num_classes=3)(x).shape == (2, 3)


def test_depth_counts_the_layers_but_for_shortcuts() -> None:
    for depth in (8, 20, 110):
        model = networks.resnet_cifar(depth)
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
        assert len(layers) == depth
    for depth in (2, 18, 109, -4):
        with pytest.raises(ValueError, match=rf"depth 6 n \+ 2 \(8, 14, 20, \.\.\., 110\), not {depth}"):
            networks.resnet_cifar(depth)


def test_blocks_that_start_at_zero_pass_their_input_on_and_learn() -> None:
    torch.manual_seed(0)
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
