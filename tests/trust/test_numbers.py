"""Numbers at the edge: every type, tiny and huge values, sizes of 1, almost no data, frozen layers."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.errors import BayesTrainError
from bayestrain.formats import FORMATS
from bayestrain.nn import factorized_weights

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("paired", "split")
KINDS = list(itertools.product([each.name for each in FORMATS], LAYOUTS))
SCALES = (1e-20, 1e-10, 1.0, 1e10, 1e20)


def layers(format: str, layout: str, rank: int = 2) -> list[tuple[nn.Module, Tensor]]:
    options: dict[str, Any] = {"max_rank": rank, "format": format, "layout": layout}
    return [
        (bt.TensorLinear(12, 6, **options), torch.randn(3, 12)),
        (bt.TensorConv2d(4, 6, 3, **options), torch.randn(2, 4, 5, 5)),
        (bt.TensorEmbedding(10, 6, **options), torch.tensor([[0, 9, 3]])),
        (bt.TensorLinear(1, 1, **options), torch.randn(1, 1)),
        (bt.TensorConv2d(1, 1, 1, **options), torch.randn(1, 1, 1, 1)),
        (bt.TensorEmbedding(1, 1, **options), torch.tensor([0])),
    ]


def low_rank(scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A 12 x 16 matrix of rank 2."""
    draw = torch.Generator().manual_seed(1)
    return (scale * torch.randn(12, 2, generator=draw, dtype=torch.float64)
            @ torch.randn(2, 16, generator=draw, dtype=torch.float64)).to(dtype)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("format", "layout"), KINDS)
def test_layers_of_every_type_and_size_agree_with_their_weight(format: str, layout: str, dtype: torch.dtype) -> None:
    for rank in (1, 2):
        for layer, x in layers(format, layout, rank):
            layer.to(dtype)
            own = x.to(dtype) if x.is_floating_point() else x
            found = layer(own)
            expected = layer.to_dense()(own)
            assert found.dtype == dtype
            error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
            assert error < 40 * torch.finfo(dtype).eps, (layer, float(error))
            found.float().square().sum().backward()
            assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@torch.no_grad()
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("format", "layout"), KINDS)
def test_ranks_and_errors_do_not_depend_on_scale(format: str, layout: str, scale: float) -> None:
    """A weight of rank 2 is found at rank 2 and comes back, whatever its scale."""
    found = {}
    for size in (1.0, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 12, bias=False))
        model[0].weight.data = low_rank(size)
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=3, format=format, layout=layout, init="svd"))
        (weight,) = factorized_weights(model).values()
        error = (weight.dense().double() - low_rank(size).double()).norm() / low_rank(size).double().norm()
        bt.compact_(model, 1e-3)
        after = (weight.dense().double() - low_rank(size).double()).norm() / low_rank(size).double().norm()
        found[size] = weight.ranks, round(float(error), 3), round(float(after), 2)
        assert all(bool(core.isfinite().all()) for core in weight.cores)
    assert found[scale] == found[1.0]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("format", [each.name for each in FORMATS])
def test_the_prior_is_finite_at_every_scale(format: str, scale: float) -> None:
    model = nn.Sequential(bt.TensorLinear(12, 6, max_rank=3, format=format), nn.Linear(6, 2))
    (weight,) = factorized_weights(model).values()
    with torch.no_grad():
        for core in weight.cores:
            core.mul_(scale ** (1 / len(weight.cores)))
    prior = bt.RankPrior(model, num_data=100, warmup_steps=0, align_every=1)
    for _ in range(3):
        prior.loss().backward()
        prior.step()
    assert all(bool(p.grad is not None and p.grad.isfinite().all()) for p in weight.cores)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


@pytest.mark.parametrize("scale", SCALES)
def test_compression_does_not_depend_on_the_scale_of_weights_or_inputs(scale: float) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    sizes = []
    for weight, inputs in ((1.0, 1.0), (scale, 1.0), (1.0, scale)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 3))
        model[0].weight.data = low_rank(weight)
        bt.compress_(model, ratio=2.0, calibration=[inputs * x])
        sizes.append(sum(p.numel() for p in model.parameters()))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert max(sizes) <= 240 / 2


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("particles", [1, 2])
def test_targets_of_every_scale_train_or_are_refused(scale: float, particles: int) -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double()
    for dtype in (torch.float32, torch.float64):
        data = x.to(dtype), (scale * x[:, :1]).to(dtype)
        try:
            result = bt.fit(lambda own=dtype: nn.Sequential(bt.TensorLinear(4, 1, max_rank=1)).to(own), data, data,
                         likelihood="regression", particles=particles, **SHORT)  # fmt: skip
        except BayesTrainError as error:
            refused = str(error)
        else:
            assert math.isfinite(result.validation["log_likelihood"])
            assert math.isfinite(result.validation["rmse"])
            continue
        assert scale > 1e9  # the square of 1e20 is no number of single precision
        assert re.search("diverged|No particle has a finite", refused)


SHORT: dict[str, Any] = {"epochs": 2, "finetune_epochs": 1, "progress": False}


def network() -> nn.Sequential:
    return nn.Sequential(bt.TensorLinear(4, 6, max_rank=2), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("particles", [1, 2])
def test_one_example_or_one_class_are_enough_and_none_is_refused(particles: int) -> None:
    for x, y in ((torch.randn(1, 4), torch.tensor([2])), (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))):
        result = bt.fit(network, (x, y), (x, y), particles=particles, **SHORT)
        losses = [row["train_loss"] for row in result.history[1:]]
        assert all(map(math.isfinite, losses))
        assert math.isfinite(result.validation["log_likelihood"])
    nothing = torch.randn(0, 4), torch.zeros(0, dtype=torch.int64)
    some = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for data, validation in ((nothing, None), ([], None), (some, nothing), (some, [])):
        with pytest.raises(BayesTrainError):
            bt.fit(network, data, validation, particles=particles, **SHORT)


@pytest.mark.parametrize("particles", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_datum_that_is_not_finite_is_named_by_its_step(value: float, particles: int) -> None:
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    x[17, 2] = value
    with pytest.raises(BayesTrainError, match=r"epoch 1|particle|NaN|not finite"):
        bt.fit(network, (x, y), particles=particles, batch_size=5, **SHORT)


def test_frozen_layers_stay_and_deterministic_runs_are_the_same_bits(tmp_path: Any) -> None:
    def half() -> nn.Module:
        torch.manual_seed(0)
        model = network()
        model[2].requires_grad_(False)
        return model

    x, y = torch.randn(30, 4), torch.arange(30) % 3
    before = half()[2].weight
    for particles in (1, 2):
        result = bt.fit(half, (x, y), particles=particles, **SHORT)
        assert torch.equal(result.model[2].weight, before)
        bt.save(result.posterior or result.model, tmp_path / str(particles))
        again = bt.load(tmp_path / str(particles), half())
        assert torch.equal((again.template if particles > 1 else again)[2].weight, before)
    x, y = torch.randn(40, 2, 6, 6), torch.arange(40) % 3

    def build() -> nn.Module:
        return nn.Sequential(bt.TensorConv2d(2, 4, 3, max_rank=3), nn.Flatten(), nn.Linear(64, 3))

    torch.use_deterministic_algorithms(True)
    try:
        for particles in (1, 2):
            runs = [bt.fit(build, (x, y), particles=particles, batch_size=8, seed=3, **SHORT) for _ in range(2)]
            one, other = (run.posterior.particles if run.posterior else run.model.state_dict() for run in runs)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    finally:
        torch.use_deterministic_algorithms(False)
