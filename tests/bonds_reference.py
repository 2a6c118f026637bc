"""The prior of one layer after the other, written from the formulas of `shrinkage`, and a model to compare on."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import bayestrain as bt
from bayestrain import gauge, shrinkage, tt
from bayestrain.layers import TTConv2d, TTLayer, TTLinear
from bayestrain.prior import ALIGN_SWEEPS
from bayestrain.sizes import tt_layers

NUM_DATA = 50
HELD = ("conv", "deep", "still")
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Mixed(nn.Module):
    """Layers of two to six cores with all kinds of ranks; held ones with and without bias; never called."""

    def __init__(self) -> None:
        super().__init__()
        self.two = TTLinear(12, 8, in_modes=(4, 3), out_modes=(4, 2), max_rank=5)
        self.three = TTLinear(12, 8, in_modes=(3, 2, 2), out_modes=(2, 2, 2), max_rank=(4, 2), bias=False)
        self.conv = TTConv2d(8, 12, 3, max_rank=6)
        self.bn = nn.BatchNorm2d(12)
        self.deep = TTLinear(64, 64, in_modes=(2,) * 6, out_modes=(2,) * 6, max_rank=(3, 7, 2, 5, 4))
        self.deep_bn = nn.BatchNorm1d(64)
        self.still = TTConv2d(12, 4, 1, max_rank=3)
        self.still_bn = nn.BatchNorm2d(4)
        self.dense = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # cannot be traced: batch norms are found by registration, for layers that are named
            return x
        return -x


def mixed(seed: int = 0, **options: Any) -> tuple[Mixed, bt.RankPrior]:
    """The model in double precision with a prior, lambdas apart from each other, and scales that have drifted."""
    torch.manual_seed(seed)
    model = Mixed().double()
    for core in model.still.cores:
        core.requires_grad_(False)
    model.dense.bias.requires_grad_(False)
    options = {"weight": 0.7, "a": 1.3, "align_every": 0, "hold_scale": HELD, **options}
    prior = bt.RankPrior(model, NUM_DATA, **options)
    with torch.no_grad():
        for layer in prior.layers.values():
            layer.rank_state.started_with = tuple(rank + 2 * k for k, rank in enumerate(layer.ranks[1:-1]))
            for u in layer.rank_state.log_lambdas:
                u.copy_(torch.randn_like(u))
            for core in layer.cores:
                core.mul_(1 + torch.rand(()))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    assert set(prior.held) == set(HELD)
    return model, prior


# --- one layer after the other ----------------------------------------------------------------------------------------


def slow_log_prob(model: nn.Module, prior: bt.RankPrior) -> Tensor:
    total, deviation = torch.tensor([0.0, math.sqrt(prior.other_variance)], dtype=torch.float64)
    cores: set[int] = set()
    for layer in tt_layers(model).values():
        state = layer.rank_state
        total = total + shrinkage.log_prob(list(layer.cores), state.log_lambdas, prior.a, prior.b, state.dropped)
        cores |= {id(core) for core in layer.cores}
    for name, parameter in model.named_parameters():
        if name in prior.trainable and id(parameter) not in cores:
            total = total + Normal(torch.zeros_like(deviation), deviation).log_prob(parameter).sum()
    return total


@torch.no_grad()
def slow_hold(layer: TTLayer, norms: list[nn.Module]) -> None:
    state, cores = layer.rank_state, list(layer.cores)
    size = tt.norm(cores)
    if state.held_norm == 0:
        state.held_norm.copy_(size)
    factor = state.held_norm / size if size > 0 else torch.ones_like(size)
    per_core = factor ** (1 / len(cores))
    for core in cores:
        core.mul_(per_core)
    for u in state.log_lambdas:
        u.add_(per_core.log())
    if layer.bias is not None:
        layer.bias.mul_(factor)
    for norm in norms:
        norm.running_mean.mul_(factor)
        norm.running_var.mul_(factor**2)


@torch.no_grad()
def slow_sweep(layer: TTLayer, prior: bt.RankPrior, update: str) -> None:
    """The odd bonds one by one, then the even ones."""
    cores, us, gone = list(layer.cores), layer.rank_state.log_lambdas, layer.rank_state.dropped
    energies = shrinkage.slice_energies(cores)
    sizes = [core.numel() // energy.numel() for core, energy in zip(cores, energies, strict=True)]
    for bond in [*range(1, len(cores), 2), *range(2, len(cores), 2)]:
        terms = shrinkage.conditional(energies, sizes, us, bond, prior.a, gone)
        if update == "newton":
            moved = shrinkage.newton_step(us[bond - 1], *terms, prior.b)
        else:
            moved = shrinkage.gradient_step(us[bond - 1], *terms, prior.b, prior.rate)
        us[bond - 1].copy_(shrinkage.apply_floor(moved, prior.floor))


@torch.no_grad()
def slow_step(model: nn.Module, prior: bt.RankPrior, align: bool = False) -> None:
    """Every layer for itself: its scale, its alignment with some sweeps of Newton steps, then its lambda."""
    names = dict(model.named_parameters())
    for name, layer in tt_layers(model).items():
        trained = all(names[f"{name}.cores.{k}"].requires_grad for k in range(len(layer.cores)))
        if trained and name in prior.held:
            slow_hold(layer, [norm for norm in prior.held[name] if norm.running_mean is not None])
        if trained and align:
            layer.set_cores(gauge.align(list(layer.cores)))
            for _ in range(ALIGN_SWEEPS):
                slow_sweep(layer, prior, "newton")
        slow_sweep(layer, prior, prior.update)


def assert_same(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    theirs = other.state_dict()
    close = {"rtol": tolerance, "atol": tolerance}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs[name], **close, msg=lambda text, name=name: f"{name}: {text}")
