"""Hamiltonian Monte Carlo (Neal 2011), the reference for small networks; every particle is a Markov chain of its own.

A step draws momentum ``r`` from Normal(0, 1), follows the dynamics of ``log p(theta) - |r|^2 / 2`` by leapfrogs::

    r += lr / 2 * grad log p(theta);   theta += lr * r;   r += lr / 2 * grad log p(theta)

and keeps the end with probability ``min(1, exp(gain in log p(theta) - |r|^2 / 2))``, so that discretisation costs
acceptance and does not bias the samples. The density must be that of *all* data: give every step the same batch.
During `warmup` the step size is adapted to an acceptance of 0.8 by dual averaging (Hoffman & Gelman 2014).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, check_counts
from bayestrain.infer.method import Method, StepInfo
from bayestrain.infer.particles import flatten, unflatten

ACCEPTANCE = 0.8
SHRINK, OFFSET, DECAY = 0.05, 10, 0.75  # Hoffman & Gelman's gamma, t_0 and kappa


class HMC(Method):
    """Hamiltonian Monte Carlo chains in parallel; arguments as for `Method`, with these instead of an optimiser.

    Args:
        lr: size of a leapfrog on the log density itself, to begin with.
        leapfrogs: most leapfrogs of a step; their number is drawn, so that no chain can go in circles.
        warmup: steps during which `lr` is adapted; discard what the chains were before.
        seed: of momentum, lengths and acceptance.
    """

    name = "hmc"
    options = frozenset({"lr", "leapfrogs", "warmup", "seed"})
    optimizer: "Trajectory"

    def __init__(
        self, *args: Any, lr: float = 1e-2, leapfrogs: int = 20, warmup: int = 100, seed: int = 0, **options: Any
    ) -> None:
        check_counts(leapfrogs=leapfrogs)
        if not (lr > 0 and warmup >= 0):
            raise ConfigError(f"lr must be positive and warmup at least 0, got lr={lr}, warmup={warmup}.")
        own = {"leapfrogs": leapfrogs, "warmup": warmup, "seed": seed, "step": 0, "acceptance": 0.0}
        own |= {"lr": lr, "start": lr, "miss": 0.0, "average": math.log(lr)}
        super().__init__(*args, optimizer=partial(Trajectory, defaults=own), **options)  # type: ignore[misc]
        if self.spread.group is not None:
            raise ConfigError("HMC adapts one step size to all chains, so it runs in one process. Use sgld.")

    def advance(self, batch: Any) -> StepInfo:
        (group,) = self.optimizer.param_groups
        generator = torch.Generator().manual_seed(group["seed"] * 1_000_003 + group["step"])
        length = int(torch.randint(1, group["leapfrogs"] + 1, (), generator=generator))
        start, lr = flatten(self.particles), group["lr"]
        values, slope = self._at(start, batch)
        alive = values.isfinite() & slope.norm(dim=1).isfinite() & start.norm(dim=1).isfinite()
        momentum = torch.randn(start.shape, generator=generator, dtype=start.dtype).to(start.device)
        uniform = torch.rand(len(start), generator=generator, dtype=torch.float64).to(start.device)
        before, theta, reached = values.double() - _kinetic(momentum), start, values
        momentum = momentum + lr / 2 * slope
        for leap in range(1, length + 1):
            theta = theta + lr * momentum
            reached, slope = self._at(theta, batch)
            momentum = momentum + (lr / 2 if leap == length else lr) * slope
        gain = reached.double() - _kinetic(momentum) - before
        chance = torch.where(alive, gain.exp().clamp_max(1.0), 0.0).nan_to_num(0.0)
        self._put(torch.where((uniform < chance)[:, None], theta, start))
        self.broken.add_(1).masked_fill_(alive, 0)
        self.optimizer.adapt(float(chance.sum() / alive.sum().clamp_min(1)))
        return StepInfo(values, alive)

    def _at(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """The log densities at these rows, and their gradients; the particles are there now."""
        self._put(theta)
        values, gradients = self.gradients(self.particles, batch)
        return values, flatten(gradients)

    @torch.no_grad()
    def _put(self, theta: Tensor) -> None:
        for name, part in unflatten(theta, self.particles).items():
            self.particles[name].copy_(part)


class Trajectory(torch.optim.Optimizer):
    """Holds the step size, and adapts it to the acceptance."""

    def adapt(self, chance: float) -> None:
        (group,) = self.param_groups
        group["step"] += 1
        t, group["acceptance"] = group["step"], chance
        if t > group["warmup"]:
            return
        group["miss"] += (ACCEPTANCE - chance - group["miss"]) / (t + OFFSET)
        log = math.log(10 * group["start"]) - group["miss"] * math.sqrt(t) / SHRINK
        group["average"] += (log - group["average"]) * t**-DECAY
        group["lr"] = math.exp(group["average"] if t == group["warmup"] else log)


def _kinetic(momentum: Tensor) -> Tensor:
    return 0.5 * momentum.double().square().sum(1)
