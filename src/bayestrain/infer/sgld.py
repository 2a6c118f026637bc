"""Stochastic gradient Langevin dynamics: gradient ascent with just as much noise as makes it sample.

A step is ``theta += lr * g + sqrt(2 * lr * temperature) * noise`` (Welling & Teh 2011, with lr for their epsilon / 2):
every particle is a Markov chain of its own, and what is kept are the chains' last states. Networks have gradients of
very different sizes, so the step may be preconditioned by their running size as in RMSprop (Li et al. 2016, without
the term in the preconditioner's derivative, as they recommend).
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.infer.method import LogDensity, Method
from bayestrain.infer.particles import Particles


class Langevin(torch.optim.Optimizer):
    """The optimiser that adds the noise. `scale` is the factor that the gradients were multiplied by."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        lr: float,
        temperature: float,
        scale: float,
        memory: float,
        seed: int,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.temperature, self.scale, self.memory = temperature, scale, memory
        first = self.param_groups[0]["params"][0]
        self.generator = torch.Generator(first.device).manual_seed(seed)
        self.alive: Tensor | None = None
        """Which particles get noise; all if None."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move along the gradients, plus noise."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.generator, device=p.device, dtype=p.dtype)
                noise.mul_((2 * group["lr"] * self.temperature * self.scale) ** 0.5)
                if self.alive is not None:
                    noise.masked_fill_(~self.alive.view(-1, *[1] * (p.ndim - 1)), 0.0)
                if self.memory:
                    state = self.state[p]
                    mean_square = state.setdefault("mean_square", torch.zeros_like(p))
                    mean_square.mul_(self.memory).addcmul_(p.grad, p.grad, value=1 - self.memory)
                    state["age"] = state.get("age", 0) + 1
                    size = (mean_square / (1 - self.memory ** state["age"])).sqrt_().add_(1e-8)
                    p.addcdiv_(p.grad, size, value=-group["lr"]).add_(noise.div_(size.sqrt_()))
                else:
                    p.add_(p.grad, alpha=-group["lr"]).add_(noise)
        return loss


class SGLD(Method):
    """Langevin chains side by side; arguments as for `Method`, but `lr` and the seed instead of an optimiser.

    Args:
        lr: step size on the scaled log density; an exact sampler only in the limit of small steps.
        temperature: 1 samples the density itself, less a sharper one.
        memory: how slowly the preconditioner forgets (0.99 suits networks); 0 switches it off.
    """

    name: ClassVar[str] = "sgld"

    def __init__(
        self,
        log_density: LogDensity,
        particles: Particles,
        lr: float = 1e-3,
        *,
        temperature: float = 1.0,
        memory: float = 0.0,
        seed: int = 0,
        scale: float = 1.0,
        **options: Any,
    ) -> None:
        if not (lr > 0 and temperature >= 0 and 0 <= memory < 1):
            raise ConfigError(
                "lr must be positive, temperature not negative and memory in [0, 1), "
                f"got lr={lr}, temperature={temperature}, memory={memory}."
            )

        def make(named: list[tuple[str, Tensor]]) -> Langevin:
            return Langevin(named, lr, temperature, scale, memory, seed)

        super().__init__(log_density, particles, make, scale=scale, **options)

    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:  # noqa: ARG002
        """The gradient is the direction; the noise comes with the step, for those who take it."""
        assert isinstance(self.optimizer, Langevin)
        self.optimizer.alive = alive

    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self.optimizer, Langevin)
        return {**super().state_dict(), "noise": self.optimizer.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert isinstance(self.optimizer, Langevin)
        self.optimizer.generator.set_state(state["noise"])
