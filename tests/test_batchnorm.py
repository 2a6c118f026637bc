"""Layers whose output goes into a batch norm, and into nothing else, are found."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import models
from bayestrain.batchnorm import IdleBiases, normalised_layers
from bayestrain.errors import HoldWarning


def conv(channels: int = 8) -> bt.TTConv2d:
    return bt.TTConv2d(channels, channels, 3, padding=1, max_rank=2)


def test_the_cnn() -> None:
    model = models.cifar10_cnn()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3))
    assert normalised_layers(model).seen == {"conv1": ["bn1"], "conv2": ["bn2"], "conv3": ["bn3"], "conv4": ["bn4"]}


def test_a_residual_network() -> None:
    model = models.resnet_cifar(14)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3))
    blocks = [f"stack{k}.{i}" for k in (1, 2, 3) for i in (0, 1)]
    expected = {f"{block}.conv{n}": [f"{block}.bn{n}"] for block in blocks for n in (1, 2)}
    found = normalised_layers(model).seen
    assert found == {"stem.conv": ["stem.bn"]} | expected
    assert {"stack2.0.shortcut", "fc"} <= bt.ranks(model).keys() - found.keys(), "these matter as they are"


def test_a_dense_layer_is_none_of_ours() -> None:
    assert normalised_layers(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))).seen == {}


def test_an_activation_between_makes_the_scale_matter() -> None:
    assert normalised_layers(nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(8))).seen == {}
    assert normalised_layers(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU())).seen == {"0": ["1"]}
    assert normalised_layers(nn.Sequential(nn.BatchNorm2d(8), conv())).seen == {}


def test_linear_layers_count_too() -> None:
    model = nn.Sequential(bt.TTLinear(12, 8, max_rank=2), nn.BatchNorm1d(8), nn.ReLU(), bt.TTLinear(8, 4, max_rank=2))
    assert normalised_layers(model).seen == {"0": ["1"]}


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
    assert normalised_layers(model).seen == expected


def test_an_output_that_leaves_the_model_is_used() -> None:
    class Both(Branching):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = self.conv(x)
            return self.bn(y), y

    assert normalised_layers(Both("nowhere")).seen == {}


class Untraceable(nn.Module):
    """Branches on its data, so that no symbolic trace exists."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.body(-x)


def test_parts_of_an_untraceable_model_are_traced() -> None:
    model = Untraceable(
        conv(), nn.BatchNorm2d(8), nn.ReLU(), conv(), nn.ReLU(), nn.BatchNorm2d(8), Branching("nowhere")
    )
    found = normalised_layers(model)
    assert found.seen == {"body.6.conv": ["body.6.bn"]}
    assert found.doubtful == {"body.0": ["body.1"]}, "the model might use body[0] by itself"
    found = normalised_layers(Untraceable(nn.Sequential(conv(), nn.BatchNorm2d(8)), Branching("skip")))
    assert (found.seen, found.doubtful) == ({}, {"body.0.0": ["body.0.1"]})


class OfMode(nn.Module):
    """Uses the output of its convolution elsewhere in one mode only."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.mode = conv(), nn.BatchNorm2d(8), mode

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z: Tensor = self.bn(y)
        return z + y if self.training == self.mode else z


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_both_modes_count(used: bool, now: bool) -> None:
    model = OfMode(used).train(now)
    found = normalised_layers(model)
    assert (found.seen, found.doubtful) == ({}, {})
    assert all(module.training == now for module in model.modules())


def test_an_output_that_the_model_keeps_is_used() -> None:
    class Keeping(Branching):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            self.kept = [y] if self.extra == "in a list" else y
            return self.bn(y)

    for extra in ("as it is", "in a list"):
        model = Keeping(extra)
        assert normalised_layers(model).seen == {}
        assert not hasattr(model, "kept")
        assert IdleBiases(model).names == {}


def test_in_a_sequential_the_order_tells_even_if_a_part_cannot_be_traced() -> None:
    untraceable = Untraceable(nn.ReLU())
    assert normalised_layers(nn.Sequential(conv(), nn.BatchNorm2d(8), untraceable)).seen == {"0": ["1"]}
    assert normalised_layers(nn.Sequential(conv(), nn.BatchNorm2d(7), untraceable)).seen == {}, "sizes do not fit"
    assert normalised_layers(nn.Sequential(conv(), untraceable, nn.BatchNorm2d(8))).seen == {}


def test_what_was_registered_in_order_is_only_guessed() -> None:
    class Residual(nn.Module):
        """The batch norm is behind the sum, so the size of the convolution matters."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = conv(), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.bn(x + self.conv(x))
            return y if y.sum() > 0 else -y

    assert normalised_layers(Residual()).seen == {}
    with pytest.warns(HoldWarning, match=r"outputs of conv could not be seen.*hold_scale=\['conv'\]"):
        assert bt.RankPrior(Residual(), num_data=10).held == {}
    assert normalised_layers(Residual()).doubtful == {"conv": ["bn"]}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(("wrap", "name"), [(nn.DataParallel, "module"), (torch.compile, "_orig_mod")])
def test_a_wrapped_model_is_the_same_model(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model = nn.Sequential(Branching("nowhere"), Branching("skip"))
    assert normalised_layers(model).seen == {"0.conv": ["0.bn"]}
    assert normalised_layers(wrap(model)).seen == {f"{name}.0.conv": [f"{name}.0.bn"]}


@pytest.mark.parametrize("branches", [False, True])
def test_a_weight_that_is_used_elsewhere_counts_and_leaves_no_doubt(branches: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = bt.TTLinear(8, 8, max_rank=2), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(self.bn(self.fc(x)), self.fc.weight.t())
            return -y if branches and y.sum() < 0 else y

    found = normalised_layers(Tied())
    assert (found.seen, found.doubtful) == ({}, {})


def test_cores_that_are_shared_count() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv())
    assert normalised_layers(model).seen == {"0": ["1"]}
    model[3].cores = model[0].cores
    assert normalised_layers(model).seen == {}


def test_a_module_under_two_names_is_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Branching("nowhere"), Branching("skip")
            self.stages = nn.ModuleList([self.first, self.second])

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    assert normalised_layers(Twice()).seen == {"first.conv": ["first.bn"]}
    assert normalised_layers(Untraceable(Twice())).seen == {"body.0.first.conv": ["body.0.first.bn"]}
    shared = nn.BatchNorm2d(8)
    parts = Untraceable(nn.Sequential(conv(), shared), nn.Sequential(conv(), shared), Untraceable(nn.ReLU()))
    assert normalised_layers(parts).seen == {}, "the statistics are those of two layers"


def test_flags_are_as_they_are_by_default() -> None:
    class Flagged(Branching):
        def forward(self, x: Tensor, features: bool = False, scale: float | None = None) -> Tensor:
            y: Tensor = self.bn(self.conv(x))
            return y if features else y.mean((2, 3)) * (1.0 if scale is None else scale)

    assert normalised_layers(Flagged("nowhere")).seen == {"conv": ["bn"]}


def test_what_cannot_be_copied_is_no_hindrance() -> None:
    model = Branching("nowhere")
    model.lock, model.history = threading.Lock(), []  # type: ignore[assignment]
    model.history.append(model(torch.randn(2, 8, 4, 4)))  # type: ignore[operator, union-attr]
    assert normalised_layers(model).seen == {"conv": ["bn"]}
    assert IdleBiases(model).names == {"conv": ["bn"]}


def test_hooks_at_that_place_may_use_it() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), conv(), nn.BatchNorm2d(8), conv(), nn.BatchNorm2d(8))
    model[0].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    found = normalised_layers(model)
    assert found.seen == {"4": ["5"]}
    assert found.doubtful == {"0": ["1"], "2": ["3"]}


def test_finding_them_leaves_nothing_behind() -> None:
    class Watching(nn.Module):
        mean: Tensor
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(), nn.BatchNorm2d(8))
            self.register_buffer("mean", torch.ones(1))
            self.calls, self.seen, self.inner = 0, [], {"last": deque([0])}
            self.register_buffer("graph", torch.eye(2).to_sparse())
            self.register_buffer("count", torch.tensor([0.0, math.nan]))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.mul_(0.9)
            self.features: Tensor = self.body(x)
            self.seen.append(self.features)
            self.inner["last"].append(1)
            self.count.add_(1)
            return self.features

    model = Watching()
    model(torch.randn(2, 8, 4, 4))  # its features now have a gradient, of which no copy can be made
    features = model.features
    model.inner["last"].clear()
    assert normalised_layers(model).seen == {"body.0": ["body.1"]}
    assert IdleBiases(model).names == {"body.0": ["body.1"]}
    assert (model.calls, model.features is features, len(model.seen)) == (1, True, 1)
    assert model.mean == 0.9
    assert model.inner == {"last": deque()}
    assert model.count[0] == 1


def test_finding_them_leaves_the_model_alone() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(8)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    normalised_layers(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
