"""Weights formed together are the weights formed one by one: outputs, gradients, after ranks changed."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.testing import assert_close

import bayestrain as bt
from bayestrain.errors import ShapeError
from bayestrain.forming import FormTogether


def network(ranks: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for rank in ranks:
        layers += [bt.TTConv2d(6, 6, 3, padding=1, max_rank=rank), nn.ReLU()]
    layers += [nn.Flatten(), *(bt.TTLinear(54, 54, max_rank=rank) for rank in ranks)]
    layers += [bt.TTLinear(54, 5, max_rank=3)]  # the only one of its kind
    model = nn.Sequential(*layers).double()
    for layer in model.modules():
        if isinstance(layer, bt.TTConv2d | bt.TTLinear):
            layer.force_plan("kernel" if isinstance(layer, bt.TTConv2d) else "dense")
    return model


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 5, 3)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_together_equals_one_by_one(ranks: tuple[int, ...], channels_last: bool) -> None:
    model, x = network(ranks), torch.randn(4, 6, 3, 3, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = gradients(model, x)
    forming = FormTogether(model)
    given: list[bool] = []
    for layer in model.modules():
        if isinstance(layer, bt.TTConv2d | bt.TTLinear):
            layer.register_forward_pre_hook(lambda layer, _: given.append(layer.given is not None))
    for number in range(3):
        given.clear()
        with forming():
            found = gradients(model, x)
        assert given == [number > 0] * 6 + [False]
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


def test_ranks_that_change_are_seen() -> None:
    model, x = network((4, 4, 4)), torch.randn(4, 6, 3, 3, dtype=torch.float64)
    forming = FormTogether(model)
    for _ in range(2):
        with forming():
            model(x)
    bt.compact_(model, tol=0.3)
    for _ in range(3):
        with forming():
            found = gradients(model, x)
        for a, b in zip(found, gradients(model, x), strict=True):
            assert_close(a, b)


def test_nothing_stays_behind_when_a_pass_fails() -> None:
    model = network((4, 4))
    forming = FormTogether(model)
    x = torch.randn(1, 6, 3, 3, dtype=torch.float64)
    with forming():
        model(x)
    with pytest.raises(ShapeError), forming():
        model(x[:, :3])
    assert all(layer.given is None for layer in model.modules() if isinstance(layer, bt.TTConv2d | bt.TTLinear))


def test_forced_plans_and_checkpoints_are_respected() -> None:
    model, x = network((4, 4)), torch.randn(1, 6, 3, 3, dtype=torch.float64)
    forming = FormTogether(model)
    for _ in range(2):
        with forming():
            model(x)
    layer = model[0]
    assert isinstance(layer, bt.TTConv2d)
    layer.force_plan("two-step")
    for _ in range(3):
        with forming():
            model(x)
    assert layer.plan is not None
    assert layer.plan.kind == "two-step"
    layer.force_plan("kernel")
    expected = gradients(model, x)
    for _ in range(3):
        with forming():
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            found = (y, *torch.autograd.grad(y.square().sum(), list(model.parameters())))
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)


def test_evaluation_after_training_together_sees_the_new_cores() -> None:
    model, x = network((4, 4)), torch.randn(2, 6, 3, 3, dtype=torch.float64)
    forming = FormTogether(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.05, fused=True)
    for _ in range(4):
        with forming():
            model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found = model(x)
            fresh = network((4, 4))
            fresh.load_state_dict(model.state_dict())
            assert_close(found, fresh(x))
