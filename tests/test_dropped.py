"""Cutting a rank that is zero does not change what the prior wants of the ranks that stay."""

import copy

import pytest
import torch
from torch import nn

import bayestrain as bt
from bayestrain import shrinkage
from bayestrain.layers import TTLinear


def model_with_dead_ranks() -> nn.Sequential:
    """Rank 6 everywhere, of which two indices per bond are exactly zero."""
    torch.manual_seed(0)
    layer = TTLinear(81, 81, in_modes=(3, 3, 3, 3), out_modes=(3, 3, 3, 3), max_rank=6).double()
    with torch.no_grad():
        for k, core in enumerate(layer.cores):
            if k > 0:
                core[4:] = 0
            if k < 3:
                core[..., 4:] = 0
    return nn.Sequential(layer)


def test_lambda_moves_as_if_the_dropped_slices_were_still_there() -> None:
    whole = model_with_dead_ranks()
    prior = bt.RankPrior(whole, num_data=10, align_every=0, floor=1e-8)
    for _ in range(3):
        prior.step()
    cut = copy.deepcopy(whole)
    other = bt.RankPrior(cut, num_data=10, align_every=0, floor=1e-8)
    assert bt.compact_(cut, rule="contribution").changed
    assert cut[0].ranks == (1, 4, 4, 4, 1)
    assert cut[0].rank_state.dropped == [2, 2, 2]
    for _ in range(30):
        prior.step()
        other.step()
    for full, small in zip(whole[0].rank_state.log_lambdas, cut[0].rank_state.log_lambdas, strict=True):
        torch.testing.assert_close(small, full[:4], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bond", [1, 2, 3])
def test_the_conditional_is_the_derivative_of_the_density_with_dropped_ranks(bond: int) -> None:
    torch.manual_seed(1)
    cores = [core.detach() for core in model_with_dead_ranks()[0].cores]
    us = [torch.randn(6, dtype=torch.float64) for _ in range(3)]
    dropped = [5, 2, 9]
    u = us[bond - 1].requires_grad_()
    (expected,) = torch.autograd.grad(-shrinkage.log_prob(cores, us, 1.3, 5.0, dropped), u)
    energies = shrinkage.slice_energies(cores)
    with torch.no_grad():
        linear, inverse, square = shrinkage.conditional(energies, [9] * 4, us, bond, 1.3, dropped)
        slope = linear - inverse * torch.exp(-u) - 2 * square * torch.exp(-2 * u) + 5.0 * torch.exp(u)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-10)


def test_the_count_is_saved_with_the_model() -> None:
    model = model_with_dead_ranks()
    bt.RankPrior(model, num_data=10).step()
    bt.compact_(model, rule="contribution")
    fresh = model_with_dead_ranks()
    fresh.load_state_dict(model.state_dict())
    assert fresh[0].rank_state.dropped == model[0].rank_state.dropped == [2, 2, 2]
