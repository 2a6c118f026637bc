"""What holds weights or shapes beside the model: averages and data-parallel wrappers, across a cut."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import bayestrain as bt
from bayestrain.compact import restart_average_
from bayestrain.errors import ConfigError

X = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))


EMA: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rule", [None, "contribution"])
@pytest.mark.parametrize(
    "options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}], ids=["swa", "ema"]
)
def test_an_average_follows_or_says_what_to_do(rule: str | None, options: dict[str, Any]) -> None:
    model = network()
    prior, optimizer = bt.RankPrior(model, 100), torch.optim.Adam(model.parameters(), 1e-2)
    averaged = AveragedModel(model, **options)
    for _ in range(3):
        step(model, optimizer)
        prior.step()
        averaged.update_parameters(model)
    assert bt.compact_(model, 0.5, rule=rule, optimizer=optimizer).changed
    before = {name: value.clone() for name, value in averaged.state_dict().items()}
    with pytest.raises(ConfigError, match=r"cores\.\d has the shape .* average .*restart_average_\(averaged, model\)"):
        averaged.update_parameters(model)
    assert all(torch.equal(value, before[name]) for name, value in averaged.state_dict().items())
    restart_average_(averaged, model)
    for own, new in zip(averaged.module.parameters(), model.parameters(), strict=True):
        assert own.shape == new.shape
        assert own is not new
    assert torch.equal(averaged.module[0].bias, before["module.0.bias"])  # of what was not cut it continues
    assert not torch.equal(averaged.module[0].bias, model[0].bias)
    step(model, optimizer)
    averaged.update_parameters(model)
    assert not torch.equal(averaged.module[0].cores[0], model[0].cores[0])
    prior.remove_()
    restart_average_(averaged, model)
    assert averaged.module.state_dict().keys() == model.state_dict().keys()
    update_bn([X], averaged)
    assert averaged(X).isfinite().all()


def test_the_average_of_another_network_is_refused() -> None:
    other = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    bt.tensorize_(other)
    with pytest.raises(ConfigError, match="of another network"):
        restart_average_(AveragedModel(other), network())
    restart_average_(copy.deepcopy(network()), network())


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_data_parallel_is_wrapped_again() -> None:
    """The call of docs/loops.md: PyTorch's own suffices."""
    model = network()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.Adam(model.parameters(), 1e-2)
    step(wrapped, optimizer)
    assert bt.compact_(model, 0.5, rule="contribution", optimizer=optimizer).changed
    wrapped = DistributedDataParallel(wrapped.module)
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        step(wrapped, optimizer)
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
