"""The same network, data, epochs and rates for every loop: batches in a fixed order, digits of mnist-mini."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import bayestrain as bt
from bayestrain import data
from bayestrain.train import FitConfig, PriorConfig
from bayestrain.train.loop import learning_rate

BATCH, TRAINED, HELD_OUT = 100, 6000, 2000
PRIOR = PriorConfig(weight=0.5, warmup_epochs=1, align_every=20)
SEARCH: dict[str, Any] = {"epochs": 5, "compact_every": 1, "compact_from": 1, "compact_tol": 0.1, "round_tol": 0.1}
CONFIG = FitConfig(**SEARCH, finetune_epochs=2, finetune_lr=0.0, lr=1e-2, batch_size=BATCH)
EPOCHS, STEPS = CONFIG.epochs + CONFIG.finetune_epochs, TRAINED // BATCH


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    sets, found = data.load("mnist-mini"), []
    for images, number in ((sets.train, TRAINED), (sets.test, HELD_OUT)):
        x, y = next(iter(images.batches(len(images), shuffle=False)))
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:number]
        found.append((x[order], y[order]))
    return found[0], found[1]


def batches() -> list[tuple[Tensor, Tensor]]:
    (x, y), _ = digits()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=12))
    return model


def rate(step: int) -> float:
    """The factor of the learning rate at a step, as `fit` has it."""
    return learning_rate(CONFIG, step / STEPS) / CONFIG.lr


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, (x, y) = digits()
    return float((model.eval()(x).argmax(1) == y).float().mean())


@cache
def fitted() -> tuple[float, dict[str, tuple[int, ...]]]:
    """What `fit` reaches: accuracy and ranks."""
    result = bt.fit(network(), batches(), config=CONFIG, prior=PRIOR, progress=False)
    return accuracy(result.model), bt.ranks(result.model)


def assert_as_good_as_fit(model: nn.Module) -> None:
    reached, ranks = fitted()
    assert reached > 0.9
    assert abs(accuracy(model) - reached) <= 0.003
    assert bt.ranks(model) == ranks
    assert all(rank < start for own, first in zip(ranks.values(), bt.ranks(network()).values(), strict=True)
               for rank, start in zip(own, first, strict=True) if start > 1)  # fmt: skip
