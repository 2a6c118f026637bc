"""The heart of the library: ranks planted in a teacher are found by a student that starts with far larger ones."""

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt

SEEDS = range(5)
STARTS = (1e-3, 1.0, 1e2)


def train_student(
    model: nn.Module, x: Tensor, y: Tensor, sigma: float, steps: int, batch: int, start: float, weight: float = 1.0
) -> None:
    """Gaussian noise of known size, Adam with a cosine schedule, the prior as a user would have it; then compact."""
    prior = bt.RankPrior(model, num_data=len(x), start=start, weight=weight, warmup_steps=200)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (batch,))
        error = (model(x[chosen]) - y[chosen]).square().flatten(1).sum(1).mean() / (2 * sigma**2)
        (error + prior.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        prior.step()
    bt.compact_(model)


def linear_student(seed: int, start: float = 1.0, weight: float = 1.0) -> tuple[int, ...]:
    """Train on noisy outputs of a TT-linear teacher with ranks (3, 2, 3); the ranks that compaction leaves."""
    torch.manual_seed(seed)
    modes = {"in_modes": (4, 4, 4, 4), "out_modes": (3, 3, 3, 3)}
    teacher = bt.TTLinear(256, 81, bias=False, max_rank=(3, 2, 3), **modes)
    x = torch.randn(1000, 256)
    with torch.no_grad():
        clean = teacher(x)
        sigma = clean.std()
        y = clean + sigma * torch.randn_like(clean)
    model = nn.Sequential(bt.TTLinear(256, 81, max_rank=10, **modes))
    train_student(model, x, y, float(sigma), steps=1200, batch=128, start=start, weight=weight)
    return model[0].ranks[1:-1]


def conv_student(seed: int, start: float = 1.0) -> tuple[tuple[int, ...], float]:
    """The same for a convolution whose scale a batch norm makes free: the ranks, and the error against the teacher."""
    torch.manual_seed(seed)
    settings = {"padding": 1, "bias": False, "in_modes": (4, 4), "out_modes": (4, 4)}
    teacher = nn.Sequential(bt.TTConv2d(16, 16, 3, max_rank=(3, 2, 3, 2), **settings), nn.BatchNorm2d(16, affine=False))
    sigma = 4.0
    x = torch.randn(256, 16, 8, 8)
    with torch.no_grad():
        clean = teacher(x)
        y = clean + sigma * torch.randn_like(clean)
    model = nn.Sequential(bt.TTConv2d(16, 16, 3, max_rank=8, **settings), nn.BatchNorm2d(16))
    train_student(model, x, y, sigma, steps=800, batch=64, start=start)
    with torch.no_grad():
        return model[0].ranks[1:-1], float((model(x) - clean).square().mean())


def test_without_the_prior_noise_fills_every_rank() -> None:
    assert linear_student(0, weight=0.0) == (10, 10, 10)


def test_linear_ranks_are_found_on_at_least_four_of_five_seeds() -> None:
    found = [linear_student(seed) for seed in SEEDS]
    assert found.count((3, 2, 3)) >= 4, found


@pytest.mark.parametrize("start", STARTS)
def test_linear_ranks_are_found_from_very_different_starts_of_lambda(start: float) -> None:
    assert linear_student(0, start=start) == (3, 2, 3)


def test_conv_ranks_are_found_behind_a_batch_norm_without_collapse() -> None:
    found = [conv_student(seed) for seed in SEEDS]
    assert [ranks for ranks, _ in found].count((3, 2, 3, 2)) >= 4, found
    assert all(error < 0.02 for _, error in found), found  # the noise has variance 16, the signal 1


@pytest.mark.parametrize("start", STARTS)
def test_conv_ranks_are_found_from_very_different_starts_of_lambda(start: float) -> None:
    assert conv_student(0, start=start)[0] == (3, 2, 3, 2)
