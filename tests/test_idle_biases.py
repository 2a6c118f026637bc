"""Biases in front of a batch norm: set to zero without changing anything, and left out of training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fit_kit import settings
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data, models
from bayestrain.batchnorm import IdleBiases

X = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def residual() -> nn.Module:
    """Dense and tensor-train convolutions, with statistics and affine maps as after some training."""
    torch.manual_seed(1)
    model = models.resnet_cifar(8)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4), lambda _, name: name.startswith("stack2"))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def test_nothing_that_the_model_computes_changes() -> None:
    model = residual().eval()
    before = model(X)
    idle = IdleBiases(model)
    assert len(idle.layers) == 7  # all but the two shortcuts, which are added without a batch norm
    assert not any(layer.bias.any() for layer in idle.layers)
    assert all(model.get_submodule(f"stack{k}.0.shortcut").bias.any() for k in (2, 3))
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)


def test_a_step_without_them_is_the_step_with_them() -> None:
    model = residual()
    idle = IdleBiases(model)
    plain = copy.deepcopy(model)
    for network, around in ((model, idle), (plain, IdleBiases(nn.Identity()))):
        with around():
            network.train()(X).square().sum().backward()
    assert sum(parameter.grad is None for parameter in model.parameters()) == len(idle.layers)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if ours.grad is None:
            assert name.endswith("bias")
            assert theirs.grad is not None
            assert theirs.grad.abs().max() < 1e-3 * plain.stem.conv.weight.grad.abs().max()  # type: ignore[union-attr]
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))


def test_they_are_there_outside_and_after_an_error() -> None:
    model = residual()
    idle, names = IdleBiases(model), [name for name, _ in model.named_parameters()]

    def breaks() -> None:
        assert idle.layers[0].bias is None
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), idle():
        breaks()
    assert [name for name, _ in model.named_parameters()] == names


def test_a_state_that_was_loaded_is_emptied_again() -> None:
    model, other = residual(), residual()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    idle = IdleBiases(model)
    model.load_state_dict(other.state_dict())
    idle.empty()
    assert not any(layer.bias.any() for layer in idle.layers)
    torch.testing.assert_close(model.eval()(X), other.eval()(X), rtol=1e-3, atol=1e-4)


class OfPositions(nn.Module):
    """A batch norm over rows, whose number is that of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x[:, 0]))  # type: ignore[no-any-return]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    model[2].bias = model[0].bias
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[0].bias.requires_grad_(False)
    return model


class InTraining(nn.Module):
    """Something else uses the convolution, but only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y.relu() if self.training else self.norm(y)  # type: ignore[no-any-return]


class LooksAtIt(InTraining):
    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.bias is not None
        return self.norm(self.conv(x)) + self.conv.bias.sum()  # type: ignore[no-any-return]


class KeepsStatistics(InTraining):
    """Its batch norm stays as it is, as in much transfer learning."""

    def train(self, mode: bool = True) -> KeepsStatistics:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))  # type: ignore[no-any-return]


def hooked(place: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    if place == "after":
        model[0].register_forward_hook(lambda _, __, out: out.relu())
    else:
        model[1].register_forward_pre_hook(lambda _, given: (given[0].relu(),))
    return model


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) if float(y.detach().sum()) > 0 else y


@pytest.mark.parametrize(
    "build",
    [
        OfPositions,
        tied,
        frozen,
        Branches,
        InTraining,
        LooksAtIt,
        KeepsStatistics,
        lambda: hooked("after"),
        lambda: hooked("before"),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)),
    ],
    ids=[
        "a norm over rows",
        "tied",
        "frozen",
        "untraceable",
        "used in training",
        "looked at",
        "statistics kept",
        "a hook behind",
        "a hook before",
        "an activation between",
        "none",
    ],
)
def test_biases_that_matter_or_may_matter_stay(build: Callable[[], nn.Module]) -> None:
    model = build().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not IdleBiases(model).layers
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_training_leaves_them_at_zero_and_predicts_with_its_statistics() -> None:
    train = data.load("mnist-mini").train.subset(range(600))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 10),
    )  # fmt: skip
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6), lambda _, name: name == "3")
    bt.fit(model, train, None, settings(epochs=4, batch_size=50))
    assert not model[0].bias.any()
    assert not model[3].bias.any()
    x, y = next(train.batches(600, shuffle=False))
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    assert loss < 1.2  # 2.3 by chance
