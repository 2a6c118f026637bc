"""`tensorize_`: the right layers are factorised, the model stays whole, and errors leave it unchanged."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compress_kit import unchanged
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import bayestrain as bt
from bayestrain.errors import ConfigError, ConversionError, ShapeError


def digits_network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 6))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, (1, 3), stride=2, bias=False),
        nn.Flatten(), nn.Linear(8 * 4 * 3, 5),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_convolutional_network(device: str) -> None:
    with torch.device(device):
        model = cnn()
    first, norm, dense = model[0], model[1], bt.count_parameters(model)
    report = bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    assert [type(module) for module in model] == [
        bt.TensorConv2d, nn.BatchNorm2d, nn.ReLU, bt.TensorConv2d, nn.Flatten, bt.TensorLinear,
    ]  # fmt: skip
    assert model[1] is norm
    assert (model[3].kernel_size, model[3].stride, model[3].bias) == ((1, 3), (2, 2), None)
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert model(torch.randn(2, 4, 8, 8, device=device)).shape == (2, 5)
    assert {row.name: row.shape for row in report.rows} == {"0": (16, 4, 3, 3), "3": (8, 16, 1, 3), "5": (5, 96)}
    assert (report.parameters, report.dense_parameters) == (bt.count_parameters(model), dense)
    assert bt.ranks(model)["5"] == (4,)
    model(torch.randn(2, 4, 8, 8, device=device)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if device == "cpu":
        assert_close(model[0].bias, first.bias, rtol=0, atol=0)


def test_the_report_prints_as_a_table() -> None:
    model = digits_network()
    report = bt.tensorize_(model, filter_fn=lambda _, name: name == "1")
    assert str(report).splitlines() == [
        "layer  format     shape    modes             ranks         parameters    dense  times smaller",
        "-----  ---------  -------  ----------------  ------------  ----------  -------  -------------",
        "1      tt paired  625x784  5x5x5x5, 7x4x7x4  1 20 20 20 1      23,725  490,625           20.7",
        "",
        "stays dense  why                       names  number  parameters  share",
        "-----------  ------------------------  -----  ------  ----------  -----",
        "Linear       filter_fn returned False  3           1       6,260   1.3%",
        "",
        "29,985 parameters, 16.6 times fewer than the dense 496,885.",
    ]
    assert report.kept == (("3", "Linear", "filter_fn returned False", 6260),)
    assert type(model[3]) is nn.Linear


def test_filters_see_candidates_and_modes_are_per_layer() -> None:
    model, seen = cnn(), list[tuple[type, str]]()

    def only_convolutions(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return isinstance(module, nn.Conv2d)

    bt.tensorize_(model, filter_fn=only_convolutions)
    assert seen == [(nn.Conv2d, "0"), (nn.Conv2d, "3"), (nn.Linear, "5")]
    assert list(bt.ranks(model)) == ["0", "3"]
    model = mlp()
    bt.tensorize_(model, bt.TensorizeConfig(modes={"0": ((2, 3, 4), (5, 2, 2)), "2": (None, (6, 1))}))
    assert (model[0].in_modes, model[0].out_modes) == ((2, 3, 4), (5, 2, 2))
    assert (model[2].in_modes, model[2].out_modes) == ((5, 4), (6, 1))


def test_a_module_used_twice_stays_one_module() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(16, 16)
            self.there, self.back = nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"again": shared})
            self.twice = self.there

    model = Recurrent()
    report = bt.tensorize_(model, bt.TensorizeConfig(max_rank=2))
    assert isinstance(model.there[0], bt.TensorLinear)
    assert model.there[0] is model.back["again"] is model.twice[0]
    assert [row.name for row in report.rows] == ["there.0"]
    assert sum(1 for module in model.modules() if isinstance(module, bt.TensorLinear)) == 1


def test_hooks_stay_and_those_on_the_state_dict_are_refused() -> None:
    model = mlp()
    layer, called = model[0], list[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    handles = [
        layer.register_forward_pre_hook(note("before, named"), with_kwargs=True),
        layer.register_forward_pre_hook(note("before")),
        layer.register_forward_hook(lambda _, __, out: note("after")() or 0 * out),
        layer.register_forward_hook(note("after, named"), with_kwargs=True, always_call=True),
        layer.register_full_backward_pre_hook(note("back, before")),
        layer.register_full_backward_hook(note("back, after")),
    ]
    bt.tensorize_(model)
    x = torch.randn(2, 24, requires_grad=True)
    assert not model[0](x).any()
    model(x).sum().backward()
    forward = ["before, named", "before", "after", "after, named"]
    assert called == [*forward, *forward, "back, before", "back, after"]
    for handle in handles:
        handle.remove()
    called.clear()
    assert model[0](x).any()
    model(x).sum().backward()
    assert not called
    layer.register_forward_hook(note("of the old layer"))
    model[0].register_forward_hook(note("of its twin"))
    model(x)
    assert called == ["of its twin"]
    model = mlp()
    handle = model[2].register_state_dict_post_hook(lambda *_: None)
    with unchanged(model), pytest.raises(ConversionError, match=r"'2' \(Linear\): it has hooks on its state_dict"):
        bt.tensorize_(model)
    handle.remove()
    bt.tensorize_(model)


def test_subclasses_are_kept_and_listed_and_parametrised_modules_are_some() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(24, 20), Mine(20, 30))
    report = bt.tensorize_(model)
    assert list(bt.ranks(model)) == ["0"]
    assert report.kept == (("1.weight", "Mine", "a subclass, whose users may rely on .weight", 600),)
    bt.tensorize_(model, include="1.weight")  # its class stays
    assert isinstance(model[1], Mine)
    assert list(bt.ranks(model)) == ["0", "1.factorized.weight"]
    model = mlp()
    parametrizations.orthogonal(model[0])
    report = bt.tensorize_(model)
    assert [row.name for row in report.rows] == ["2"]
    assert {row.name for row in report.kept} == {"0", "0.parametrizations.weight.original"}


@pytest.mark.parametrize("init", ["he", "svd"])
def test_dtype_training_mode_and_frozen_layers_stay(init: str) -> None:
    model = cnn().to(torch.float64)
    model[0].requires_grad_(False)
    model[5].bias.requires_grad_(False)
    model[3].eval()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3, init=init))
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    assert [module.training for module in model] == [True, True, True, False, True, True]
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    assert {name: p.requires_grad for name, p in model[5].named_parameters()} == {
        "factorized.cores.0": True, "factorized.cores.1": True, "bias": False,
    }  # fmt: skip


@pytest.mark.parametrize("build", [mlp, cnn])
def test_svd_with_full_ranks_computes_the_same(build: Any) -> None:
    model = build().to(torch.float64).eval()
    x = torch.randn(3, 24, dtype=torch.float64) if build is mlp else torch.randn(3, 4, 8, 8, dtype=torch.float64)
    expected = model(x)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=10_000, init="svd"), lambda *_: True)
    assert bt.ranks(model)
    assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", [lambda: nn.Linear(16, 12), lambda: nn.Conv2d(16, 12, 3)])
def test_svd_of_a_layer_that_starts_at_zero_can_train(build: Any) -> None:
    model = nn.Sequential(build())
    nn.init.zeros_(model[0].weight)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=5, init="svd"))
    assert max(bt.ranks(model)["0"]) == 5
    assert float(model[0].weight.detach().abs().max()) == 0
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        (model[0].weight - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert all(bool(core.abs().amax(tuple(range(core.ndim - 1))).gt(0).all()) for core in model[0].cores)
        assert float(model[0].weight.abs().max()) > 0


def test_svd_keeps_to_its_tolerance_and_auto_starts_by_the_kind_of_layer() -> None:
    dense = mlp()
    model = copy.deepcopy(dense)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=10_000, init="svd", tol=0.4))
    for k in (0, 2):
        assert 0.05 < relative_error(model[k].weight, dense[k].weight) <= 0.4
    capped = mlp()
    bt.tensorize_(capped, bt.TensorizeConfig(max_rank=2, init="svd"))
    assert bt.ranks(capped) == {"0": (2,), "2": (2,)}
    model = nn.Sequential(nn.Embedding(400, 12), cnn(), nn.Conv1d(12, 16, 1), nn.Bilinear(12, 16, 16))
    report = bt.tensorize_(model, bt.TensorizeConfig(4, "auto"), include=["0", "1.0", "1.3", "1.5", "2", "3.weight"])
    assert [row.format for row in report.rows] == ["tt", "tucker", "tucker", "tt", "tt", "tucker"]


@pytest.mark.parametrize("init", ["he", "paper"])
@pytest.mark.parametrize("max_rank", [1, 20])
def test_random_starts_have_their_target_variance(init: str, max_rank: int) -> None:
    model = cnn()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=max_rank, init=init))
    for name in bt.ranks(model):
        weight = model.get_submodule(name).weight.detach()
        target = 2 / weight[0].numel() if init == "he" else math.sqrt(2 / weight.numel())
        assert abs(float(weight.square().mean()) / target - 1) < 0.1, name


@pytest.mark.parametrize("max_rank", [20, 10_000])
def test_layers_that_would_grow_start_at_lower_ranks_or_stay_dense(max_rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(5, 2), nn.Linear(784, 625))
    report = bt.tensorize_(model, bt.TensorizeConfig(max_rank=max_rank))
    first, last = report.rows
    assert first.parameters < first.dense_parameters < 1.2 * first.parameters
    assert last.parameters < last.dense_parameters
    assert last.ranks == (1, 20, 20, 20, 1) or max_rank > 20
    assert report.kept == (("1", "Linear", "too small to become smaller", 12),)
    assert "grown" not in str(report)


def test_what_would_grow_stays_dense_unless_it_is_chosen() -> None:
    for how in ({"include": "0"}, {"filter_fn": lambda *_: True}):
        model = nn.Sequential(nn.Linear(64, 64))
        report = bt.tensorize_(model, **how)
        assert "The model has grown, from 4,160 parameters to" in str(report)
        assert "Larger than dense at these ranks: 0." in str(report)
    model = nn.Sequential(nn.Linear(24, 20), nn.Linear(24, 20))
    with torch.no_grad():
        model[1].weight.copy_(torch.outer(torch.arange(20.0), torch.arange(24.0)))
    report = bt.tensorize_(model, bt.TensorizeConfig(max_rank=100, init="svd"))
    assert list(bt.ranks(model)) == ["1"]
    assert re.match(r"would grow to [0-9]+ parameters", report.kept[0].reason)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(40, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.depthwise = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.rnn, self.cell = nn.LayerNorm(32), nn.GRU(32, 32, batch_first=True), nn.LSTMCell(32, 32)
        self.bias = nn.Parameter(torch.randn(3, 32))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.tokens(index) + self.positions(torch.arange(index.shape[1]))
        x = x + self.depthwise(self.conv(x.mT)).mT
        x = self.rnn(self.attention(x, x, x)[0])[0]
        return self.head(self.norm(x[:, 0] + self.cell(x[:, -1])[0] + self.bias[0]))


def test_defaults_convert_what_holds_parameters_and_name_the_rest() -> None:
    model = Blocks()
    report = bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    assert list(bt.ranks(model)) == [
        "tokens", "conv", "attention.out_proj", "attention.factorized.in_proj_weight", "rnn.factorized.weight_ih_l0",
        "rnn.factorized.weight_hh_l0",
    ]  # fmt: skip
    why = {row.name: row.reason for row in report.kept}
    assert why == {
        "bias": "no factorised layer stands for Blocks",
        "positions": "a table of positions",
        "depthwise.weight": "grouped: the kernel is small",
        "cell.weight_ih": "its weights would be made whole at every time step",
        "cell.weight_hh": "its weights would be made whole at every time step",
        "norm": "only vectors",
    }
    assert model.head.factorized is model.tokens.factorized
    model(torch.randint(0, 50, (2, 7))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("arguments", "expected"), [
    ({"include": "all-linear", "exclude": "head"}, ["attention.out_proj"]),
    ({"include": ["conv", "rnn*"]}, ["conv", "rnn.factorized.weight_ih_l0", "rnn.factorized.weight_hh_l0"]),
    ({"include": "attention*"}, ["attention.out_proj", "attention.factorized.in_proj_weight"]),
    ({"include": "*", "exclude": ["rnn", "attention", "*.out_proj", "head", "tokens"]}, ["conv"]),
    ({"include": ["positions", "cell.weight_hh"]}, ["positions", "cell.factorized.weight_hh"]),
    ({"include": "cell.weight_?h"}, ["cell.factorized.weight_ih", "cell.factorized.weight_hh"]),
    ({"include": ["bias", "depthwise"]}, ["depthwise.factorized.weight", "factorized.bias"]),
])  # fmt: skip
def test_names_and_patterns(arguments: dict[str, Any], expected: list[str]) -> None:
    model, index = Blocks(), torch.randint(0, 50, (2, 7))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=3), **arguments)
    assert list(bt.ranks(model)) == expected
    assert model(index).shape == (2, 50)


@pytest.mark.parametrize(("settings", "message"), [
    *(({"max_rank": rank}, "max_rank must be an integer of at least 1, or a tuple of them, got ")
      for rank in (0, -1, (3, 0), 2.5, True, "20")),
    ({"layout": "sideways"}, r"layout must be one of \('paired', 'split', 'auto'\), got 'sideways'\."),
    ({"init": "zeros"}, r"init must be one of \('he', 'paper', 'svd'\), got 'zeros'\."),
    ({"init": "svd", "tol": 1.0}, r"tol is a relative error and must lie in \[0, 1\), got 1\.0\."),
    ({"format": "cpd"}, r"format must be one of \('tt', 'cp', 'tucker', 'ring'\), got 'cpd'\."),
    ({"format": "auto", "max_rank": (3, 2)}, r"format='auto' takes one max_rank, got \(3, 2\)"),
    ({"layout": "auto", "max_rank": (3, 2)}, r"layout='auto' takes one max_rank, got \(3, 2\)"),
    ({"format": "auto", "init": "svd"}, r"format='auto' with init='svd' compares sizes at one error.* tol=0\.1\."),
    ({"tol": 0.1}, r"tol=0\.1 only means something with init='svd', got init='he'\."),
])  # fmt: skip
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        bt.TensorizeConfig(**settings)
    found = bt.TensorizeConfig(max_rank=tuple(np.array([5, 2]))).max_rank
    assert (found, [type(rank) for rank in (*found, bt.TensorizeConfig(np.int64(5)).max_rank)]) == ((5, 2), [int] * 3)


@pytest.mark.parametrize(("rank", "layouts"), [(4, "paired paired split"), (20, "split split paired")])
def test_auto_lays_out_matrices_by_their_multiplications(rank: int, layouts: str) -> None:
    """A small layer is split at a low rank only; an LSTM's weights are made whole, a table is always split."""
    model = nn.Sequential(
        nn.Linear(768, 768), nn.MultiheadAttention(512, 8), nn.Linear(64, 48), nn.LSTM(512, 8), nn.Embedding(900, 64)
    )
    include = ["0", "*.in_proj_weight", "2", "3", "4"]
    report = bt.tensorize_(model, bt.TensorizeConfig(rank, layout="auto"), include=include)
    assert [row.layout for row in report.rows] == [*layouts.split(), "paired", "paired", "split"]


def test_auto_takes_the_fewest_parameters_at_one_error_and_else_the_smallest_error() -> None:
    """One layer is of low CP rank, the other of low Tucker rank."""
    sizes, model = (9, 14, 16), nn.Sequential(nn.Conv2d(14, 16, 3), nn.Conv2d(14, 16, 3)).double()
    for layer, name, rank in zip(model, ("cp", "tucker"), (3, (2, 3, 3)), strict=True):
        format = bt.formats.get(name)
        cores = bt.formats.algebra.random_cores(format.equation(sizes), sizes, format.max_ranks(sizes, rank), 1.0)
        layer.weight.data = bt.formats.dense(format.equation(sizes), cores).movedim((0, 1), (2, 1)).unflatten(2, (3, 3))
        layer.weight.data = layer.weight.data.double()
    for max_rank, reached in ((10, True), (1, False)):
        found = {}
        for format in ("tt", "cp", "tucker", "ring", "auto"):
            own = copy.deepcopy(model)
            report = bt.tensorize_(own, bt.TensorizeConfig(max_rank, format, init="svd", tol=0.01), lambda *_: True)
            lost = [relative_error(new.weight, old.weight) for new, old in zip(own, model, strict=True)]
            formats = [row.format for row in report.rows]
            found[format] = list(zip(formats, lost, map(bt.count_parameters, own), strict=True))
        auto = found.pop("auto")
        assert [row[0] for row in auto] == ["cp", "tucker"] or not reached
        for number, (_, lost, size) in enumerate(auto):
            others = [own[number] for own in found.values()]
            if reached:
                assert lost <= 0.0101
                assert size == min(own[2] for own in others if own[1] <= 0.0101)
            else:
                assert lost <= min(own[1] for own in others) * (1 + 1e-6)


def with_value(value: float, key: str) -> nn.Module:
    layer = nn.Linear(20, 6)
    getattr(layer, key).data.view(-1)[3] = value
    return layer


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated, models made with it are still around
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(20, 6)), {nn.Linear}, dtype=torch.qint8)
    return model[0]


NOT_PLAIN = "it is quantised or its weight is not a plain floating point parameter. Leave it dense with exclude='1'."
UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a NaN": (lambda: with_value(math.nan, "weight"), "its weight has NaN or infinite entries. Repair or"),
    "infinite": (lambda: with_value(math.inf, "bias"), "its bias has NaN or infinite entries. Repair or"),
    "lazy": (lambda: nn.LazyConv2d(6, 3), "it is lazy and has no weights yet. Run one batch through the model first."),
    "quantised": (quantised, NOT_PLAIN),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(20, 6), "weight", 0.5), NOT_PLAIN),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_layer_that_cannot_be_factorised_is_refused_unless_it_is_left_out(kind: str) -> None:
    make, why = UNFIT[kind]
    model = nn.Sequential(nn.Linear(24, 20), make())
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    assert str(error.value).startswith(f"Cannot convert '1' ({type(model[1]).__name__}): {why}")
    bt.tensorize_(model, exclude="1")
    assert list(bt.ranks(model)) == ["0"]


def test_every_obstacle_is_named_at_once_and_may_be_removed() -> None:
    model = nn.Sequential(nn.Linear(24, 20), nn.LazyLinear(6), with_value(math.nan, "weight"))
    with unchanged(model), pytest.raises(ConversionError) as error:
        bt.tensorize_(model)
    first, lazy, broken = str(error.value).splitlines()
    assert first == "2 layers cannot be converted, so nothing was:"
    assert lazy.startswith("'1' (LazyLinear): it is lazy")
    assert broken.startswith("'2' (Linear): its weight has NaN")
    model = nn.Sequential(nn.LazyLinear(20), prune.random_unstructured(nn.Linear(20, 6), "weight", 0.5))
    model(torch.randn(2, 24))
    prune.remove(model[1], "weight")
    bt.tensorize_(model)
    assert list(bt.ranks(model)) == ["0", "1"]


@pytest.mark.parametrize("first", [lambda: nn.Embedding(24, 24), lambda: nn.Linear(24, 24, bias=False)])
def test_layers_that_share_a_weight_share_the_factorised_one(first: Callable[[], nn.Module]) -> None:
    model = tied("weight", first()).double()
    expected = model[1].weight.detach().clone()
    dense = bt.count_parameters(model)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=24, init="svd"), include=["1", "2"])
    assert model[1].factorized is model[2].factorized
    assert_close(model[1].weight, expected)
    assert_close(model[2].weight, expected)
    found = bt.summary(model)
    assert [row.name for row in found.rows] == ["1"]
    assert found.dense_parameters == dense
    copied = copy.deepcopy(model)
    assert copied[1].factorized is copied[2].factorized
    bt.compact_(model, tol=0.5)
    assert model[1].ranks == model[2].ranks
    copied.load_state_dict(model.state_dict())
    assert_close(copied[2].weight, model[1].weight)


def test_a_shared_bias_stays_shared_and_a_weight_shared_with_what_stays_dense_stays_dense() -> None:
    model = tied("bias", nn.Linear(24, 24))
    bt.tensorize_(model)
    assert model[1].bias is model[2].bias
    model = tied("weight", nn.Bilinear(24, 1, 24))
    report = bt.tensorize_(model)
    assert list(bt.ranks(model)) == ["0"]
    assert "its weight is shared with 1.weight, not converted" in {row.reason for row in report.kept}


def tied(key: str, first: nn.Module) -> nn.Module:
    second = nn.Linear(24, 24)
    setattr(second, key, getattr(first, key))
    return nn.Sequential(nn.Linear(24, 24), first, second)


def tensorised() -> nn.Module:
    model = mlp()
    bt.tensorize_(model)
    return model


def modes(*given: Any, layer: str = "2", init: str = "he") -> dict[str, Any]:
    return {"config": bt.TensorizeConfig(init=init, modes={layer: given})}  # the first layer would be fine


NOTE = "\nThis happened at layer {!r} of the model; nothing was converted."
NOTHING = "tensorize_ found nothing to convert: "
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "a filter for the config": (mlp, {"config": lambda *_: True}, ConfigError, "config must be a TensorizeConfig"),
    "a filter that fails": (mlp, {"filter_fn": lambda _, name: {"0": True}[name]}, KeyError, "'2'"),
    "ranks that do not fit every layer": (
        digits_network, {"config": bt.TensorizeConfig(max_rank=(8, 1, 5))}, ShapeError,
        "max_rank must be one number or 1 ranks, one per bond, got (8, 1, 5)." + NOTE.format("3"),
    ),
    "modes that are too small": (mlp, modes((5, 4), (4, 1)), ShapeError,
                                 "The product of out_modes must be at least 6, got (4, 1) with product 4. Try "),
    "too many modes": (mlp, modes((5, 4), (3, 2, 1)), ShapeError,
                       "In the paired layout in_modes and out_modes must be equally many and at least 2, got "),
    "modes that are too large": (mlp, modes((50, 4), None, init="svd"), ShapeError, "in_modes are larger than needed"),
    "modes of no layer": (mlp, modes((4, 5), None, layer="7"), ConfigError,
                          "modes names layers that are not converted: ['7']. Converted are ['0', '2']."),
    "all filtered out": (mlp, {"filter_fn": lambda *_: False}, ConversionError,
                         NOTHING + "0 stays dense (filter_fn returned False); 2 stays dense ("),
    "no layer": (lambda: nn.Sequential(nn.LayerNorm(3)), {}, ConversionError, NOTHING + "this model has no dense"),
    "tensorised before": (tensorised, {}, ConversionError, NOTHING + "this model has no dense layer."),
    "a part of a shared weight": (lambda: tied("weight", nn.Embedding(24, 24)), {"include": "2"}, ConversionError,
                                  "Cannot convert '2' (Linear): its weight is shared with 1.weight, not converted."),
    "a pattern that matches nothing": (mlp, {"include": "head*"}, ConfigError,
                                       "include has 'head*', which matches none of the layers: 0, 2."),
    "an exclusion that matches nothing": (mlp, {"exclude": ["0", "head"]}, ConfigError, "exclude has 'head', which"),
    "nothing but small layers": (lambda: nn.Sequential(nn.Linear(3, 1)), {}, ConversionError,
                                 NOTHING + "0 stays dense (too small to become smaller)."),
    "the model itself": (lambda: nn.Linear(24, 20), {}, ConversionError,
                         "Cannot convert '' (Linear): the model itself cannot be replaced in place. Wrap it in "),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_leaves_the_model_unchanged(kind: str) -> None:
    build, arguments, error, message = REFUSED[kind]
    model = build()
    with unchanged(model), pytest.raises(error, match=f"^{re.escape(message)}"):
        bt.tensorize_(model, **arguments)
