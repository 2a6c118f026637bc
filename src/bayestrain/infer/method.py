"""What all inference methods share: particles, an optimiser that moves them, and a state that can be saved."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError, check_counts
from bayestrain.infer.particles import Particles, Spread, count, flatten, unflatten

Gradients = Callable[[Particles, Any], tuple[Tensor, dict[str, Tensor]]]
"""``gradients(particles, batch) -> (log densities (n,), {name: gradient (n, ...)})``, see `value_and_grad`."""

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""Takes named tensors, as every torch optimiser does."""

LOOK_EVERY = 50  # steps between checks for broken particles where reading a value would stall the queue


def value_and_grad(log_density: Callable[[dict[str, Tensor], Any], Tensor]) -> Gradients:
    """Return the function that computes a log density ``(particles, batch) -> (n,)`` and its gradients."""

    def gradients(particles: Particles, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        n, leaves = count(particles), {name: t.detach().requires_grad_() for name, t in particles.items()}
        with torch.enable_grad():
            value = log_density(leaves, batch)
            if value.shape != (n,):
                raise ShapeError(
                    f"log_density must return one number per particle, shape ({n},), got {tuple(value.shape)}."
                )
            found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return value.detach(), dict(zip(leaves, found, strict=True))

    return gradients


class StepInfo(NamedTuple):
    """Per particle, before it moved: its log density, and whether its density, gradient and weights are finite."""

    log_density: Tensor
    alive: Tensor


class Method:
    """Move n particles along a direction made of the gradients of their log densities.

    A step is ``theta_k += lr * scale * direction_k``, taken by any torch optimiser. Here the direction is the gradient
    ``grad log p(theta_k)`` itself; a subclass overrides `direction`.

    Args:
        gradients: computes log densities and gradients for particles and a batch: ``value_and_grad(log_density)``.
        particles: where they start; copied.
        optimizer: makes the optimiser from named tensors.
        scale: factor on the direction. With ``1 / number of data``, learning rates are those of mean losses.
        clip: largest norm of a particle's scaled direction; None does not clip.
        spread: how the particles are spread over processes, if these are only those of one.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset({"optimizer", "clip"})
    """The arguments that a user may choose."""
    fewest: ClassVar[int] = 1

    def __init__(
        self,
        gradients: Gradients,
        particles: Particles,
        optimizer: MakeOptimizer,
        *,
        scale: float = 1.0,
        clip: float | None = None,
        spread: Spread | None = None,
    ) -> None:
        self.spread = spread or Spread(count(particles))
        self.check_number(self.spread.total)
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip must be positive, got {clip}. Use None not to clip.")
        self.gradients, self.scale, self.clip, self.steps = gradients, scale, clip, 0
        own = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in particles.items()}
        self.particles = {name: tensor.requires_grad_() for name, tensor in own.items()}
        self.optimizer = optimizer(list(self.particles.items()))
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates its loss several times per step, which particles do not. Use Adam.")
        self.broken = torch.zeros(count(own), dtype=torch.int64, device=next(iter(own.values())).device)
        """How many steps in a row each particle was not finite."""
        self._warned: set[int] = set()

    @classmethod
    def check_number(cls, n: int) -> None:
        if n < cls.fewest:
            raise ConfigError(f"{cls.name} needs at least {cls.fewest} particle(s), got {n}.")

    def __len__(self) -> int:
        return len(self.broken)

    def direction(self, theta: Tensor, gradients: Tensor, alive: Tensor) -> Tensor:  # noqa: ARG002
        """Return the direction ``(n, D)``; `gradients` are zero where not `alive`; both matrices may be overwritten."""
        return gradients

    def step(self, batch: Any) -> StepInfo:
        """Move every particle once; one whose gradient is not finite receives none, with a warning."""
        info = self.advance(batch)
        self.count_step()
        return info

    def advance(self, batch: Any) -> StepInfo:
        """Do the work of `step` without reading a value, so that it can be captured in a CUDA graph."""
        values, gradients = self.gradients(self.particles, batch)
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            theta, rows = flatten(self.particles), flatten(gradients)
            del gradients
            # A norm is finite only if all numbers in it are, and needs no second matrix, as isfinite would.
            alive = values.isfinite() & rows.norm(dim=1).isfinite() & theta.norm(dim=1).isfinite()
            move = self.direction(theta, rows.masked_fill_(~alive[:, None], 0.0), alive)
            move.mul_(-self.scale)  # optimisers descend
            if self.clip is not None:
                move.mul_((self.clip / move.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0))
            for name, part in unflatten(move, self.particles).items():
                self.particles[name].grad = part.contiguous()
            self.broken.add_(1).masked_fill_(alive, 0)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepInfo(values, alive)

    def count_step(self) -> None:
        """Do the rest of `step`: count it, occasionally warn once about each broken particle; raise if all are."""
        self.steps += 1
        if self.broken.device.type != "cpu" and self.steps % LOOK_EVERY:
            return
        broken = self.broken.nonzero().flatten().tolist()
        if len(broken) == len(self):
            raise TrainingError(
                "No particle has a finite log density and gradient. Try a smaller learning rate, and look for a "
                "logarithm of zero or a division by zero."
            )
        for i in set(broken) - self._warned:
            self._warned.add(i)
            warnings.warn(
                f"Particle {i} of {len(self)} has a log density or gradient that is not finite. It gets no gradient in "
                "such steps; the others continue. Try a smaller learning rate, or another start for it.",
                ParticleWarning,
                stacklevel=2,
            )

    @torch.no_grad()
    def keep_(self, indices: Sequence[int]) -> None:
        """Keep only these particles, with their optimiser state."""
        spread = Spread(len(set(indices)), self.spread.group, self.broken.device)
        self.check_number(spread.total)
        if not min(spread.counts):
            raise TrainingError("All particles of one process are broken. Try a smaller learning rate.")
        self.spread = spread
        chosen, before = torch.tensor(indices, device=self.broken.device), len(self)
        for tensor in self.particles.values():
            state = self.optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and len(value) == before:
                    state[key] = value[chosen]
            tensor.data = tensor.detach()[chosen]
        self.broken, self._warned = self.broken[chosen], set()

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on."""
        return {
            "method": self.name,
            "particles": {name: tensor.detach() for name, tensor in self.particles.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "broken": self.broken,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless `load_state_dict` and a step after it succeed: both are tried on a copy."""
        zeros = value_and_grad(lambda leaves, _: next(iter(leaves.values())).reshape(len(self), -1).sum(1) * 0)
        trial = copy.deepcopy(self, {id(self.gradients): zeros})
        vars(trial.optimizer).update({**vars(self.optimizer), **vars(trial.optimizer)})  # what is not copied
        try:
            trial._restore(state)
            check_counts(**{"steps + 1": trial.steps + 1})
            trial.advance(None)
        except Exception as error:  # an optimiser can raise anything
            raise ConfigError(f"The saved state does not fit this method: {error!r}.") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the particles take the shapes they find. Checks come before any change."""
        self.check_state(state)
        self._restore(state)

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Any]) -> None:
        for what, here, saved in (
            ("method", self.name, state["method"]),
            ("tensors", sorted(self.particles), sorted(state["particles"])),
            ("number of particles", len(self), count(state["particles"])),
        ):
            if here != saved:
                raise ConfigError(f"the {what} must agree, but it has {saved}, this method {here}")
        for name, tensor in self.particles.items():
            tensor.data = tensor.new_empty(state["particles"][name].shape).copy_(state["particles"][name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])
        self.broken.copy_(state["broken"])


class Ensemble(Method):
    """Particles that climb the log density and do not interact: a deep ensemble (Lakshminarayanan 2017); one is MAP."""

    name = "ensemble"


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimiser's state, perhaps from another device: options that depend on the device stay as they are."""
    restored = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        here: dict[str, Any] = {key: own[key] for key in ("capturable", "fused", "foreach") if key in own}
        lr = float(saved["lr"])
        here["lr"] = torch.full_like(own["lr"], lr) if isinstance(own["lr"], Tensor) else lr
        restored.append({**saved, **here})
    # Torch would share the saved moments with this optimiser, which changes them in place.
    optimizer.load_state_dict({"state": copy.deepcopy(state["state"]), "param_groups": restored})
