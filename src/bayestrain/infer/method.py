"""What all inference methods share: particles, an optimiser that moves them, and a state that can be saved."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer.particles import Particles, count, flatten, unflatten

LogDensity = Callable[[dict[str, Tensor], Any], Tensor]
"""``log_density(particles, batch) -> (n,)``: one differentiable log density per particle, up to a constant."""

Gradients = Callable[[Particles, Any], tuple[Tensor, dict[str, Tensor]]]
"""``gradients(particles, batch) -> (log densities (n,), {name: gradient (n, ...)})``, see `value_and_grad`."""

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""Takes named tensors, as every torch optimiser does."""

LOOK_EVERY = 50
"""Steps between checks for broken particles on a device where reading a value would stall the queue."""


def value_and_grad(log_density: LogDensity) -> Gradients:
    """Return the function that computes a log density of particles and its gradients."""

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


@dataclass(frozen=True)
class StepInfo:
    """Per particle, before it moved: its log density, and whether its density, gradient and weights are finite."""

    log_density: Tensor
    alive: Tensor


class Method:
    """Move n particles along a direction made of the gradients of their log densities.

    A step is ``theta_k += lr * scale * direction_k``, taken by any torch optimiser. Here the direction is the gradient
    ``grad log p(theta_k)`` itself; a subclass overrides `direction`.

    Args:
        gradients: computes log densities and gradients for particles and a batch: ``value_and_grad(log_density)``.
        particles: where they start, ``{name: (n, ...)}``; copied.
        optimizer: makes the optimiser from named tensors.
        scale: factor on the direction. With ``1 / number of data``, learning rates are those of mean losses.
        clip: largest norm of a particle's scaled direction; None does not clip.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset({"optimizer", "clip"})
    """The arguments that a user may choose."""
    fewest: ClassVar[int] = 1
    most: ClassVar[int | None] = None
    advice: ClassVar[str] = ""

    def __init__(
        self,
        gradients: Gradients,
        particles: Particles,
        optimizer: MakeOptimizer,
        *,
        scale: float = 1.0,
        clip: float | None = None,
    ) -> None:
        n = count(particles)
        self.check_number(n)
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip must be positive, got {clip}. Use None not to clip.")
        self.gradients, self.scale, self.clip, self.steps = gradients, scale, clip, 0
        self.particles = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for name, tensor in particles.items()
        }
        self.optimizer = optimizer(list(self.particles.items()))
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates its loss several times per step, which particles do not. Use Adam.")
        self.broken = torch.zeros(n, dtype=torch.int64, device=next(iter(self.particles.values())).device)
        """How many steps in a row each particle was not finite."""
        self._warned: set[int] = set()

    @classmethod
    def check_number(cls, n: int) -> None:
        """Raise `ConfigError` unless the method works with n particles."""
        if n < cls.fewest or (cls.most is not None and n > cls.most):
            bound = f"at least {cls.fewest}" if n < cls.fewest else f"at most {cls.most}"
            raise ConfigError(f"{cls.name} needs {bound} particle(s), got {n}. {cls.advice}".strip())

    def __len__(self) -> int:
        return len(self.broken)

    def direction(self, theta: Tensor, gradients: Tensor, alive: Tensor) -> Tensor:  # noqa: ARG002
        """Return the direction of motion; the matrices may be changed in place.

        Args:
            theta: the particles as rows ``(n, D)``.
            gradients: of the log density, likewise.
            alive: ``(n,)``; gradients of particles that are not alive are zero.
        """
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
            theta, rows = flatten(self.particles), flatten(gradients)  # (n, D) each
            del gradients
            # A norm is finite only if all numbers in it are, and needs no second matrix, as isfinite would.
            alive = values.isfinite() & _norms(rows).isfinite() & _norms(theta).isfinite()
            move = self.direction(theta, rows.masked_fill_(~alive[:, None], 0.0), alive)
            move.mul_(-self.scale)  # optimisers descend
            if self.clip is not None:
                move.mul_((self.clip / _norms(move).clamp_min(1e-30)).clamp_max(1.0)[:, None])
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
                "No particle has a finite log density and gradient. Try a smaller learning rate, and look for a log of "
                "zero or a division by zero in the model or the likelihood."
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
        self.check_number(len(set(indices)))
        chosen, before = torch.tensor(indices, device=self.broken.device), len(self)
        for tensor in self.particles.values():
            state = self.optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and len(value) == before:
                    state[key] = value.index_select(0, chosen)
            tensor.data = tensor.detach().index_select(0, chosen)
        self.broken, self._warned = self.broken.index_select(0, chosen), set()

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
        """Raise unless `load_state_dict` would succeed."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ConfigError(f"This is no state of an inference method: {missing} is missing. Pass a state_dict().")
        if state["method"] != self.name:
            raise ConfigError(f"This is a state of {state['method']!r} and cannot be resumed by {self.name!r}.")
        if state["particles"].keys() != self.particles.keys():
            raise ShapeError("The saved particles do not have the names of those here.")
        if {len(state["broken"]), count(state["particles"])} != {len(self)}:
            raise ShapeError(f"The saved state has {len(state['broken'])} particles, this one {len(self)}.")
        form = [
            [(len(group["params"]), group.keys() - {"param_names"}) for group in groups]
            for groups in (self.optimizer.param_groups, state["optimizer"]["param_groups"])
        ]
        if form[0] != form[1]:
            raise ConfigError("The saved optimiser differs in kind or parameter groups from this one. Make the same.")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the particles take the shapes they find. Checks come before any change."""
        self.check_state(state)
        for name, tensor in self.particles.items():
            tensor.data = tensor.new_empty(state["particles"][name].shape).copy_(state["particles"][name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])
        self.broken.copy_(state["broken"])


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


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
