"""Rounding to a size: the smallest tolerance for it, for a network and for particles."""

from __future__ import annotations

import copy

import pytest
import torch
from fit_kit import settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import bayestrain as bt
from bayestrain import data
from bayestrain.errors import ConfigError
from bayestrain.target import dense_parameters
from bayestrain.train.progress import Silent

TRAIN = data.load("mnist-mini").train.subset(range(1000))


def network(features: int = 60, seed: int = 0) -> nn.Sequential:
    """Two layers whose singular values fall, the first one padded if `features` is a prime number."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(features, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 2:
                parameter.mul_(0.7 ** torch.arange(parameter.shape[-1]))
    return model


def rounded(model: nn.Module, tol: float) -> int:
    small = copy.deepcopy(model)
    bt.compact_(small, tol)
    return bt.count_parameters(small)


@given(st.floats(0.0, 1.0), st.sampled_from([60, 61]), st.integers(0, 20))
@hypothesis_settings(max_examples=30, deadline=None)
def test_it_is_the_smallest_tolerance_that_leaves_so_few(share: float, features: int, seed: int) -> None:
    model = network(features, seed)
    least, most = rounded(model, 1 - 1e-9), bt.count_parameters(model)
    wanted = round(least + share * (most - least))
    tol = bt.tolerance_for(model, wanted)
    assert rounded(model, tol) <= wanted
    assert tol == 0.0 or rounded(model, 0.95 * tol) > wanted * 0.9  # a smaller one leaves more, or nearly so
    smaller = bt.tolerance_for(model, least)
    assert tol <= smaller


def test_the_model_is_not_changed() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    bt.tolerance_for(model, 900)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_network_that_is_small_enough_gets_the_least() -> None:
    model = network()
    assert bt.tolerance_for(model, 10**6) == 0.0
    assert bt.tolerance_for(model, bt.count_parameters(model), least=1e-2) == 1e-2


def test_too_few_parameters_are_refused_with_the_number_there_must_be() -> None:
    model = network()
    least = rounded(model, 1 - 1e-9)
    with pytest.raises(ConfigError, match=f"there are {least:,}, of which 252 are in no tensor train"):
        bt.tolerance_for(model, least - 1)


def test_dense_parameters_are_those_of_the_network_before() -> None:
    plain = nn.Sequential(nn.Linear(61, 48), nn.BatchNorm1d(48), nn.Conv2d(8, 16, 3))
    wanted = bt.count_parameters(plain)
    bt.tensorize_(plain, bt.TensorizeConfig(max_rank=3))
    assert bt.count_parameters(plain) != wanted
    assert dense_parameters(plain) == wanted


@pytest.mark.parametrize("features", [60, 61])
def test_particles_are_rounded_to_a_size_together(features: int) -> None:
    posterior = bt.Posterior([network(features, seed) for seed in range(3)], num_data=100)
    wanted = posterior.parameters_each * 2 // 3
    tol = posterior.tolerance_for(wanted)
    assert 0 < tol < 1
    report = posterior.compact_(tol)
    assert wanted * 0.8 < report.parameters <= wanted


@pytest.mark.parametrize("particles", [0, 2])
def test_training_ends_at_the_ratio_it_was_given(particles: int) -> None:
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
        return model

    config = settings(round_tol=1e-3, compact_tol=1e-3, target_ratio=40.0)
    dense = 784 * 48 + 48 + 480 + 10
    if particles:
        posterior = bt.PosteriorConfig(particles=particles)
        found, result = bt.fit_posterior(
            bt.independent(build, particles), TRAIN, None, config, posterior, progress=Listener()
        )
        size = found.parameters_each
    else:
        torch.manual_seed(0)
        model = build()
        result = bt.fit(model, TRAIN, None, config, progress=Listener())
        size = bt.count_parameters(model)
    assert 0.8 * dense / 40 < size <= dense / 40
    assert result.spectra["tol"] > 1e-3
    assert any("to be 4" in text for text in heard)
