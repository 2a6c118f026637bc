"""Networks cut to a parameter budget, whatever their formats."""

import copy
import math

import pytest
import torch
from compact_kit import FORMATS, Layer, weight
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bayestrain.compact import compact_
from bayestrain.errors import ConfigError
from bayestrain.nn import count_parameters, factorized_weights, ranks


def network(*kinds: str, padded: bool = False) -> nn.Sequential:
    """Layers whose singular values fall, and parameters that are in no core."""
    layers = [Layer(weight(kind, 6, padded=padded, decay=0.6)) for kind in kinds]
    return nn.Sequential(*layers, nn.BatchNorm1d(12).double(), nn.Linear(12, 3).double())


def smallest(model: nn.Module) -> int:
    """What the model has with every rank at 1."""
    size = count_parameters(model)
    for own in factorized_weights(model).values():
        ones = own.equation.shapes(own.layout.sizes, [1] * len(own.ranks))
        size -= own.numel - sum(map(math.prod, ones))
    return size


KINDS = st.sampled_from(sorted(FORMATS))


@given(st.floats(0, 1), KINDS, KINDS, st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_model_is_cut_to_a_budget(share: float, first: str, second: str, padded: bool, sliced: bool) -> None:
    model = network(first, second, padded=padded)
    least, most = smallest(model), count_parameters(model)
    wanted = round(least + share * (most - least))
    rule = "contribution" if sliced else None
    report = compact_(model, parameters=wanted, rule=rule)
    assert count_parameters(model) == report.parameters <= wanted


@pytest.mark.parametrize("kind", ["tt", "tucker", "tucker2"])
def test_the_change_is_at_most_what_the_singular_values_say(kind: str) -> None:
    model = network(kind, padded=True)
    (row,) = compact_(model, parameters=(smallest(model) + count_parameters(model)) // 2).layers
    lost = sum(value**2 for bond, rank in zip(row.spectra, row.ranks, strict=True) for value in bond[rank:])
    assert 0 < row.error <= math.sqrt(lost) * (1 + 1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_layer_that_can_spare_it_gives_it_up(kind: str) -> None:
    """One layer's small indices go before any large one of the other."""
    model = nn.Sequential(Layer(weight(kind, 3)), Layer(weight(kind, 4)))
    small = model[1].factorized
    with torch.no_grad():
        for bond in small.equation.bonds:
            core = small.equation.owners(bond)[0]
            small.cores[core].movedim(small.equation.axis(core, bond), 0)[2:] *= 1e-3
    compact_(model, parameters=count_parameters(model) - 5)
    assert ranks(model)["0"] == (3,) * len(small.ranks)
    assert min(ranks(model)["1"]) < 4


@pytest.mark.parametrize("kind", FORMATS)
def test_a_network_that_is_small_enough_stays(kind: str) -> None:
    model = network(kind)
    for wanted in (count_parameters(model), (smallest(model) + count_parameters(model)) // 2):
        compact_(model, parameters=wanted)
        before, size = copy.deepcopy(model.state_dict()), count_parameters(model)
        report = compact_(model, parameters=wanted)
        assert (report.changed, report.notes, report.parameters) == (False, (), size)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert size <= wanted


def test_ranks_that_neighbours_cannot_use_go_for_free() -> None:
    """A cut by contribution may leave such."""
    model = nn.Sequential(Layer(weight("tt", (2, 40))))
    assert not compact_(model, parameters=count_parameters(model)).changed
    report = compact_(model, parameters=count_parameters(model) - 1)
    assert report.change < 1e-6
    assert report.layers[0].ranks == (2, 5)


def test_empty_indices_go_for_free() -> None:
    model = network("tt", "tt")
    with torch.no_grad():
        model[1].factorized.cores[1][..., 2:] = 0
        model[0].factorized.cores[1].zero_()
    compact_(model, parameters=count_parameters(model) - 1)
    assert ranks(model) == {"0": (1, 1), "1": (4, 2)}


def test_a_look_at_a_budget_does_not_undo_that_a_tolerance_cuts_once() -> None:
    model = network("tt", "cp")
    compact_(model, 0.3)
    compact_(model, parameters=10**9)
    assert not compact_(model, 0.3).changed


def test_too_few_parameters_are_refused_with_the_smallest_size() -> None:
    model = network("tt", "ring", "cp")
    least, others = smallest(model), 24 + 24 + 39
    for rule in (None, "contribution"):
        with pytest.raises(ConfigError, match=f"there are {least:,}, of which {others:,} are in no core"):
            compact_(model, parameters=least - 1, rule=rule)
    report = compact_(model, parameters=least)
    assert {max(own) for own in ranks(model).values()} == {1}
    assert any("collapsed to rank 1 at every bond. If accuracy fell, allow more" in note for note in report.notes)


def test_two_reports_become_one() -> None:
    model = network("tt", "cp")
    before = ranks(model)
    first, second = compact_(model, 0.2), compact_(model, parameters=smallest(model))
    both = first.then(second)
    assert {row.name: row.ranks_before for row in both.layers} == before
    assert {row.name: row.ranks for row in both.layers} == ranks(model)
    assert (both.parameters_before, both.parameters) == (first.parameters_before, second.parameters)
    assert both.change == max(first.change, second.change) > 0
    assert set(both.notes) == {*first.notes, *second.notes} != set()
    assert both.layers[0].spectra == first.layers[0].spectra
