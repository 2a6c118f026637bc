"""What all inference methods share: gradients of the particles, an optimiser, and a state that can be saved."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer.particles import Particles, count, groups, matrices, matrix, parts

LogDensity = Callable[[dict[str, Tensor], Any], Tensor]
"""``log_density(particles, batch) -> (n,)``: one differentiable log density per particle, up to a constant."""

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""Called with names and tensors, which every torch optimiser takes as they are."""

LOOK_EVERY = 50
"""Steps between looks at broken particles where a look makes the processor wait for the device."""


@dataclass(frozen=True)
class StepInfo:
    """What one step saw, per particle, before it moved: the log density, and whether all about it is finite."""

    log_density: Tensor
    alive: Tensor


class Method(ABC):
    """n particles and how they move.

    Args:
        log_density: called with stacked particles (perhaps only some of them) and a batch.
        log_prior: a part of the log density that needs no batch and little memory, added to it: called once with all
            particles where `log_density` is called chunk by chunk.
        particles: where they start, ``{name: (n, ..)}``; copied.
        optimizer: makes any torch optimiser for a list of named tensors; the direction to climb is handed to it.
        carried: stacked tensors that belong to particles but are not moved by gradients; `log_density` gets them among
            the particles and may change them in place.
        scale: factor on the direction, for example ``1 / number of data`` to use learning rates known from mean losses.
        chunk: how many particles go through `log_density` at once; all if None. Changes memory, not results.
        clip: largest norm of a particle's scaled direction; None does not clip.
    """

    name: ClassVar[str]
    fewest: ClassVar[int] = 1
    advice: ClassVar[str] = ""

    def __init__(
        self,
        log_density: LogDensity,
        particles: Particles,
        optimizer: MakeOptimizer,
        *,
        log_prior: Callable[[dict[str, Tensor]], Tensor] | None = None,
        carried: dict[str, Tensor] | None = None,
        scale: float = 1.0,
        chunk: int | None = None,
        clip: float | None = None,
    ) -> None:
        self.n = count(particles)
        if self.n < self.fewest:
            raise ConfigError(
                f"{self.name} needs at least {self.fewest} particles, got {self.n}. {self.advice}".strip()
            )
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip is a largest norm and must be positive, got {clip}. None does not clip.")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk is a number of particles and must be at least 1, got {chunk}.")
        self.log_density, self.log_prior = log_density, log_prior
        self.particles = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for name, tensor in particles.items()
        }
        self.carried = {} if carried is None else carried
        if self.carried and count(self.carried) != self.n:
            raise ShapeError(f"There are {self.n} particles but carried tensors for {count(self.carried)}.")
        self.scale = scale
        self.chunk = chunk
        self.clip = clip
        self.optimizer = optimizer(list(self.particles.items()))
        refuse_lbfgs(self.optimizer)
        self.steps = 0
        self._broken = torch.zeros(self.n, dtype=torch.int64, device=next(iter(self.particles.values())).device)
        self._all_broken = torch.zeros((), dtype=torch.bool, device=self._broken.device)
        self._warned: set[int] = set()

    @abstractmethod
    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """Turn the gradients of the log density, in place, into the direction in which particles move.

        They come as matrices ``(n, columns)``, those that ``matrices(self.particles)`` are the weights of.
        """

    def step(self, batch: Any) -> StepInfo:
        """Move every particle once. One whose gradient is not finite gets no push this time, and a warning names it."""
        info = self.advance(batch)
        self.count_step()
        return info

    def advance(self, batch: Any) -> StepInfo:
        """The work of `step` and nothing that looks at a value: it can be captured in a CUDA graph."""
        values, gradients = self.gradients(batch)
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            together = groups(self.particles)
            moves = [matrix([gradients.pop(name) for name in names]) for names in together]
            alive = values.isfinite()
            for norms in map(_norms, chain(moves, matrices(self.particles))):
                alive = alive & norms.isfinite()
            for move in moves:
                move.masked_fill_(~alive[:, None], 0.0)
            self.direction_(moves, alive)
            factor = torch.full((self.n,), -self.scale, dtype=values.dtype, device=values.device)  # optimisers descend
            if self.clip is not None:
                length = torch.linalg.vector_norm(torch.stack(list(map(_norms, moves))), dim=0) * self.scale
                factor = factor * (self.clip / length.clamp_min(1e-30)).clamp_max(1.0)
            for names in together:
                move = moves.pop(0)  # so that no more than a group is there twice
                move.mul_(factor.to(move.dtype)[:, None])
                moved = [self.particles[name] for name in names]
                for tensor, part in zip(moved, parts(move, moved), strict=True):
                    tensor.grad = part
            self._broken += ~alive
            self._all_broken.copy_(~alive.any())
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepInfo(values, alive)

    def count_step(self) -> None:
        """The rest of `step`: count, and look at broken particles now and then."""
        self.steps += 1
        if self._broken.device.type == "cpu" or self.steps % LOOK_EVERY == 0:
            self._look()

    def gradients(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """``(log densities (n,), {name: gradient (n, ..)})``, chunk by chunk."""
        size = self.n if self.chunk is None else min(self.chunk, self.n)
        before: Tensor | None = None
        gradients: dict[str, Tensor] = {}
        if self.log_prior is not None:
            before, found = self._gradients(slice(0, self.n), self.log_prior)
            gradients = self._whole(found)
        values: list[Tensor] = []
        for start in range(0, self.n, size):
            part = slice(start, min(start + size, self.n))
            value, found = self._gradients(part, lambda tensors: self.log_density(tensors, batch))
            values.append(value)
            if size == self.n and before is None:
                gradients = self._whole(found)
                continue
            if before is None and not gradients:
                gradients = {name: torch.zeros_like(tensor) for name, tensor in self.particles.items()}
            if found:
                torch._foreach_add_([gradients[name][part] for name in found], list(found.values()))
        joined = torch.cat(values)
        return joined if before is None else joined + before, gradients

    def _gradients(
        self, part: slice, density: Callable[[dict[str, Tensor]], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Values and gradients of a density for some of the particles; none of tensors that it does not depend on."""
        leaves = {name: tensor.detach()[part].requires_grad_() for name, tensor in self.particles.items()}
        value = density({**leaves, **{name: tensor[part] for name, tensor in self.carried.items()}})
        number = part.stop - part.start
        if value.shape != (number,):
            raise ShapeError(
                f"log_density must return one number per particle, shape ({number},), got {tuple(value.shape)}."
            )
        found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        named = zip(leaves, found, strict=True)
        return value.detach(), {name: gradient for name, gradient in named if gradient is not None}

    def _whole(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of all tensors, to be changed in place."""
        return _apart({
            name: found[name] if name in found else torch.zeros_like(tensor) for name, tensor in self.particles.items()
        })  # fmt: skip

    def set_lr(self, lr: float) -> None:
        """Change the optimiser's learning rate."""
        set_lr(self.optimizer, lr)

    def restart_optimizer(self) -> None:
        """Forget what the optimiser remembers of past gradients; it and its learning rate stay."""
        self.optimizer.state.clear()

    @torch.no_grad()
    def keep_(self, indices: Sequence[int]) -> None:
        """Go on with these particles only."""
        if not len(set(indices)) == len(indices) >= self.fewest:
            raise ConfigError(f"{self.name} needs at least {self.fewest} different particles, got {list(indices)}.")
        chosen = torch.tensor(indices, device=self._broken.device)
        for tensor in self.particles.values():
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.shape == tensor.shape:
                    self.optimizer.state[tensor][key] = value.index_select(0, chosen)
            tensor.data = tensor.detach().index_select(0, chosen)
        for name, tensor in self.carried.items():
            self.carried[name] = tensor.index_select(0, chosen)
        self._broken = self._broken.index_select(0, chosen)
        self._warned, self.n = set(), len(chosen)

    def _look(self) -> None:
        """Name the particles that have sat out a step; there is nothing to go on with when all sit out one."""
        broken = (self._broken > 0).nonzero().flatten().tolist()
        if bool(self._all_broken):
            raise TrainingError(
                "No particle has a finite log density and gradient. Try a smaller learning rate, and look for a log of "
                "zero or a division by zero in the model or the likelihood."
            )
        for i in set(broken) - self._warned:
            self._warned.add(i)
            warnings.warn(
                f"Particle {i} of {self.n} has a log density or gradient that is not finite. It gets no push then, "
                "the others go on. Try a smaller learning rate, or another start for it.",
                ParticleWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "method": self.name,
            "particles": {name: tensor.detach() for name, tensor in self.particles.items()},
            "carried": dict(self.carried),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "broken": self._broken,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state; the particles there must have the shapes of those here."""
        if state["method"] != self.name:
            raise ConfigError(f"This is a state of {state['method']!r} and cannot be continued by {self.name!r}.")
        for kind, own in (("particles", self.particles), ("carried", self.carried)):
            if state[kind].keys() != own.keys() or any(state[kind][name].shape != own[name].shape for name in own):
                raise ShapeError(f"The saved {kind} do not have the names and shapes of those here.")
        for kind, own in (("particles", self.particles), ("carried", self.carried)):
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])
        self._broken.copy_(state["broken"])


def _apart(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same to be changed in place, each in memory of its own: of x + y, autograd returns one tensor for both."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, gradient in gradients.items():
        gradient = gradient.contiguous()
        place = gradient.untyped_storage().data_ptr()
        found[name] = gradient.clone() if place in seen else gradient
        seen.add(place)
    return found


def _norms(whole: Tensor) -> Tensor:
    """Of the rows, at least in single precision: in half they would overflow."""
    found: Tensor = torch.linalg.vector_norm(whole, dim=1, dtype=torch.promote_types(whole.dtype, torch.float32))
    return found


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the learning rate of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # where a captured step reads it
        else:
            group["lr"] = lr


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Go on from a saved state, perhaps one of another device: what depends on the device stays as it is here."""
    groups = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        here: dict[str, Any] = {key: own[key] for key in ("capturable", "fused", "foreach") if key in own}
        if "lr" in saved:
            lr = float(saved["lr"])
            here["lr"] = torch.full_like(own["lr"], lr) if isinstance(own["lr"], Tensor) else lr
        groups.append({**saved, **here})
    optimizer.load_state_dict({**state, "param_groups": groups})


def refuse_lbfgs(optimizer: torch.optim.Optimizer) -> None:
    """The one torch optimiser that wants to evaluate a loss by itself."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates its loss several times a step, which particles do not offer. Use Adam.")
