"""Layers whose scale a normalisation makes free are found, and held without changing what the network computes."""

import copy
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.errors import BayesTrainError, HoldWarning
from bayestrain.nn import TensorConv2d, TensorLinear
from bayestrain.prior import RankPrior, normalised_layers


def conv(channels: int = 8) -> TensorConv2d:
    return TensorConv2d(channels, channels, 3, padding=1, max_rank=2)


def linear() -> TensorLinear:
    return TensorLinear(8, 8, max_rank=2)


class ForgetsScale(nn.Module):
    """A user's own normalisation: filter response norm."""

    forgets_scale = True

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean((2, 3), keepdim=True).sqrt()


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "batch": (conv, lambda: nn.BatchNorm2d(8)),
    "batch of vectors": (linear, lambda: nn.BatchNorm1d(8)),
    "instance": (conv, lambda: nn.InstanceNorm2d(8)),
    "instance with statistics": (conv, lambda: nn.InstanceNorm2d(8, track_running_stats=True)),
    "group": (conv, lambda: nn.GroupNorm(4, 8)),
    "layer": (linear, lambda: nn.LayerNorm(8)),
    "layer of maps": (conv, lambda: nn.LayerNorm((8, 5, 5))),
    "RMS": (linear, lambda: nn.RMSNorm(8)),
    "a user's": (conv, ForgetsScale),
}

norms = pytest.mark.parametrize(("layer", "norm"), NORMS.values(), ids=NORMS.keys())


@norms
@pytest.mark.parametrize("traced", [True, False])
def test_holding_brings_the_norm_back_and_keeps_the_function(
    layer: Callable[[], nn.Module], norm: Callable[[], nn.Module], traced: bool
) -> None:
    model = nn.Sequential(layer(), norm(), nn.ReLU(), *([] if traced else [Untraceable(nn.ReLU())])).double()
    x = torch.randn(6, 8, 5, 5).double() if isinstance(model[0], TensorConv2d) else torch.randn(6, 8).double()
    prior = RankPrior(model, num_data=10, align_every=0)
    assert {name: held.norms for name, held in prior.held.items()} == {"0": (model[1],)}
    assert normalised_layers(nn.Sequential(layer(), nn.ReLU(), norm(), layer())).sure == {}  # right behind a layer only
    model(x)  # running statistics of its own
    model[1].eps = 1e-14
    size = model[0].weight.detach().norm()
    us = [u.clone() for u in model[0].factorized.rank_state.log_lambdas]
    with torch.no_grad():
        for core in model[0].cores:
            core.mul_(1.3)
    drifted = copy.deepcopy(model)
    for group in prior.groups:
        group.hold_scale_()
    torch.testing.assert_close(model[0].weight.detach().norm(), size)
    for u, old in zip(model[0].factorized.rank_state.log_lambdas, us, strict=True):
        torch.testing.assert_close(u, old - math.log(1.3))
    for training in (False, True):  # the other way round, the statistics would have moved
        torch.testing.assert_close(model.train(training)(x), drifted.train(training)(x), rtol=1e-8, atol=1e-8)


def test_a_layer_that_starts_at_zero_is_held_once_it_has_a_norm() -> None:
    dense = nn.Conv2d(8, 8, 3)
    nn.init.zeros_(dense.weight)
    model = nn.Sequential(TensorConv2d.from_dense(dense, max_rank=3), nn.BatchNorm2d(8))
    prior = RankPrior(model, num_data=10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        (model(torch.randn(4, 8, 5, 5)).square().mean() + prior.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
    assert model[0].factorized.rank_state.held_norm > 0
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_names_are_checked_and_frozen_layers_left_alone() -> None:
    for frozen in ("bias", "factorized.cores.0"):
        model = nn.Sequential(conv(), nn.BatchNorm2d(8))
        model[0].get_parameter(frozen).requires_grad_(False)
        assert RankPrior(model, num_data=10).held == {}
    model = nn.Sequential(conv(), nn.BatchNorm2d(8))
    assert list(RankPrior(model, num_data=10, hold_scale="0").held) == ["0"]
    assert RankPrior(model, num_data=10, hold_scale=()).held == {}
    with pytest.raises(BayesTrainError, match=r"hold_scale must name factorised layers of \['0'\], got \['1'\]"):
        RankPrior(model, num_data=10, hold_scale=["0", "1"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_held_by_what_it_can_hold_exactly(dtype: torch.dtype) -> None:
    model = nn.Sequential(TensorLinear(64, 64, max_rank=4, dtype=dtype), nn.BatchNorm1d(64)).eval()
    prior = RankPrior(model, num_data=10, align_every=0)
    prior.step()
    norm = float(model[0].weight.detach().float().norm())
    x = torch.randn(16, 64).to(dtype)
    with torch.no_grad():
        model[1].running_mean.uniform_()
        model[0].bias.uniform_()
        for share in (1.01, 0.99, 3.0, 0.2):
            for core in model[0].cores:
                core.mul_(share)
            before = model(x)
            for _ in range(100):
                prior.step()
            model[1].eps = 1e-14
            assert (model(x) - before).abs().max() < 0.02 * before.abs().max()
            left = float(model[0].weight.float().norm()) / norm
            most = 1.01 * 2 ** (len(model[0].cores) / 2)  # every core is within the root of two
            assert 1 / most < left < most


GOOD = ("nowhere", "second batch norm", "called again with")
BAD = ("skip", "skip in training", "skip in evaluation", "functional", "called again without",
       "batch norm called again", "output", "attribute", "list", "bias")  # fmt: skip


class Branching(nn.Module):
    """``bn(conv(x))``, with `use` saying where else the convolution's output goes."""

    def __init__(self, use: str = "nowhere") -> None:
        super().__init__()
        self.conv, self.bn, self.other_bn, self.use = conv(), nn.BatchNorm2d(8), nn.BatchNorm2d(8), use

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        out = self.bn(y)
        uses: dict[str, Callable[[], Any]] = {
            "nowhere": lambda: out,
            "second batch norm": lambda: out + self.other_bn(y),
            "called again with": lambda: self.other_bn(self.conv(out)),
            "skip": lambda: out + y,
            "skip in training": lambda: out + y if self.training else out,
            "skip in evaluation": lambda: out if self.training else out + y,
            "functional": lambda: out * F.relu(y),
            "called again without": lambda: self.conv(out),
            "batch norm called again": lambda: self.bn(F.relu(out)),
            "output": lambda: (out, y),
            "attribute": lambda: setattr(self, "kept", y) or out,
            "list": lambda: setattr(self, "kept", [y]) or out,
            "bias": lambda: out * self.conv.bias[0],
        }
        return uses[self.use]()


@pytest.mark.parametrize("use", [*GOOD, *BAD])
def test_only_layers_whose_output_only_normalisations_use_are_found(use: str) -> None:
    model = Branching(use)
    norms = ["bn"] if use == "nowhere" else ["bn", "other_bn"]
    expected = ({"conv": norms} if use in GOOD else {}, {})
    assert normalised_layers(model) == normalised_layers(model.eval()) == expected
    assert not hasattr(model, "kept")


class Untraceable(nn.Module):
    """Branches on its data, so that no symbolic trace exists."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.body(-x)


def test_in_an_untraceable_model_neighbours_in_a_sequential_count_and_others_are_named() -> None:
    model = Untraceable(conv(), nn.BatchNorm2d(8), conv(), nn.ReLU(), nn.BatchNorm2d(8), Branching())
    assert normalised_layers(model) == ({"body.0": ["body.1"]}, {"body.5.conv": ["body.5.bn"]})
    with pytest.warns(HoldWarning, match=r"follows body.5.conv, .* type hold_scale=\['body.0', 'body.5.conv'\]"):
        assert list(RankPrior(model, num_data=10).held) == ["body.0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held = RankPrior(model, num_data=10, hold_scale=["body.5.conv", "body.2"]).held
    assert {name: own.norms for name, own in held.items()} == {"body.2": (), "body.5.conv": (model.body[5].bn,)}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize(("wrap", "name"), [(nn.DataParallel, "module"), (torch.compile, "_orig_mod")])
def test_a_wrapped_model_is_the_same_model(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model = wrap(nn.Sequential(Branching(), Branching("skip")))
    assert normalised_layers(model).sure == {f"{name}.0.conv": [f"{name}.0.bn"]}
    assert list(RankPrior(model, num_data=10).held) == [f"{name}.0.conv"]


def test_weights_and_modules_used_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = linear(), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.bn(self.fc(x)), self.fc.weight.t())

    assert normalised_layers(Tied()) == ({}, {"fc": ["bn"]}), "no symbol stands for a weight as a whole"
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv())
    assert normalised_layers(model).sure == {"0": ["1"]}
    model[3].factorized = model[0].factorized
    assert normalised_layers(model) == ({}, {})

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Branching()
            self.stages = nn.ModuleList([self.first, Branching("skip")])

        def forward(self, x: Tensor) -> Tensor:
            return self.stages[1](self.stages[0](x))

    assert normalised_layers(Twice()).sure == {"first.conv": ["first.bn"]}
    shared = nn.BatchNorm2d(8)
    parts = Untraceable(nn.Sequential(conv(), shared), nn.Sequential(conv(), shared))
    assert normalised_layers(parts) == ({}, {}), "the statistics are those of two layers"


def test_flags_take_their_defaults_and_hooks_may_use_what_is_there() -> None:
    class Flagged(Branching):
        def forward(self, x: Tensor, features: bool = False, scale: float | None = None) -> Tensor:
            y: Tensor = self.bn(self.conv(x))
            return y if features else y.mean((2, 3)) * (1.0 if scale is None else scale)

    assert normalised_layers(Flagged()).sure == {"conv": ["bn"]}
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), conv(), nn.BatchNorm2d(8), conv(), nn.BatchNorm2d(8))
    model[0].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    assert normalised_layers(model) == ({"4": ["5"]}, {"0": ["1"], "2": ["3"]})
    with pytest.warns(HoldWarning, match=r"follows 0, 2, .* type hold_scale=\['0', '2', '4'\]"):
        assert list(RankPrior(model, num_data=10).held) == ["4"]
    assert RankPrior(model, num_data=10, hold_scale=["0"]).held["0"].norms == (model[1],)


def test_finding_them_leaves_nothing_behind() -> None:
    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(), nn.BatchNorm2d(8))
            self.register_buffer("mean", torch.ones(1))
            self.calls, self.seen, self.features = 0, [], torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.mul_(0.9)
            self.features = self.body(x)
            self.seen.append(self.features + 0)
            return self.features

    model = Watching()
    before, features = copy.deepcopy(model.state_dict()), model.features
    for _ in range(2):
        assert normalised_layers(model).sure == {"body.0": ["body.1"]}
        assert (model.calls, model.features is features, len(model.seen), model.training) == (0, True, 0, True)
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
        model.lock = threading.Lock()  # now it cannot be copied: neighbours in a Sequential still count
