"""A network looked at in evaluation mode is left as it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.layers.evaluation import evaluating
from bayestrain.train.metrics import outputs


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.Dropout())
    model[2].eval()  # frozen, as in fine-tuning
    return model


MODES = [True, True, True, False, True]


def test_modes_come_back_one_by_one_even_from_an_error() -> None:
    model = network()
    with contextlib.suppress(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == MODES


def test_a_layer_that_trains_on_keeps_nothing_that_it_formed_to_predict() -> None:
    model = nn.Sequential(bt.TTLinear(64, 27, max_rank=3))
    model[0].force_plan("dense")
    with evaluating(model), torch.no_grad():
        model(torch.randn(5, 64))
        assert model[0]._kept._formed
    assert not model[0]._kept._formed


def test_measuring_a_network_leaves_its_modes() -> None:
    model, digits = network(), data.load("mnist-mini").test.subset(range(20))
    assert outputs(model, digits, lambda x: x, "cpu").shape == (1, 20, 10)
    assert [module.training for module in model.modules()] == MODES
    with pytest.raises(RuntimeError):
        outputs(model, digits, lambda x: x[:, :, :3], "cpu")
    assert [module.training for module in model.modules()] == MODES


def test_predictions_of_particles_leave_the_modes_of_their_template() -> None:
    posterior = bt.Posterior([network(), network()], 10)
    before = [module.training for module in posterior.template.modules()]
    posterior.predict(torch.randn(4, 1, 28, 28))
    posterior.refresh_statistics([torch.randn(8, 1, 28, 28)])
    assert [module.training for module in posterior.template.modules()] == before
