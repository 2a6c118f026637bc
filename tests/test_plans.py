"""The planner: every plan is the same function, choices can be seen and forced, and factors kept are never stale."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayestrain as bt
from bayestrain import chain, models, plans
from bayestrain.errors import ConfigError
from bayestrain.layers.planned import machine as plan_machine
from bayestrain.plans import CPU_THREAD, CUDA, Task, TrainShape

MNIST = TrainShape((5, 5, 5, 5), (7, 4, 7, 4), (1, 4, 2, 3, 1))


def linear(max_rank: int | tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float64) -> bt.TTLinear:
    torch.manual_seed(0)
    return bt.TTLinear(56, 30, in_modes=(4, 2, 7), out_modes=(2, 5, 3), max_rank=max_rank, dtype=dtype)


def reference(layer: bt.TTLinear | bt.TTConv2d, x: Tensor) -> list[Tensor]:
    """Output and gradients by the dense weight."""
    weight, bias = layer.weight, layer.bias
    if isinstance(layer, bt.TTConv2d):
        y = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation)
    else:
        y = F.linear(x, weight, bias)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


def passed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_every_plan_of_a_linear_layer_is_the_same_function(rows: int) -> None:
    layer = linear()
    x = torch.randn(rows, 56, dtype=torch.float64, requires_grad=True)
    expected = reference(layer, x)
    names = layer.plans(x)
    assert {"dense", "dense+recompute", "left:1", "right:1,2", "right:2+recompute"} <= set(names)
    assert len(names) == 14
    for name in names:
        layer.force_plan(name)
        for found, wanted in zip(passed(layer, x), expected, strict=True):
            assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            for _ in range(2):  # formed, then kept
                assert_close(layer(x), expected[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("outputs", [30, 28])
def test_blocks_of_the_batch_are_the_same_function(batch_last: bool, recompute: bool, outputs: int) -> None:
    layer = linear()
    x = torch.randn(21, 56, dtype=torch.float64, requires_grad=True)
    for side in ("left", "right"):
        for cuts in ((1,), (2,), (1, 2)):
            for bias in (layer.bias[:outputs], None):
                wanted = F.linear(x, layer.weight[:outputs], bias)
                factors = chain.factors(list(layer.cores), cuts, side)
                found = chain.multiply_blocks(x, factors, bias, outputs, batch_last, 8, recompute)
                assert_close(found, wanted)
                inputs = [x, *layer.cores]
                ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, wanted))
                for a, b in zip(ours, theirs, strict=True):
                    assert_close(a, b)


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_plan_of_a_convolution_is_the_same_function(channels_last: bool) -> None:
    torch.manual_seed(0)
    layer = bt.TTConv2d(6, 10, 3, stride=2, padding=1, max_rank=4, dtype=torch.float64)
    x = torch.randn(3, 6, 8, 8, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    expected = reference(layer, x)
    assert sorted(layer.plans(x)) == ["kernel", "two-step"]
    for name in layer.plans(x):
        layer.force_plan(name)
        for found, wanted in zip(passed(layer, x), expected, strict=True):
            assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            for _ in range(2):
                y = layer(x)
                assert_close(y, expected[0], rtol=1e-10, atol=1e-10)
                assert y.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("name", ["right:2", "left:1,2+recompute", "dense+recompute"])
def test_blocks_can_be_differentiated_twice(name: str) -> None:
    layer = linear()
    layer.force_plan(name)
    x = torch.randn(20, 56, dtype=torch.float64, requires_grad=True)

    def penalty(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(layer.cores))

    for found, wanted in zip(penalty(layer), penalty(lambda x: F.linear(x, layer.weight, layer.bias)), strict=True):
        assert_close(found, wanted)


def test_functions_of_torch_func_see_plain_operations() -> None:
    layer = linear()
    layer.force_plan("right:2+recompute")
    x = torch.randn(5, 56, dtype=torch.float64)
    per_sample = torch.vmap(torch.func.grad(lambda x: layer(x).square().sum()))(x)
    assert_close(per_sample, torch.func.grad(lambda x: layer(x).square().sum())(x))


class TestKept:
    """What inference keeps is formed anew when a core changes, by whatever way."""

    changes: tuple[tuple[str, Callable[[bt.TTLinear], object]], ...] = (
        ("in place", lambda layer: (layer.cores[1].data.mul_(2), layer.eval())),
        ("optimiser", lambda layer: _step(layer)),
        ("state dict", lambda layer: layer.load_state_dict(linear((3, 2)).state_dict())),
        ("other cores", lambda layer: layer.set_cores([2 * core.detach() for core in layer.cores])),
        ("other data", lambda layer: setattr(layer.cores[0], "data", layer.cores[0].data * 3)),
        ("dtype", lambda layer: layer.float()),
        ("fused optimiser", lambda layer: _fused_step(layer)),
        ("forced", lambda layer: layer.force_plan("dense")),
    )

    @pytest.mark.parametrize(("what", "change"), changes, ids=[name for name, _ in changes])
    @pytest.mark.parametrize("plan", ["right:2", "dense"])
    def test_changes_are_seen(self, plan: str, what: str, change: Callable[[bt.TTLinear], object]) -> None:
        layer = linear().eval()
        layer.force_plan(plan)
        x = torch.randn(3, 56, dtype=torch.float64)
        with torch.no_grad():
            layer(x)
        change(layer)
        x = x.to(layer.cores[0].dtype)
        with torch.no_grad():
            assert_close(layer(x), F.linear(x, layer.weight, layer.bias), msg=what)

    def test_nothing_is_formed_a_second_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = linear().eval()
        formed: list[int] = []
        before = layer._factors
        monkeypatch.setattr(layer, "_factors", lambda *what: formed.append(1) or before(*what))
        with torch.no_grad():
            for _ in range(5):
                layer(torch.randn(2, 56, dtype=torch.float64))
        assert len(formed) == 1

    def test_copies_keep_nothing(self) -> None:
        layer = linear().eval()
        x = torch.randn(2, 56, dtype=torch.float64)
        with torch.no_grad():
            y = layer(x)
            for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert_close(twin(x), y)
                assert twin._kept is not layer._kept

    def test_nothing_is_kept_in_training_mode(self) -> None:
        layer, x = linear().train(), torch.randn(2, 56, dtype=torch.float64)
        with torch.no_grad():
            layer(x)
            layer.cores[0].data.mul_(2)  # what no counter sees
            assert_close(layer(x), F.linear(x, layer.weight, layer.bias))

    def test_parametrised_and_inference_cores_are_never_stale(self) -> None:
        layer, x = linear().eval(), torch.randn(2, 56, dtype=torch.float64)
        scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        class Times(nn.Module):
            def forward(self, core: Tensor) -> Tensor:
                return core * scale

        nn.utils.parametrize.register_parametrization(layer.cores, "0", Times())
        with torch.no_grad():
            before = layer(x)
            scale.mul_(3)
            assert_close(layer(x) - layer.bias, 3 * (before - layer.bias))
        with torch.inference_mode():
            made = linear().eval()
            assert_close(made(x), F.linear(x, made.weight, made.bias))

    def test_weights_made_and_loaded_in_inference_mode_are_used(self) -> None:
        with torch.inference_mode():
            layers = (linear(), bt.TTConv2d(6, 8, 3))
            inputs = (torch.randn(2, 56, dtype=torch.float64), torch.randn(2, 6, 5, 5))
            for layer, x in zip(layers, inputs, strict=True):
                other = copy.deepcopy(layer.eval())
                other.set_cores([2 * core for core in other.cores])
                layer(x)
                layer.load_state_dict(other.state_dict())
                assert_close(layer(x), other(x))
                layer.set_cores([3 * core for core in layer.cores])
                other.set_cores([3 * core for core in other.cores])
                assert_close(layer(x), other(x))
                layer.cores[0].mul_(2)
                other.cores[1].mul_(2)
                assert_close(layer(x), other(x))

    def test_every_size_of_batch_shares_what_was_formed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = linear().eval()
        layer.force_plan("dense")
        formed: list[int] = []
        before = layer._factors
        monkeypatch.setattr(layer, "_factors", lambda *what: formed.append(1) or before(*what))
        with torch.no_grad():
            for rows in (1, 2, 3, 1, 2, 3):
                layer(torch.randn(rows, 56, dtype=torch.float64))
        assert len(formed) == 1

    def test_the_plan_is_that_of_the_last_pass(self) -> None:
        torch.manual_seed(0)
        layer = bt.TTLinear(784, 625, in_modes=(7, 4, 7, 4), out_modes=(5, 5, 5, 5), max_rank=8).eval()
        with torch.no_grad():
            for rows in (1, 1024, 1):
                x = torch.randn(rows, 784)
                layer(x)
                assert layer.plan == layer.plan_for(x)


def test_other_types_of_input_are_refused_as_by_a_dense_layer() -> None:
    layer = linear(dtype=torch.float32)
    for plan in ("dense", "right:2"):
        layer.force_plan(plan)
        for dtype in (torch.int64, torch.float64, torch.float16):
            with pytest.raises(RuntimeError, match="dtype"):
                layer(torch.ones(4, 56, dtype=dtype))


def test_traces_and_many_gradients_at_once_take_plain_operations() -> None:
    layer, x = linear(), torch.randn(20, 56, dtype=torch.float64)
    for plan in ("right:2+recompute", "right:2", "dense+recompute"):
        layer.force_plan(plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and warns of every Python branch, but still used
            traced = torch.jit.trace(layer, x, check_trace=False)
        other = torch.randn(7, 56, dtype=torch.float64)
        assert_close(traced(other), F.linear(other, layer.weight, layer.bias))
        inputs = x.clone().requires_grad_()
        gradients = torch.randn(3, 20, 30, dtype=torch.float64)
        found = torch.autograd.grad(layer(inputs), inputs, gradients, is_grads_batched=True)[0]
        assert_close(found, gradients @ layer.weight)
        with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own way to forward mode
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
        assert_close(tangent, torch.ones_like(x) @ layer.weight.mT)


def test_a_graph_can_be_gone_through_twice() -> None:
    layer, x = linear(), torch.randn(20, 56, dtype=torch.float64)
    factors = chain.factors(list(layer.cores), (2,), "right")
    y = chain.multiply_blocks(x, factors, layer.bias, 30, False, 8, False)
    first = torch.autograd.grad(y.sum(), list(layer.cores), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y.sum(), list(layer.cores)), strict=True):
        assert_close(a, b)


def _fused_step(layer: bt.TTLinear) -> None:
    """In a loop as people write it; a fused optimiser does not touch the version counters."""
    layer.train()
    optimizer = torch.optim.Adam(layer.parameters(), 0.1, fused=True)
    layer(torch.randn(4, 56, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    layer.eval()


def _step(layer: bt.TTLinear) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    for core in layer.cores:
        core.grad = torch.ones_like(core)
    optimizer.step()


def test_choices_can_be_forced_and_seen() -> None:
    layer, x = linear(), torch.randn(8, 56, dtype=torch.float64)
    assert layer.plan is None
    layer(x)
    assert layer.plan == layer.plan_for(x)
    layer.force_plan("left:1")
    layer(x)
    assert layer.plan is not None
    assert layer.plan.name == "left:1"
    layer.force_plan("sideways")
    with pytest.raises(ConfigError, match=r"no plan 'sideways' for this layer. It has dense, dense\+recompute, left:1"):
        layer(x)


def test_low_memory_saves_nothing_but_the_input() -> None:
    layer, x = linear(dtype=torch.float32), torch.randn(64, 56)
    layer.low_memory = True
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert layer.plan is not None
    assert layer.plan.recompute
    assert sum(t.numel() for t in saved if t.shape[:1] == (64,) or t.numel() > 5000) == x.numel()
    with torch.no_grad():
        layer(x)
    assert not layer.plan.recompute


def test_the_cost_model_knows_the_paper_s_layer() -> None:
    for machine in (CPU_THREAD, CUDA):
        costs = plans.linear_costs(MNIST, Task(128), machine)
        assert [cost.seconds for cost in costs] == sorted(cost.seconds for cost in costs)
    best = plans.linear_costs(MNIST, Task(1024), CPU_THREAD)[0]
    assert best.plan.cuts == (2,)
    full = TrainShape(MNIST.outs, MNIST.ins, (1, 20, 20, 20, 1))
    assert plans.best_linear(full, Task(128), CPU_THREAD).name == "dense"
    two = next(c for c in plans.linear_costs(MNIST, Task(1, training=False, formed=True), CPU_THREAD)
               if c.plan.name == "right:2")  # fmt: skip
    assert two.operations == 28 * 28 * 50 + 25 * 56 * 25


def test_a_train_of_many_cores_is_planned_in_no_time() -> None:
    shape = TrainShape((2,) * 20, (2,) * 20, (1, *(4,) * 19, 1))
    assert len(plans.linear_costs(shape, Task(128), CPU_THREAD)) < 300


def test_the_report_says_where_a_tensor_train_cannot_win() -> None:
    model = models.mnist_mlp()
    bt.tensorize_(model, bt.TensorizeConfig(20))
    model.train()
    report = bt.plan_report(model, torch.rand(128, 1, 28, 28), training=True)
    assert [row.name for row in report.layers] == ["1", "3"]
    assert "1" in report.slower
    assert "Slower than dense at these ranks, predicted: 2 of 2 layers (1, 3)" in str(report)
    assert model.training
    assert all(module.training for module in model.modules())
    small = models.mnist_mlp()
    bt.tensorize_(small, bt.TensorizeConfig(3))
    report = bt.plan_report(small, torch.rand(1024, 1, 28, 28))
    assert report.slower == ()
    assert "No layer's forward pass should be slower" in report.verdict()
    assert report.layers[0].ratio < 0.7


def test_a_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayestrain.layers.planned.MEASURED", {})
    shipped = plan_machine("cpu", torch.float32)
    found = bt.calibrate()
    for value in (found.rate, found.conv_rate, found.bandwidth, found.reading):
        assert 1e8 < value < 1e14
    used = plan_machine("cpu", torch.float32)
    assert used == found.faster(torch.get_num_threads())
    assert used != shipped
    layer = linear(dtype=torch.float32)
    assert_close(layer(torch.ones(4, 56)), F.linear(torch.ones(4, 56), layer.weight, layer.bias))
