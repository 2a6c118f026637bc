"""Layers whose output goes into a batch norm, and into nothing else, are found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import models
from bayestrain.batchnorm import normalised_layers


def conv(channels: int = 8) -> bt.TTConv2d:
    return bt.TTConv2d(channels, channels, 3, padding=1, max_rank=2)


def test_the_cnn() -> None:
    model = models.cifar10_cnn()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3))
    assert normalised_layers(model) == {"conv1": ["bn1"], "conv2": ["bn2"], "conv3": ["bn3"], "conv4": ["bn4"]}


def test_a_residual_network() -> None:
    model = models.resnet_cifar(14)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3))
    blocks = [f"stack{k}.{i}" for k in (1, 2, 3) for i in (0, 1)]
    expected = {f"{block}.conv{n}": [f"{block}.bn{n}"] for block in blocks for n in (1, 2)}
    found = normalised_layers(model)
    assert found == {"stem.conv": ["stem.bn"]} | expected
    assert {"stack2.0.shortcut", "fc"} <= bt.ranks(model).keys() - found.keys(), "these matter as they are"


def test_a_dense_layer_is_none_of_ours() -> None:
    assert normalised_layers(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))) == {}


def test_an_activation_between_makes_the_scale_matter() -> None:
    assert normalised_layers(nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(8))) == {}
    assert normalised_layers(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU())) == {"0": ["1"]}
    assert normalised_layers(nn.Sequential(nn.BatchNorm2d(8), conv())) == {}


def test_linear_layers_count_too() -> None:
    model = nn.Sequential(bt.TTLinear(12, 8, max_rank=2), nn.BatchNorm1d(8), nn.ReLU(), bt.TTLinear(8, 4, max_rank=2))
    assert normalised_layers(model) == {"0": ["1"]}


class Branching(nn.Module):
    """``bn(conv(x))``, with `extra` saying where else the convolution's output goes."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.conv, self.bn, self.other_bn, self.extra = conv(), nn.BatchNorm2d(8), nn.BatchNorm2d(8), extra

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out: Tensor = self.bn(y)
        match self.extra:
            case "skip":
                out = out + y
            case "functional":
                out = out * F.relu(y)
            case "second batch norm":
                out = out + self.other_bn(y)
            case "called again without":
                out = self.conv(out)
            case "called again with":
                out = self.other_bn(self.conv(out))
        return out


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("nowhere", {"conv": ["bn"]}),
        ("skip", {}),
        ("functional", {}),
        ("second batch norm", {"conv": ["bn", "other_bn"]}),
        ("called again without", {}),
        ("called again with", {"conv": ["bn", "other_bn"]}),
    ],
)
def test_every_use_of_the_output_counts(extra: str, expected: dict[str, list[str]]) -> None:
    model = Branching(extra)
    model(torch.randn(2, 8, 4, 4))
    assert normalised_layers(model) == expected


def test_an_output_that_leaves_the_model_is_used() -> None:
    class Both(Branching):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = self.conv(x)
            return self.bn(y), y

    assert normalised_layers(Both("nowhere")) == {}


class Untraceable(nn.Module):
    """Branches on its data, so that no symbolic trace exists."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.body(-x)


def test_an_untraceable_model_is_read_in_order_of_registration() -> None:
    model = Untraceable(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv(), nn.ReLU(), nn.BatchNorm2d(8))
    assert normalised_layers(model) == {"body.0": ["body.1"]}
    assert normalised_layers(Untraceable(conv(), nn.BatchNorm2d(7))) == {}, "sizes do not fit"
    assert normalised_layers(Untraceable(nn.Sequential(conv(), nn.BatchNorm2d(8)))) == {"body.0.0": ["body.0.1"]}


def test_finding_them_leaves_the_model_alone() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(8)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    normalised_layers(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
