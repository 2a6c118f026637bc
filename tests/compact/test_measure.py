"""Norms of padded weights, without the weight."""

import math

import pytest
import torch
from compact_kit import FORMATS, layout, weight
from hypothesis import given
from hypothesis import strategies as st

from bayestrain.compact.measure import boxes, relative_change, weight_inner
from bayestrain.formats import algebra
from bayestrain.nn import Layout, TensorLinear

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
