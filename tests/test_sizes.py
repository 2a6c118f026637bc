"""Ranks and parameter counts, and that the counts are the paper's."""

from __future__ import annotations

import torch
from torch import nn

import bayestrain as bt
from bayestrain import models
from bayestrain.sizes import tt_layers


def test_the_papers_counts() -> None:
    assert bt.count_parameters(models.mnist_mlp()) == 496_885
    assert bt.count_parameters(models.cifar10_cnn()) == 1_569_418
    assert bt.count_parameters(models.resnet110()) == 1_742_762


def test_the_papers_count_of_the_tensorised_mnist_network() -> None:
    model = models.mnist_mlp()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))
    assert bt.ranks(model) == {"1": (1, 20, 20, 20, 1), "3": (1, 20, 1)}
    assert bt.count_parameters(model) == 27_235


def test_the_papers_count_at_the_ranks_it_found() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        bt.TTLinear(784, 625, in_modes=(7, 4, 7, 4), out_modes=(5, 5, 5, 5), max_rank=(8, 1, 5)),
        nn.ReLU(),
        bt.TTLinear(625, 10, in_modes=(25, 25), out_modes=(5, 2), max_rank=13),
    )
    assert bt.ranks(model) == {"1": (1, 8, 1, 5, 1), "3": (1, 13, 1)}
    assert bt.count_parameters(model) == 3_625


def test_lambda_is_not_counted_and_running_statistics_are() -> None:
    model = nn.Sequential(bt.TTConv2d(16, 16, 3, max_rank=4), nn.BatchNorm2d(16), nn.BatchNorm2d(16, affine=False))
    layer = model[0]
    assert isinstance(layer, bt.TTConv2d)
    before = bt.count_parameters(model)
    cores = sum(core.numel() for core in layer.cores)
    assert before == cores + 16 + 4 * 16 + 2 * 16
    layer.attach_rank_state()
    assert bt.count_parameters(model) == before
    assert bt.count_parameters(nn.BatchNorm1d(7, track_running_stats=False)) == 14
    assert bt.count_parameters(nn.InstanceNorm2d(7, track_running_stats=True)) == 14


def test_a_layer_used_twice_counts_once() -> None:
    layer = bt.TTLinear(16, 16, max_rank=3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert tt_layers(model) == {"0": layer}
    assert bt.ranks(model) == {"0": (1, 3, 1)}
    assert bt.count_parameters(model) == bt.count_parameters(layer) == layer.parameters_left
    assert model(torch.randn(2, 16)).shape == (2, 16)


def test_a_model_without_tensor_trains_has_no_ranks() -> None:
    assert bt.ranks(models.mnist_mlp()) == {}
