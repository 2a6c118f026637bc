"""What `fit` asks of its arguments: what evaluates, what is trained on, folder and settings of a resumed run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_kit import StopAfter, settings
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError, Interrupted, TrainingError

TRAIN = data.load("mnist-mini").train.subset(range(1000))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 625), nn.ReLU(), nn.Linear(625, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    return model


def test_evaluate_gets_the_model_in_evaluation_mode_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 30), nn.BatchNorm1d(30), nn.Dropout(0.5), nn.Linear(30, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    norm = model[2]
    modes: list[bool] = []

    def evaluate(given: nn.Module) -> dict[str, float]:
        modes.append(given.training)
        before = norm.running_mean.clone()
        given(torch.full((64, 784), 100.0))
        assert torch.equal(norm.running_mean, before)  # validation data leave no trace
        return {"nothing": 0.0}

    bt.fit(model, TRAIN, evaluate, settings(epochs=2, finetune_epochs=1))
    assert modes == [False] * 4  # before the first epoch, too
    assert model.training
    assert float(norm.running_mean.abs().max()) > 0  # trained between


def test_what_evaluate_returns_and_what_is_trained_on_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"evaluate must return a dict of numbers, such as .*, got 0\.9"):
        bt.fit(network(), TRAIN, lambda _: 0.9, settings())
    for value in (None, torch.ones(2)):
        with pytest.raises(ConfigError, match=r"evaluate must return numbers, got {'a': "):
            bt.fit(network(), TRAIN, lambda _, value=value: {"a": value}, settings())
    dataset = torch.utils.data.TensorDataset(TRAIN.images, TRAIN.labels)
    with pytest.raises(ConfigError, match=r"train must be bayestrain\.data\.Images.*, got a TensorDataset"):
        bt.fit(network(), dataset, None, settings())


class Odd(nn.Module):
    """A network with a mask, state of its own, and perhaps two outputs."""

    mask: torch.Tensor

    def __init__(self, fill: float = float("-inf"), several: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.body, self.several = network(), several
        self.register_buffer("mask", torch.full((40, 40), fill).triu(1))
        self.register_buffer("graph", torch.eye(3).to_sparse() if sparse else None, persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = self.body(x)
        return (y, y) if self.several else y


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
def test_buffers_may_be_infinite_from_the_start_and_weights_never(fill: float) -> None:
    result = bt.fit(Odd(fill, sparse=True), TRAIN, None, settings(epochs=1, finetune_epochs=1))
    assert len(result.history) == 3
    broken = Odd(fill)
    with torch.no_grad():
        broken.body[1].cores[0].mul_(1e30)
    with pytest.raises(TrainingError, match="not finite"):
        bt.fit(broken, TRAIN, None, settings(epochs=1, finetune_epochs=1))


def test_half_precision_is_no_lack_of_finiteness() -> None:
    model = Odd(0.0)
    model.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn))
    model.table = nn.Embedding(1000, 100).half().requires_grad_(False)
    assert float(model.table.weight.square().sum()) == float("inf")
    assert len(bt.fit(model, TRAIN, None, settings(epochs=1, finetune_epochs=1)).history) == 3


def test_a_posterior_may_have_such_buffers_too() -> None:
    posterior, _ = bt.fit_posterior(bt.independent(Odd, 2), TRAIN, None, settings(epochs=1, finetune_epochs=1))
    assert len(posterior) == 2


def test_a_network_with_two_outputs_is_refused_in_plain_words() -> None:
    with pytest.raises(ConfigError, match=r"The network must return one tensor, got tuple\. Wrap it"):
        bt.fit(Odd(several=True), TRAIN, None, settings(epochs=1, finetune_epochs=1))


def test_a_folder_is_gone_on_with_the_same_settings_and_never_overwritten(tmp_path: Path) -> None:
    config = settings(epochs=1, finetune_epochs=1)
    model = network()
    bt.fit(model, TRAIN, None, config, folder=tmp_path)
    checkpoint, cores = (tmp_path / "checkpoint-last.pt").read_bytes(), network().state_dict()
    fresh = network()
    with pytest.raises(ConfigError, match=r"already holds a run. Go on with resume=True, or give another folder"):
        bt.fit(fresh, TRAIN, None, config, folder=tmp_path)
    for changes, options, message in (
        ({"lr": 1e-4}, {}, r"lr was 0\.01, now 0\.0001"),
        ({}, {"seed": 3}, "seed was 0, now 3"),
        ({}, {"prior": bt.PriorConfig(weight=0.5)}, r"prior\.weight was 1\.0, now 0\.5"),
    ):
        other = dataclasses.replace(config, **changes)
        with pytest.raises(ConfigError, match=f"cannot go on with other settings: {message}"):
            bt.fit(fresh, TRAIN, None, other, **options, folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="number of images was 1000, now 500"):
        bt.fit(fresh, TRAIN.subset(range(500)), None, config, folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="trains was 'a network', now 'a posterior'"):
        bt.fit_posterior([fresh], TRAIN, None, config, folder=tmp_path, resume=True)
    with pytest.raises(TrainingError, match="nothing to resume"):
        bt.fit(fresh, TRAIN, None, config, folder=tmp_path / "mistyped", resume=True)
    assert not (tmp_path / "mistyped").exists()
    assert (tmp_path / "checkpoint-last.pt").read_bytes() == checkpoint
    assert fresh.state_dict().keys() == cores.keys()
    assert all(torch.equal(value, cores[name]) for name, value in fresh.state_dict().items())  # nothing was touched
    again = dataclasses.replace(config, checkpoint_every=7)  # does not change what is trained
    bt.fit(fresh, TRAIN, None, again, folder=tmp_path, resume=True)
    assert bt.ranks(fresh) == bt.ranks(model)


def test_the_same_model_goes_on_though_it_has_reached_its_target(tmp_path: Path) -> None:
    config = settings(target_ratio=200.0, optimizer=np.str_("adam"))  # a notebook may have such a string
    model = network()
    with pytest.raises(Interrupted):
        bt.fit(model, TRAIN, None, config, folder=tmp_path, progress=StopAfter(5), seed=np.int64(1))
    assert bt.count_parameters(model) * 200 <= 496_885
    result = bt.fit(model, TRAIN, None, config, folder=tmp_path, resume=True, seed=1)
    assert [line["epoch"] for line in result.history] == list(range(7))
