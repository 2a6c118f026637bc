"""Cutting to a size where that changes the weights least: a network, particles, and on the way of a training."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from fit_kit import StopAfter, jitter, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import bayestrain as bt
from bayestrain import data, tt
from bayestrain.errors import ConfigError, Interrupted
from bayestrain.sizes import tt_layers
from bayestrain.target import dense_parameters
from bayestrain.train.progress import Silent
from bayestrain.train.schedule import learning_rate, wanted_ratio

WEAK = bt.PriorConfig(weight=0.01, warmup_epochs=1, align_every=4)
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


def with_every_rank_at_one(model: nn.Module) -> int:
    size = bt.count_parameters(model)
    for layer in tt_layers(model).values():
        size -= sum(core.numel() - math.prod(core.shape[1:-1]) for core in layer.cores)
    return size


def shares_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Per layer and bond, the squared singular values relative to the weight's norm."""
    found = {}
    for name, layer in tt_layers(model).items():
        cores = [core.detach().double() for core in layer.cores]
        size = layer.dense_weight(cores).norm()
        found[name] = [values.square() / size**2 for values in tt.bond_spectra(cores)]
    return found


@given(st.floats(0.0, 1.0), st.sampled_from([60, 61]), st.integers(0, 20))
@hypothesis_settings(max_examples=30, deadline=None)
def test_a_model_is_cut_to_a_size(share: float, features: int, seed: int) -> None:
    model = network(features, seed)
    least, most = with_every_rank_at_one(model), bt.count_parameters(model)
    wanted = round(least + share * (most - least))
    small = copy.deepcopy(model)
    planned = bt.ranks_for(model, wanted)
    report = bt.compact_(small, parameters=wanted)
    assert bt.ranks(small) == planned
    assert bt.count_parameters(small) == report.parameters <= wanted
    bound, shares = 0.0, shares_of(model)
    for name, chain in planned.items():
        lost = sum(float(bond[rank:].sum()) for bond, rank in zip(shares[name], chain[1:-1], strict=True))
        bound = max(bound, math.sqrt(lost))
    assert report.change <= bound * (1 + 1e-5)


@given(st.floats(0.05, 0.95), st.sampled_from([60, 61]), st.integers(0, 20))
@hypothesis_settings(max_examples=30, deadline=None)
def test_the_cheapest_index_goes_first_and_nothing_more_would_fit(share: float, features: int, seed: int) -> None:
    """Against a search through all bonds before every step."""
    model = network(features, seed)
    least, most = with_every_rank_at_one(model), bt.count_parameters(model)
    wanted = round(least + share * (most - least))
    chains, size, shares = {name: list(chain) for name, chain in bt.ranks(model).items()}, most, shares_of(model)
    full = bt.ranks(model)
    sizes = {name: [math.prod(core.shape[1:-1]) for core in layer.cores] for name, layer in tt_layers(model).items()}
    bonds = [(name, bond) for name, chain in chains.items() for bond in range(1, len(chain) - 1)]

    def takes(name: str, bond: int) -> int:
        return chains[name][bond - 1] * sizes[name][bond - 1] + sizes[name][bond] * chains[name][bond + 1]

    def price(name: str, bond: int, rank: int) -> float:
        return float(shares[name][bond - 1][rank]) / math.sqrt(takes(name, bond))

    while size > wanted:
        cuttable = [(price(name, bond, chains[name][bond] - 1), name, bond) for name, bond in bonds
                    if chains[name][bond] > 1]  # fmt: skip
        _, name, bond = min(cuttable)
        size -= takes(name, bond)
        chains[name][bond] -= 1
    planned = bt.ranks_for(model, wanted)
    for name, bond in bonds:
        limit = min(planned[name][bond - 1] * sizes[name][bond - 1], sizes[name][bond] * planned[name][bond + 1])
        assert planned[name][bond] >= min(chains[name][bond], limit)
    chains = {name: list(chain) for name, chain in planned.items()}
    room = wanted - bt.compact_(copy.deepcopy(model), parameters=wanted).parameters
    for name, bond in bonds:
        limit = min(chains[name][bond - 1] * sizes[name][bond - 1], sizes[name][bond] * chains[name][bond + 1])
        assert chains[name][bond] in (full[name][bond], limit) or takes(name, bond) > room


def test_the_layer_that_can_spare_it_gives_it_up() -> None:
    """One layer's small singular values go before any large one of the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 48), nn.ReLU(), nn.Linear(48, 60))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8))
    with torch.no_grad():
        for core in list(tt_layers(model)["0"].cores)[:-1]:
            core[..., 2:] *= 1e-3
    before = bt.ranks(model)
    bt.compact_(model, parameters=bt.count_parameters(model) - 200)
    assert bt.ranks(model)["2"] == before["2"]
    assert min(bt.ranks(model)["0"][1:-1]) < min(before["0"][1:-1])


def test_the_model_is_not_changed_by_a_look() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    bt.ranks_for(model, 900)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_network_that_is_small_enough_stays() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    assert bt.ranks_for(model, 10**6) == bt.ranks(model)
    report = bt.compact_(model, parameters=bt.count_parameters(model))
    assert not report.changed
    assert report.notes == ()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_second_cut_to_the_same_size_does_nothing() -> None:
    model = network()
    bt.compact_(model, parameters=900)
    before = copy.deepcopy(model.state_dict())
    assert not bt.compact_(model, parameters=900).changed
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_size_and_a_tolerance_are_not_asked_for_together() -> None:
    for options in ({"tol": 0.1}, {"rule": "contribution"}):
        with pytest.raises(ConfigError, match="parameters= is instead of tol and for rule='rounding'"):
            bt.compact_(network(), parameters=900, **options)


def test_too_few_parameters_are_refused_with_the_number_there_must_be() -> None:
    model = network()
    least = with_every_rank_at_one(model)
    bt.ranks_for(model, least)
    with pytest.raises(ConfigError, match=f"there are {least:,}, of which 252 are in no tensor train"):
        bt.ranks_for(model, least - 1)


def test_a_layer_without_a_rank_to_spare_is_told() -> None:
    model = network()
    report = bt.compact_(model, parameters=with_every_rank_at_one(model))
    assert max(rank for chain in bt.ranks(model).values() for rank in chain) == 1
    assert any("collapsed to rank 1 at every bond. If accuracy fell, allow more parameters." in n for n in report.notes)


def test_broken_weights_are_named() -> None:
    model = network()
    with torch.no_grad():
        next(iter(tt_layers(model)["0"].cores))[0, 0, 0] = math.nan
    with pytest.raises(ConfigError, match="Layer '0' has NaN or infinite weights"):
        bt.compact_(model, parameters=900)


def test_an_optimiser_goes_on_after_a_cut_to_a_size() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(16, 60)
    for size in (10**6, 900, 700):
        bt.compact_(model, optimizer=optimizer, parameters=size)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert bt.count_parameters(model) <= 700


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
    spread = posterior.rank_spread(parameters=wanted)
    report = posterior.compact_(parameters=wanted)
    assert wanted * 0.9 < report.parameters <= wanted
    assert 0 < report.change < 1
    for name, chain in posterior.ranks.items():
        for rank, own in zip(chain[1:-1], spread[name], strict=True):
            assert len(own) == 3
            assert min(own) - 2 <= rank <= max(own) + 2


def test_one_particle_is_cut_like_a_network() -> None:
    """Two that are the same have one spectrum."""
    model = network()
    posterior = bt.Posterior([network(), network()], num_data=100)
    posterior.compact_(parameters=900)
    assert dict(posterior.ranks) == bt.ranks_for(model, 900)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("particles", [0, 2])
def test_training_ends_at_the_ratio_it_was_given(particles: int, every: int) -> None:
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
        bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
        return model

    config = settings(round_tol=1e-3, compact_tol=1e-3, compact_every=every, target_ratio=40.0)
    dense = 784 * 48 + 48 + 480 + 10
    if particles:
        found, result = bt.fit_posterior(bt.independent(build, particles), TRAIN, None, config, progress=Listener())
        size = found.parameters_each
    else:
        torch.manual_seed(0)
        model = build()
        result = bt.fit(model, TRAIN, None, config, progress=Listener())
        size = bt.count_parameters(model)
    assert 0.7 * dense / 40 < size <= dense / 40  # an index of the first layer has 392 parameters
    assert result.spectra["change"] > 1e-3
    assert any(f"cut to be {dense / size:.4g}x smaller; no cut changed a weight by more" in text for text in heard)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 48), nn.ReLU(), nn.Linear(48, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
    return model


def test_the_ratio_on_the_way_rises_by_the_same_factor() -> None:
    config = settings(epochs=22, compact_from=2.0, target_ratio=64.0)
    assert [wanted_ratio(config, epoch, 4.0) for epoch in (0, 2)] == [4.0, 4.0]
    rising = [wanted_ratio(config, epoch, 4.0) for epoch in (5, 6, 7)]
    assert rising[1] / rising[0] == pytest.approx(rising[2] / rising[1])
    assert rising[1] / rising[0] > 1
    assert [wanted_ratio(config, epoch, 4.0) for epoch in (17.6, 22)] == pytest.approx([64.0, 64.0])


def test_ranks_fall_little_by_little_towards_a_target() -> None:
    config = settings(epochs=10, compact_from=1, compact_tol=1e-3, round_tol=1e-3, finetune_epochs=0)
    sizes = {}
    for target in (0.0, 25.0):
        model = perceptron()
        result = bt.fit(model, TRAIN, None, dataclasses.replace(config, target_ratio=target), prior=WEAK)
        sizes[target] = [line["params"] for line in result.history]
    assert len(set(sizes[25.0])) > 3  # cut several times before the end
    assert sizes[25.0][-1] < 0.7 * sizes[0.0][-1]


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_run_with_a_target_resumes_in_the_same_bits(stop: int, tmp_path: Path) -> None:
    config = settings(epochs=4, round_tol=1e-3, compact_tol=1e-3, target_ratio=30.0, finetune_lr=0.0)
    whole, model = perceptron(), perceptron()
    bt.fit(whole, TRAIN, None, config, prior=WEAK, augment=jitter)
    with pytest.raises(Interrupted):
        bt.fit(perceptron(), TRAIN, None, config, prior=WEAK, augment=jitter, folder=tmp_path, progress=StopAfter(stop))
    bt.fit(model, TRAIN, None, config, prior=WEAK, augment=jitter, folder=tmp_path, resume=True)
    assert bt.ranks(model) == bt.ranks(whole)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


STRONG = bt.PriorConfig(weight=3.0, warmup_epochs=1, align_every=4)
EARLY = {"epochs": 12, "compact_from": 2, "compact_every": 1, "finetune_epochs": 3, "finetune_lr": 0.0, "lr": 1e-2}


@pytest.mark.parametrize("particles", [0, 2])
def test_a_search_that_has_reached_its_target_is_over(particles: int) -> None:
    """A strong prior would go on far beyond it; the epochs that are left go into fine-tuning at just that size."""
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    config, dense = settings(**EARLY, target_ratio=20.0), 784 * 48 + 48 + 480 + 10
    free, model = perceptron(), perceptron()
    bt.fit(free, TRAIN, None, dataclasses.replace(config, target_ratio=0.0), prior=STRONG)
    assert bt.count_parameters(free) < 0.7 * dense / 20
    if particles:
        found, result = bt.fit_posterior(
            bt.independent(perceptron, particles), TRAIN, None, config, prior=STRONG, progress=Listener()
        )
        size = found.parameters_each
    else:
        result = bt.fit(model, TRAIN, None, config, prior=STRONG, progress=Listener())
        size = bt.count_parameters(model)
    assert 0.85 * dense / 20 < size <= dense / 20
    phases = [line["phase"] for line in result.history]
    started = phases.index("finetune")
    assert started < 12
    assert set(phases[:started]) == {"search"}
    assert set(phases[started:]) == {"finetune"}
    assert {line["params"] for line in result.history[started:]} == {size}
    assert any(f"the target was reached after {started - 1} epochs" in text for text in heard)
    assert set(result.spectra["layers"]) == {"1", "3"}


def test_ranks_that_are_nearly_empty_stay_where_the_target_has_room() -> None:
    """Any cut would take more than was asked for: here everything but the first few ranks is almost nothing."""
    model = perceptron()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 2:
                parameter.mul_(0.2 ** torch.arange(parameter.shape[-1]))
    dense = dense_parameters(model)
    assert rounded(model, 1e-2) < 0.6 * dense / 10
    config = settings(**{**EARLY, "epochs": 3, "lr": 1e-9}, compact_tol=1e-2, target_ratio=10.0)
    result = bt.fit(model, TRAIN, None, config, prior=WEAK)
    assert [line["phase"] for line in result.history[2:]] == ["search", *["finetune"] * 4]
    assert 0.85 * dense / 10 < bt.count_parameters(model) <= dense / 10


def test_fine_tuning_has_its_own_rate_from_the_end_of_the_search_on() -> None:
    config = settings(**{**EARLY, "finetune_lr": 4e-3}, target_ratio=20.0)
    result = bt.fit(perceptron(), TRAIN, None, config, prior=STRONG)
    tuned = [line["lr"] for line in result.history if line["phase"] == "finetune"]
    assert len(tuned) > 4
    assert tuned == sorted(tuned, reverse=True)
    assert 3e-3 < tuned[0] < 4e-3
    assert tuned[-1] < 1e-3
    assert learning_rate(config, 7.5, 5) == pytest.approx(2e-3 * (1 + math.cos(math.pi * 0.25)))


def test_a_target_that_all_ranks_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fit\.target_ratio 3 asks for nothing: .* is \d+\.\d+x smaller than dense"):
        bt.fit(perceptron(), TRAIN, None, settings(target_ratio=3.0))


@pytest.mark.parametrize("stop", [3, 6, 13])
def test_a_search_that_ended_early_resumes_in_the_same_bits(stop: int, tmp_path: Path) -> None:
    config = settings(**EARLY, target_ratio=20.0)
    whole, model = perceptron(), perceptron()
    result = bt.fit(whole, TRAIN, None, config, prior=STRONG, augment=jitter)
    assert result.history[12]["phase"] == "finetune"
    with pytest.raises(Interrupted):
        bt.fit(
            perceptron(), TRAIN, None, config, prior=STRONG, augment=jitter, folder=tmp_path, progress=StopAfter(stop)
        )
    bt.fit(model, TRAIN, None, config, prior=STRONG, augment=jitter, folder=tmp_path, resume=True)
    for (name, a), (_, b) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_target_that_no_rank_can_reach_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"fit\.target_ratio 1000 is out of reach\. 38 parameters are too few"):
        bt.fit(perceptron(), TRAIN, None, settings(target_ratio=1000.0))


def test_a_target_without_a_rounding_is_refused() -> None:
    for options in ({"config": settings(target_ratio=10.0, rule="lambda")}, {"search": False}):
        chosen = {"config": settings(target_ratio=10.0), **options}
        with pytest.raises(ConfigError, match=r"needs a search for ranks and fit\.rule"):
            bt.fit(perceptron(), TRAIN, None, **chosen)


def test_a_target_is_met_where_nothing_is_small() -> None:
    """One epoch and no cut on the way: most goes at once, which is told."""
    heard: list[str] = []

    class Listener(Silent):
        def message(self, text: str) -> None:
            heard.append(text)

    model = bt.models.mnist_mlp()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=20))
    config = settings(epochs=1, compact_every=0, finetune_epochs=0, target_ratio=500.0, lr=1e-4)
    result = bt.fit(model, TRAIN, None, config, prior=WEAK, progress=Listener())
    assert 500 <= dense_parameters(model) / bt.count_parameters(model) < 550
    assert result.spectra["change"] > 0.5
    assert any("no cut changed a weight by more than" in text for text in heard)
