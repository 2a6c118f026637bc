"""Cutting to a size where that changes the weights least: networks and particles."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import bayestrain as bt
from bayestrain import tt
from bayestrain.errors import ConfigError
from bayestrain.sizes import tt_layers
from bayestrain.target import Roundable, cheapest_ranks, dense_parameters

MODES = {"0": ((3, 4, 5), (4, 3, 4)), "3": ((6, 8), (3, 4))}


def network(features: int = 60, seed: int = 0) -> nn.Sequential:
    """Two layers whose singular values fall; the first one has three cores, and is padded if `features` is 59."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(features, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=8, modes=MODES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 2:
                parameter.mul_(0.7 ** torch.arange(parameter.shape[-1]))
    return model


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


@given(st.floats(0.0, 1.0), st.sampled_from([60, 59]), st.integers(0, 20))
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


@given(st.floats(0.05, 0.95), st.sampled_from([60, 59]), st.integers(0, 20))
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

    def limit(name: str, bond: int) -> int:
        sides = chains[name][bond - 1] * sizes[name][bond - 1], sizes[name][bond] * chains[name][bond + 1]
        return min(full[name][bond], *sides)

    while size > wanted:
        _, name, bond = min((price(*at, chains[at[0]][at[1]] - 1), *at) for at in bonds if chains[at[0]][at[1]] > 1)
        size -= takes(name, bond)
        chains[name][bond] -= 1
    for name, chain in chains.items():
        while any(chain[bond] > limit(name, bond) for bond in range(1, len(chain) - 1)):
            for bond in range(1, len(chain) - 1):
                size -= (chain[bond] - min(chain[bond], limit(name, bond))) * takes(name, bond)
                chain[bond] = min(chain[bond], limit(name, bond))
    while fitting := [
        (price(*at, chains[at[0]][at[1]]), *at)
        for at in bonds
        if chains[at[0]][at[1]] < limit(*at) and size + takes(*at) <= wanted
    ]:
        _, name, bond = max(fitting)
        size += takes(name, bond)
        chains[name][bond] += 1
    assert {name: list(chain) for name, chain in bt.ranks_for(model, wanted).items()} == chains


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=4), st.floats(0, 1))
def test_any_spectra_are_cut_to_a_size(values: list[list[float]], share: float) -> None:
    """Ties and zeros among them; what is kept could not have been kept with one index more."""
    layer = Roundable([sorted(bond, reverse=True) for bond in values], [2 + k for k in range(len(values) + 1)])
    full = [1, *map(len, values), 1]
    least, most = layer.entries([1] * len(full)), layer.entries(full)
    wanted = 7 + round(least + share * (most - least))
    found = cheapest_ranks({"a": layer}, 7, wanted)
    chain = list(found.ranks["a"])
    assert layer.entries(chain) + 7 <= wanted
    assert list(tt.feasible_ranks(layer.sizes, chain[1:-1])) == chain[1:-1]
    assert found.change == pytest.approx(layer.change(chain))
    for bond in range(1, len(chain) - 1):
        more = [*chain[:bond], chain[bond] + 1, *chain[bond + 1 :]]
        useful = tt.feasible_ranks(layer.sizes, more[1:-1])[bond - 1] == more[bond]
        assert more[bond] > full[bond] or not useful or layer.entries(more) + 7 > wanted


def test_of_what_went_the_dearest_that_fits_comes_back() -> None:
    """The third index that goes takes 100 entries of which 30 are too many: one of the two before it fits, of 20."""
    layers = {
        "wide": Roundable([[0.9, 0.1]], [50, 50]),
        "dear": Roundable([[0.995, 0.005]], [10, 10]),
        "cheap": Roundable([[0.999, 0.001]], [10, 10]),
    }
    found = cheapest_ranks(layers, 0, 170)
    assert found.ranks == {"wide": (1, 1, 1), "dear": (1, 2, 1), "cheap": (1, 1, 1)}
    assert found.change == pytest.approx(math.sqrt(0.1))


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


def test_small_enough_is_left_alone_even_with_ranks_that_neighbours_cannot_use() -> None:
    """A cut by contribution may leave such."""
    model = network()
    first = tt_layers(model)["0"]
    with torch.no_grad():
        first.set_cores([torch.randn(1, 4, 3, 2), torch.randn(2, 3, 4, 40), torch.randn(40, 4, 5, 1)])
    before = copy.deepcopy(model.state_dict())
    assert not bt.compact_(model, parameters=bt.count_parameters(model)).changed
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    report = bt.compact_(model, parameters=bt.count_parameters(model) - 1)
    assert report.change < 1e-6  # only what nothing used
    assert first.ranks == (1, 2, 20, 1)


def test_empty_indices_are_planned_as_they_are_cut() -> None:
    model = network()
    with torch.no_grad():
        tt_layers(model)["3"].cores[0][..., 5:] = 0
    wanted = bt.count_parameters(model) - 1
    planned = bt.ranks_for(model, wanted)
    assert planned["3"] == (1, 5, 1)
    bt.compact_(model, parameters=wanted)
    assert bt.ranks(model) == planned
    with torch.no_grad():
        tt_layers(model)["0"].cores[1].zero_()
    assert bt.ranks_for(model, bt.count_parameters(model) - 1)["0"] == (1, 1, 1, 1)


def test_a_look_at_a_size_does_not_undo_that_a_tolerance_cuts_once() -> None:
    model = network()
    bt.compact_(model, 0.3)
    bt.compact_(model, parameters=10**9)
    assert not bt.compact_(model, 0.3).changed


@pytest.mark.parametrize("wrong", [0, -5, 900.7, math.nan, True, "900"])
def test_what_is_no_number_of_parameters_is_refused(wrong: object) -> None:
    for call in (bt.compact_, lambda model, parameters: bt.ranks_for(model, parameters)):
        with pytest.raises(ConfigError, match="parameters must be an integer of at least 1"):
            call(network(), parameters=wrong)


def test_a_number_of_parameters_in_the_place_of_a_tolerance_is_told() -> None:
    with pytest.raises(ConfigError, match="If 900 is how many parameters there may be, say parameters=900"):
        bt.compact_(network(), 900)


def test_a_look_at_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor-train layer"):
        bt.ranks_for(nn.Linear(3, 3), 5)


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
    for call in (bt.compact_, bt.ranks_for):
        with pytest.raises(ConfigError, match="Layer '0' has NaN or infinite weights"):
            call(model, parameters=900)


def test_two_reports_are_told_as_one() -> None:
    model = network()
    before = bt.ranks(model)
    first, second = bt.compact_(model, 0.2), bt.compact_(model, parameters=with_every_rank_at_one(model))
    both = first.then(second)
    assert {row.name: row.ranks_before for row in both.layers} == before
    assert {row.name: row.ranks for row in both.layers} == bt.ranks(model)
    assert (both.parameters_before, both.parameters) == (first.parameters_before, second.parameters)
    assert both.change == max(first.change, second.change) > 0
    assert set(both.notes) == {*first.notes, *second.notes} != set()


def test_particles_with_fused_sgd_go_on_after_a_cut_to_a_size() -> None:
    def make(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=1e-3, momentum=0.9, fused=True)

    posterior = bt.Posterior([network(seed=seed) for seed in range(2)], num_data=16, optimizer=make)
    x, y = torch.randn(16, 60), torch.randint(0, 12, (16,))
    for size in (10**6, 900, 700):
        posterior.compact_(parameters=size)
        posterior.step(x, y)
    assert posterior.parameters_each <= 700


OPTIMIZERS = [
    torch.optim.Adam,
    partial(torch.optim.Adam, fused=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),  # as `fit` makes it on a GPU
    partial(torch.optim.SGD, lr=0.1, fused=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimiser_goes_on_after_a_cut_to_a_size(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = network()
    optimizer = make(model.parameters())
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


@pytest.mark.parametrize("features", [60, 59])
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
            assert rank == pytest.approx(sum(own) / 3, abs=2)
    for index in range(3):
        alone = bt.ranks_for(network(features, index), wanted)
        assert {name: [bond[index] for bond in bonds] for name, bonds in spread.items()} == {
            name: list(chain[1:-1]) for name, chain in alone.items()
        }


def test_one_particle_is_cut_like_a_network() -> None:
    """Two that are the same have one spectrum."""
    model = network()
    posterior = bt.Posterior([network(), network()], num_data=100)
    posterior.compact_(parameters=900)
    assert dict(posterior.ranks) == bt.ranks_for(model, 900)
