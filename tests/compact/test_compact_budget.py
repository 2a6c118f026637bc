"""Networks cut to a parameter budget, whatever their formats; and norms of padded weights, without the weight."""

import copy
import math

import pytest
import torch
from compact_kit import FORMATS, Layer, layout, weight
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NAMED
from torch import nn

from bayestrain.compact import compact_
from bayestrain.compact.measure import boxes, relative_change, weight_inner
from bayestrain.compact.rules import Priced, cheapest_ranks
from bayestrain.errors import ConfigError
from bayestrain.formats import algebra
from bayestrain.nn import Layout, TensorLinear, count_parameters, factorized_weights, ranks


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
    own = model[0].factorized
    spectra, norm = (
        own.format.spectra(own.equation, [core.detach() for core in own.cores]),
        float(own.dense().detach().norm()),
    )
    (row,) = compact_(model, parameters=(smallest(model) + count_parameters(model)) // 2).layers
    lost = sum(float(bond[rank:].square().sum()) for bond, rank in zip(spectra, row.ranks, strict=True))
    assert 0 < row.error <= math.sqrt(lost) / norm * (1 + 1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_layer_that_can_spare_it_gives_it_up_and_what_is_small_enough_stays(kind: str) -> None:
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
    model = network(kind)
    for wanted in (count_parameters(model), (smallest(model) + count_parameters(model)) // 2):
        compact_(model, parameters=wanted)
        before, size = copy.deepcopy(model.state_dict()), count_parameters(model)
        report = compact_(model, parameters=wanted)
        assert (report.changed, report.notes, report.parameters) == (False, (), size)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert size <= wanted


def test_what_is_not_used_goes_for_free_and_a_look_undoes_nothing() -> None:
    """A cut by contribution may leave such."""
    model = nn.Sequential(Layer(weight("tt", (2, 40))))
    assert not compact_(model, parameters=count_parameters(model)).changed
    report = compact_(model, parameters=count_parameters(model) - 1)
    assert all(row.error < 1e-6 for row in report.layers)
    assert report.layers[0].ranks == (2, 5)
    model = network("tt", "tt")
    with torch.no_grad():
        model[1].factorized.cores[1][..., 2:] = 0
        model[0].factorized.cores[1].zero_()
    compact_(model, parameters=count_parameters(model) - 1)
    assert ranks(model) == {"0": (1, 1), "1": (4, 2)}
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
    largest = [max(row.error for row in report.layers) for report in (both, first, second)]
    assert largest[0] == max(largest[1:]) > 0
    assert set(both.notes) == {*first.notes, *second.notes} != set()


spectra = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=3)
kinds = st.sampled_from([kind for kind, equation in NAMED.items() if equation.bonds])


def priced(kind: str, values: list[list[float]]) -> Priced:
    equation = NAMED[kind]
    shares = [sorted(values[k % len(values)], reverse=True) for k in range(len(equation.bonds))]
    return Priced(equation, (4, 5, 3, 2)[: len(equation.modes)], shares)


@given(kinds, kinds, spectra, spectra, st.floats(0, 1))
def test_the_cheapest_index_goes_first(
    first: str, second: str, values: list[list[float]], others: list[list[float]], share: float
) -> None:
    weights = [priced(first, values), priced(second, others)]
    ranks = [[len(bond) for bond in weight.shares] for weight in weights]

    def size() -> int:
        return 7 + sum(weight.entries(own) for weight, own in zip(weights, ranks, strict=True))

    def price(n: int, bond: int) -> float:
        fewer = [rank - (k == bond) for k, rank in enumerate(ranks[n])]
        freed = weights[n].entries(ranks[n]) - weights[n].entries(fewer)
        return weights[n].shares[bond][ranks[n][bond] - 1] / math.sqrt(freed)

    least = 7 + sum(weight.entries([1] * len(weight.shares)) for weight in weights)
    wanted = round(least + share * (size() - least))
    found = cheapest_ranks(weights, 7, wanted)
    while size() > wanted:  # the same by looking through all bonds before every step
        bonds = [(n, bond) for n, own in enumerate(ranks) for bond, rank in enumerate(own) if rank > 1]
        _, n, bond = min((price(*each), *each) for each in bonds)
        ranks[n][bond] -= 1
    assert found == [tuple(own) for own in ranks]


SPLITS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=2)


@given(SPLITS, st.floats(0, 1), st.randoms())
def test_boxes_hold_every_entry_of_the_weight_once_and_no_padding(splits: list, share: float, random: object) -> None:
    axes = tuple(max(1, round(share * math.prod(split))) for split in splits)
    count = sum(map(len, splits))
    order = random.sample(range(count), count)
    cuts = sorted(random.sample(range(1, count), random.randint(0, count - 1)))
    modes = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True))
    folding = Layout(axes, axes, tuple(map(tuple, splits)), modes)
    inside = folding.fold(torch.ones(axes))
    found = torch.zeros(folding.sizes)
    for box in boxes(folding):
        whole = [torch.arange(n) if index is None else index for n, index in zip(folding.sizes, box, strict=True)]
        found[torch.meshgrid(*whole, indexing="ij")] += 1
    assert torch.equal(found, inside)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("padded", [False, True])
def test_norms_and_changes_are_those_of_the_weights(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = weight(kind, 4, padded=padded), weight(kind, 2, padded=padded)
    assert (a.layout.padded != a.layout.axes) == padded
    first, second = a.dense().detach(), b.dense().detach()
    monkeypatch.setattr(Layout, "unfold", lambda *_: pytest.fail("the weight was materialised"))
    cores = [list(own.cores) for own in (a, b)]
    with torch.no_grad():
        assert weight_inner(a, cores[0], cores[0]) == pytest.approx(float(first.norm()) ** 2)
        assert weight_inner(a, *cores) == pytest.approx(float((first * second).sum()))
        found = relative_change(a, *cores)
        assert found == pytest.approx(float((first - second).norm() / first.norm()))
        assert relative_change(a, cores[0], cores[0]) < 1e-7


def test_an_embedding_sized_table_takes_no_time() -> None:
    """50,257 x 768 entries, both padded."""
    own = TensorLinear(768, 50_257, in_modes=(9, 9, 10), out_modes=(37, 37, 37), max_rank=4, bias=False).factorized
    assert own.layout.padded != own.layout.axes
    exact = [core.detach().double() for core in own.cores]
    assert len(boxes(layout(True))) <= len(boxes(own.layout)) <= 9
    share = math.sqrt(weight_inner(own, exact, exact)) / float(algebra.norm(own.equation, exact))
    assert 0.9 < share < 1.0
