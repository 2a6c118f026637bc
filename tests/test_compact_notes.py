"""What `compact_` says of ranks that did not move and of layers of which little or nothing is left."""

import torch
from test_compact import planted
from torch import nn

import bayestrain as bt


def test_the_report_says_when_no_rank_moved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(bt.TTLinear(144, 144, max_rank=4))
    assert "no rank moved" in str(bt.compact_(model, tol=1e-6))


def test_the_report_says_when_a_layer_collapsed() -> None:
    model = nn.Sequential(planted(ranks=(1, 1, 1), noise=1e-9))
    assert "collapsed to rank 1 at every bond" in str(bt.compact_(model))
    zero = nn.Sequential(planted())
    with torch.no_grad():
        for core in zero[0].cores:
            core.zero_()
    bt.compact_(zero)
    assert zero[0].ranks == (1, 1, 1, 1, 1)
    assert torch.isfinite(zero[0].weight).all()


def test_the_report_says_when_the_prior_left_nothing_of_a_layer() -> None:
    def shrunk(*behind: nn.Module, factor: float = 1e-2) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(bt.TTLinear(144, 144, max_rank=4), *behind)
        with torch.no_grad():
            for core in model[0].cores:
                core *= factor
        return model

    def notes(model: nn.Sequential) -> tuple[str, ...]:
        return bt.compact_(model, tol=1e-9).notes

    model = shrunk()
    assert not any("almost nothing" in note for note in notes(model))  # no prior was there
    prior = bt.RankPrior(model, num_data=10)
    first, second = notes(model)
    assert first.startswith("the weight of '0' has shrunk to almost nothing. Probably the prior outweighed the data")
    assert second.startswith("no rank moved. Train longer, check that prior.loss()")  # and no larger weight
    prior.remove_()
    for fine in (shrunk(factor=0.5), shrunk(nn.BatchNorm1d(144))):  # in front of a batch norm sizes say nothing
        bt.RankPrior(fine, num_data=10, hold_scale=())
        (note,) = notes(fine)
        assert note.startswith("no rank moved. Train longer or with a larger prior weight, ")
