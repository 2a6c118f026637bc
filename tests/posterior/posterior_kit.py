"""What tests of posteriors share: small networks, batches, optimisers, a prior."""

from typing import Any

import torch
from torch import Tensor, nn

import bayestrain as bt

NUM_DATA = 200


def perceptron(format: str = "tt") -> nn.Module:
    layers = bt.TensorLinear(12, 8, format=format, max_rank=4), nn.ReLU(), bt.TensorLinear(8, 3, max_rank=4)
    return nn.Sequential(*layers).double()


def convnet() -> nn.Module:
    """With batch norm behind a factorised layer: its scale is held."""
    return nn.Sequential(
        bt.TensorConv2d(2, 6, 3, padding=1, max_rank=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    ).double()


def batch(*shape: int, seed: int = 0, size: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *(shape or (12,)), generator=generator).double()
    return x, torch.randint(0, 3, (size,), generator=generator)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


def rank_prior(model: nn.Module) -> bt.RankPrior:
    return bt.RankPrior(model, NUM_DATA, warmup_steps=4, align_every=3)


def assert_same(one: bt.Posterior, other: bt.Posterior, **tolerance: float) -> None:
    """All tensors of the particles, bit for bit unless a tolerance is given."""
    for kind in ("particles", "carried"):
        ours, theirs = (dict(getattr(each, kind)) for each in (one, other))
        torch.testing.assert_close(ours, theirs, **(tolerance or {"rtol": 0, "atol": 0}))
