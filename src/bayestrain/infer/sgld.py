"""Stochastic gradient Langevin dynamics (Welling & Teh 2011): gradient ascent with the noise that makes it a sampler.

::

    theta += lr * grad log p(theta) + sqrt(2 * lr * temperature) * noise          (lr is half of the paper's epsilon)

Every particle is a Markov chain of its own, and its last state is kept. The step may be preconditioned by the running
size of the gradients as in RMSprop (Li et al. 2016, without the preconditioner's derivative, as they recommend).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.method import Method
from bayestrain.infer.particles import Spread

WINDOW = 2  # the preconditioner is a mean over at least half of all steps: one that follows the chain widens it


class SGLD(Method):
    """Langevin chains in parallel; arguments as for `Method`, with `lr` and a seed instead of an optimiser.

    Args:
        lr: step size on the scaled log density; sampling is exact only in the limit of small steps.
        temperature: 1 samples the density itself, a lower temperature a sharper one.
        memory: decay rate of the preconditioner at first (0.99 suits networks), and later it remembers half of all
            steps; 0 switches it off.
        seed: of the noise.
    """

    name = "sgld"
    options = frozenset({"lr", "temperature", "memory", "seed", "clip"})
    optimizer: "Langevin"

    def __init__(
        self, *args: Any, lr: float = 1e-3, temperature: float = 1.0, memory: float = 0.0, seed: int = 0, **options: Any
    ) -> None:
        if not (lr > 0 and temperature >= 0 and 0 <= memory < 1):
            got = f"got lr={lr}, temperature={temperature}, memory={memory}"
            raise ConfigError(f"lr must be positive, temperature at least 0 and memory in [0, 1), {got}.")
        noise = temperature * options.get("scale", 1.0)  # because the gradients are scaled
        settings = {"lr": lr, "temperature": noise, "memory": memory, "seed": seed, "step": 0}
        super().__init__(*args, optimizer=partial(Langevin, defaults=settings), **options)  # type: ignore[misc]

    def direction(self, theta: Tensor, gradients: Tensor, alive: Tensor) -> Tensor:  # noqa: ARG002
        self.optimizer.alive, self.optimizer.spread = alive, self.spread
        return gradients


class Langevin(torch.optim.Optimizer):
    """Gradient descent for the particles that are `alive`, with noise that the seed and the step's number determine."""

    alive: Tensor
    spread: Spread

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            lr, memory = group["lr"], group["memory"]
            generator = torch.Generator(self.alive.device).manual_seed(group["seed"] * 1_000_003 + group["step"])
            group["step"] += 1
            for p in group["params"]:
                shape = self.spread.total, *p.shape[1:]
                noise = torch.randn(shape, generator=generator, device=p.device, dtype=p.dtype)[self.spread.own]
                noise.mul_((2 * lr * group["temperature"]) ** 0.5)
                noise.masked_fill_(~self.alive.view(-1, *[1] * (p.ndim - 1)), 0.0)
                if not memory:
                    p.add_(p.grad, alpha=-lr).add_(noise)
                    continue
                state = self.state[p]
                mean_square = state.setdefault("mean_square", torch.zeros_like(p))
                state["age"] = age = state.get("age", 0) + 1
                mean_square.lerp_(p.grad.square(), max(1 / age, min(1 - memory, WINDOW / age)))
                size = mean_square.sqrt().add_(1e-8)
                p.addcdiv_(p.grad, size, value=-lr).add_(noise.div_(size.sqrt_()))
