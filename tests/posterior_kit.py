"""What tests of posteriors share: small networks, batches, optimisers, a prior."""

from typing import Any

import torch
from torch import Tensor, nn

import bayestrain as bt

NUM_DATA = 200


def perceptron() -> nn.Module:
    layers = bt.TTLinear(12, 8, max_rank=4), nn.ReLU(), bt.TTLinear(8, 3, max_rank=4)
    return nn.Sequential(*layers).double()


def convnet() -> nn.Module:
    """With batch norm behind a tensor-train layer: its scale is held."""
    return nn.Sequential(
        bt.TTConv2d(2, 6, 3, padding=1, max_rank=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    ).double()


def digits(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(20, *shape, generator=generator).double(), torch.randint(0, 3, (20,), generator=generator)


def sgd(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.05, momentum=0.9)


def adam(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


def rank_prior(model: nn.Module) -> bt.RankPrior:
    return bt.RankPrior(model, NUM_DATA, warmup_steps=4, align_every=3)
