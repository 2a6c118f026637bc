"""Random tensor networks, a slow and obvious prior, and a model with all kinds of weights."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from networks import NAMED, Written, random_equation, written
from torch import Tensor, nn
from torch.distributions import Gamma, Normal

from bayestrain.formats import TensorTrain
from bayestrain.formats.equation import Equation
from bayestrain.nn import TensorConv2d, TensorLayer, TensorLinear
from bayestrain.prior import RankPrior

A, B, OTHER = 1.7, 5.0, 30.0

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

EXAMPLES = {"two cores": "ax, xb -> ab", "chain": "ax, xby, ycz, zd -> abcd",
            "block term": "axs, bys, czs, xyzs -> abc", "several powers": "ax, bxy, cy, yd -> abcd"}  # fmt: skip
EQUATIONS = {**NAMED, **{name: written(text) for name, text in EXAMPLES.items()}}
EQUATIONS["20 modes"] = TensorTrain().equation((2,) * 20)
EQUATIONS |= {f"random {seed}": random_equation(seed) for seed in range(12)}


def random_network(equation: Equation, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Cores with all kinds of sizes, and log lambdas."""
    generator = torch.Generator().manual_seed(seed)
    modes = [2 + k % 2 if k < 4 else 1 for k in range(len(equation.modes))]
    ranks = [(3, 2, 4)[k % 3] for k in range(len(equation.bonds))]
    shapes = equation.shapes(modes, ranks)
    cores = [0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return cores, [torch.randn(rank, generator=generator, dtype=torch.float64) for rank in ranks]


def slow_log_prob(
    equation: Equation, cores: Sequence[Tensor], us: Sequence[Tensor], a: float = A, b: float = B, other: float = OTHER
) -> Tensor:
    """The prior entry by entry, with torch.distributions."""
    u = dict(zip(equation.bonds, us, strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for core, labels in zip(cores, equation.cores, strict=True):
        bonds = [label for label in labels if label in u]
        for index in product(*map(range, core.shape)):
            at = dict(zip(labels, index, strict=True))
            variance = torch.tensor(1.0 if bonds else other, dtype=torch.float64)
            for bond in bonds:
                variance = variance * u[bond][at[bond]].exp() ** (2 / len(bonds))
            total = total + Normal(torch.zeros_like(variance), variance.sqrt()).log_prob(core[index])
    for own in us:
        total = total + Gamma(*torch.tensor([a, b], dtype=torch.float64)).log_prob(own.exp()).sum()
    return total


def layer(text: str) -> TensorLinear:
    """A linear layer whose weight, of two modes, is this network."""
    return TensorLinear(4, 6, format=Written(written(text)), max_rank=3)


HELD = ("conv", "deep", "loop")


class Mixed(nn.Module):
    """Trains, loops, a shared bond; held layers with and without bias; frozen ones. It is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.two = TensorLinear(12, 8, in_modes=(4, 3), out_modes=(4, 2), max_rank=5)
        self.conv = TensorConv2d(8, 12, 3, max_rank=6)
        self.bn = nn.BatchNorm2d(12)
        self.deep = TensorLinear(64, 64, in_modes=(2,) * 6, out_modes=(2,) * 6, max_rank=(3, 7, 2, 5, 4), bias=False)
        self.deep_bn = nn.BatchNorm1d(64)
        self.loop = layer("xay, ybx -> ab")
        self.loop_norm = nn.LayerNorm(6)
        self.cp = layer("ar, br, r -> ab")
        self.still = TensorConv2d(12, 4, 1, max_rank=3)
        self.dense = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x  # cannot be traced: followers are those registered behind


def mixed(seed: int = 0, **options: Any) -> tuple[Mixed, RankPrior]:
    """The model in double precision with its prior: lambdas apart, some indices cut, scales that have drifted."""
    torch.manual_seed(seed)
    model = Mixed().double()
    for frozen in (*model.still.parameters(), model.dense.bias):
        frozen.requires_grad_(False)
    options = {"weight": 0.7, "warmup_steps": 0, "a": 1.3, "align_every": 0, "hold_scale": HELD, **options}
    prior = RankPrior(model, 50, **options)
    assert set(prior.held) == set(HELD)
    with torch.no_grad():
        for weight in prior.weights.values():
            state = weight.rank_state
            state.start = tuple(rank + 2 * k for k, rank in enumerate(weight.ranks))
            for u in state.log_lambdas:
                u.copy_(torch.randn_like(u))
            if weight is not model.still.factorized:
                for core in weight.cores:
                    core.mul_(1 + torch.rand(()))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model, prior


def layers(model: nn.Module) -> dict[str, TensorLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorLayer)}


class Holder(nn.Module):
    """What `functional_call` needs: the prior's functions as calls of a module."""

    def __init__(self, model: nn.Module, prior: RankPrior) -> None:
        super().__init__()
        self.model, self.prior = model, prior

    def forward(self, what: str) -> Tensor:
        if what == "step":
            self.prior.step()
            return torch.zeros(())
        return getattr(self.prior, what)()
