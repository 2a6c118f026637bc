"""Embeddings: only rows that are looked up are made, in every mode of PyTorch's bags."""

import math
from typing import Any

import pytest
import torch
from operations import Operations
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import bayestrain as bt
from bayestrain.errors import ConversionError, ShapeError
from bayestrain.nn import TensorEmbedding, TensorEmbeddingBag, embedding
from bayestrain.prior import RankPrior


@pytest.mark.parametrize("layout", ["split", "paired"])
def test_the_table_is_never_made(layout: str) -> None:
    rows, dim = 100_003, 32  # a prime: the modes are padded
    with Operations() as seen:
        table = TensorEmbedding(rows, dim, layout=layout, max_rank=4)
        model = nn.Sequential(table)
        prior = RankPrior(model, num_data=100)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(2):
            index = torch.randint(0, rows, (50,))
            (table(index).square().mean() + prior.loss()).backward()
            optimizer.step()
            prior.step()
        report = bt.compact_(model, tol=0.5)
        repr(table), bt.count_parameters(model), bt.summary(model, index)
    assert report.changed
    assert max(seen.entries) < rows * dim / 10


def test_only_rows_of_the_table_are_looked_up_and_frequent_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TensorEmbedding(97, 8, max_rank=3)  # its modes cover more
    for index in (97, -1):
        with pytest.raises(IndexError):
            table(torch.tensor([index]))
    with pytest.raises(ShapeError, match="expects a tensor of indices"):
        table(torch.ones(3))
    table, seen = TensorEmbedding(1000, 6, max_rank=3), []
    look_up = TensorEmbedding._look_up
    noting = lambda self, index: seen.append(len(index)) or look_up(self, index)  # noqa: E731
    monkeypatch.setattr(TensorEmbedding, "_look_up", noting)
    for index, looked_up in (
        (torch.arange(5), 5),  # few of many: not worth sorting
        (torch.arange(3).repeat(1000 // embedding.OFTEN), 3),
        (torch.arange(4).repeat(500), 1000),  # more indices than rows
    ):
        assert_close(table(index), table.weight[index])
        assert seen.pop() == looked_up


@pytest.mark.parametrize("layout", ["split", "paired"])
def test_gradients_skip_the_row_of_padding(layout: str) -> None:
    table = TensorEmbedding(40, 6, padding_idx=5, layout=layout, max_rank=3, dtype=torch.float64)
    table(torch.tensor([5, 5])).sum().backward()
    assert not any(bool(core.grad.any()) for core in table.cores)
    assert not table(torch.tensor([[5]])).any()
    assert not table.weight[5].any()
    assert table.weight[4].any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_bags_are_those_of_pytorch(mode: str, padding_idx: int | None) -> None:
    settings: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx, "dtype": torch.float64}
    index = torch.tensor([4, 2, 2, 1, 2, 9, 9, 0])
    weights = torch.rand(8, dtype=torch.float64) if mode == "sum" else None
    for last, offsets in ((False, [0, 3, 3, 6]), (True, [0, 3, 3, 6, 8])):
        bag = TensorEmbeddingBag(30, 6, max_rank=3, include_last_offset=last, **settings)
        twin = bag.to_dense()
        assert (twin.mode, twin.include_last_offset, twin.padding_idx) == (mode, last, padding_idx)
        given = index, torch.tensor(offsets), weights
        assert_close(bag(*given), twin(*given))
        found = torch.autograd.grad(bag(*given).square().sum(), list(bag.parameters()))
        dense = nn.functional.embedding_bag(
            index, bag.weight, given[1], mode=mode, per_sample_weights=weights, include_last_offset=last,
            padding_idx=padding_idx,
        )  # fmt: skip
        assert_close(found, torch.autograd.grad(dense.square().sum(), list(bag.parameters())))
    two = index.reshape(2, 4)
    assert_close(bag(two, None, None if weights is None else weights.reshape(2, 4)),
                 twin(two, None, None if weights is None else weights.reshape(2, 4)))  # fmt: skip


@pytest.mark.parametrize(("dense", "text"), [
    (nn.Embedding(20, 6, max_norm=1.0), "max_norm=1.0"),
    (nn.Embedding(20, 6, sparse=True), "sparse=True"),
    (nn.EmbeddingBag(20, 6, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
])  # fmt: skip
def test_what_needs_a_table_is_refused(dense: nn.Module, text: str) -> None:
    kind = TensorEmbeddingBag if isinstance(dense, nn.EmbeddingBag) else TensorEmbedding
    with pytest.raises(ConversionError, match=text):
        kind.from_dense(dense)


def test_random_starts_have_the_variance_of_pytorchs_and_a_million_rows_take_two_percent() -> None:
    table = TensorEmbedding(300, 20, max_rank=3)
    assert 0.9 < float(table.weight.detach().square().mean()) < 1.1
    for rank in (16, 30):
        table = TensorEmbedding(1_000_000, 256, max_rank=rank)
        assert bt.count_parameters(table) < 0.02 * 1_000_000 * 256
        assert math.prod(table.out_modes) == 1_000_000


def test_gradients_of_gradients() -> None:
    table = TensorEmbedding(30, 5, out_modes=(2, 4, 4), max_rank=2, dtype=torch.float64)
    index = torch.tensor([0, 29, 7])

    def rows(*cores: Tensor) -> Tensor:
        return functional_call(table, {f"factorized.cores.{k}": core for k, core in enumerate(cores)}, (index,))

    cores = tuple(core.detach().requires_grad_() for core in table.cores)
    assert torch.autograd.gradcheck(rows, cores)
    assert torch.autograd.gradgradcheck(rows, cores)
