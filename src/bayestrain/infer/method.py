"""What all inference methods share: gradients of the particles, an optimiser, and a state that can be saved."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, TrainingError
from bayestrain.infer.particles import Particles, count, groups, matrices, matrix

LogDensity = Callable[[dict[str, Tensor], Any], Tensor]
"""``log_density(particles, batch) -> (n,)``: one differentiable log density per particle, up to a constant."""

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""Takes named tensors, as every torch optimiser does."""

LOOK_EVERY = 50
"""Steps between checks for broken particles on a device where reading a value would stall the queue."""


@dataclass(frozen=True)
class StepInfo:
    """Per particle, before it moved: its log density, and whether its density, gradient and weights are finite."""

    log_density: Tensor
    alive: Tensor


class Method:
    """Move n particles along a direction made of the gradients of their log densities.

    A step is ``theta_k += lr * scale * direction_k``, taken by any torch optimiser. Here the direction is the gradient
    ``grad log p(theta_k)`` itself; a subclass overrides `direction_`.

    Args:
        log_density: called with stacked particles (perhaps only some of them) and a batch.
        particles: where they start, ``{name: (n, ...)}``; copied.
        optimizer: makes the optimiser from named tensors.
        log_prior: a part of the log density that needs neither a batch nor much memory. It is called once with all
            particles, whereas `log_density` is called chunk by chunk.
        carried: stacked tensors that belong to particles but are not moved by gradients; `log_density` receives them
            among the particles and may change them in place.
        scale: factor on the direction. With ``1 / number of data``, learning rates are those of mean losses.
        chunk: particles per call of `log_density`; None takes all at once. It changes memory, not results.
        clip: largest norm of a particle's scaled direction; None does not clip.
    """

    name: ClassVar[str]
    fewest: ClassVar[int] = 1
    most: ClassVar[int | None] = None
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
        self.check_number(self.n)
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip must be positive, got {clip}. Use None not to clip.")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk must be at least 1 particle, got {chunk}.")
        self.log_density, self.log_prior = log_density, log_prior
        self.particles = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for name, tensor in particles.items()
        }
        self.carried = {} if carried is None else carried
        if self.carried and count(self.carried) != self.n:
            raise ShapeError(f"There are {self.n} particles, but carried tensors for {count(self.carried)}.")
        self.scale, self.chunk, self.clip = scale, chunk, clip
        self.optimizer = make_optimizer(optimizer, list(self.particles.items()))
        self.steps = 0
        self._broken = torch.zeros(self.n, dtype=torch.int64, device=next(iter(self.particles.values())).device)
        self._all_broken = torch.zeros((), dtype=torch.bool, device=self._broken.device)
        self._warned: set[int] = set()

    @classmethod
    def check_number(cls, n: int) -> None:
        """Raise `ConfigError` unless the method works with n particles."""
        if n < cls.fewest or (cls.most is not None and n > cls.most):
            bound = f"at least {cls.fewest}" if n < cls.fewest else f"at most {cls.most}"
            raise ConfigError(f"{cls.name} needs {bound} particle(s), got {n}. {cls.advice}".strip())

    def direction_(self, gradients: Sequence[Tensor], alive: Tensor) -> None:
        """Turn the gradients of the log density into the direction of motion, in place.

        Args:
            gradients: matrices ``(n, columns)``, in the order of ``matrices(self.particles)``.
            alive: ``(n,)``; rows that are not alive are zero.
        """

    def step(self, batch: Any) -> StepInfo:
        """Move every particle once; one whose gradient is not finite receives none, with a warning."""
        info = self.advance(batch)
        self.count_step()
        return info

    def advance(self, batch: Any) -> StepInfo:
        """Do the work of `step` without reading a value, so that it can be captured in a CUDA graph."""
        values, gradients = self.gradients(batch)
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            grouped = groups(self.particles)
            moves = [matrix([gradients.pop(name) for name in names]) for names in grouped]
            alive = values.isfinite()
            for norms in map(_row_norms, chain(moves, matrices(self.particles))):
                alive = alive & norms.isfinite()
            for move in moves:
                move.masked_fill_(~alive[:, None], 0.0)
            self.direction_(moves, alive)
            factor = torch.full((self.n,), -self.scale, dtype=values.dtype, device=values.device)  # optimisers descend
            if self.clip is not None:
                length = torch.linalg.vector_norm(torch.stack(list(map(_row_norms, moves))), dim=0) * self.scale
                factor = factor * (self.clip / length.clamp_min(1e-30)).clamp_max(1.0)
            for names in grouped:
                move = moves.pop(0)  # frees each matrix once its parts have been copied
                move.mul_(factor.to(move.dtype)[:, None])
                tensors = [self.particles[name] for name in names]
                parts = move.split([tensor.numel() // self.n for tensor in tensors], dim=1)
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.grad = part.contiguous().view(tensor.shape)
            self._broken += ~alive
            self._all_broken.copy_(~alive.any())
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepInfo(values, alive)

    def count_step(self) -> None:
        """Do the rest of `step`: count it, and check now and then for broken particles."""
        self.steps += 1
        if self._broken.device.type == "cpu" or self.steps % LOOK_EVERY == 0:
            self._report_broken()

    def gradients(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return log densities ``(n,)`` and gradients ``{name: (n, ...)}``, computed chunk by chunk."""

        def density(tensors: dict[str, Tensor]) -> Tensor:
            return self.log_density(tensors, batch)

        size = min(self.chunk or self.n, self.n)
        if self.log_prior is not None:
            before, gradients = self._gradients(slice(0, self.n), self.log_prior)
        elif size == self.n:
            return self._gradients(slice(0, self.n), density)
        else:
            before, gradients = None, {name: torch.zeros_like(tensor) for name, tensor in self.particles.items()}
        values: list[Tensor] = []
        for start in range(0, self.n, size):
            part = slice(start, min(start + size, self.n))
            value, found = self._gradients(part, density)
            values.append(value)
            torch._foreach_add_([gradients[name][part] for name in found], list(found.values()))
        joined = torch.cat(values)
        return joined if before is None else joined + before, gradients

    def _gradients(
        self, part: slice, density: Callable[[dict[str, Tensor]], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Values of a density for some particles, and gradients that may be changed in place."""
        leaves = {name: tensor.detach()[part].requires_grad_() for name, tensor in self.particles.items()}
        with torch.enable_grad():
            value = density({**leaves, **{name: tensor[part] for name, tensor in self.carried.items()}})
            number = part.stop - part.start
            if value.shape != (number,):
                raise ShapeError(
                    f"log_density must return one number per particle, shape ({number},), got {tuple(value.shape)}."
                )
            found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        gradients: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, gradient in zip(leaves, found, strict=True):
            address = gradient.untyped_storage().data_ptr()  # for x + y, autograd returns one tensor for both
            gradients[name] = gradient.clone() if address in seen else gradient.contiguous()
            seen.add(address)
        return value.detach(), gradients

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)  # in place, where a captured step reads it
            else:
                group["lr"] = lr

    def restart_optimizer(self) -> None:
        """Drop the optimiser's moments; it keeps its learning rate."""
        self.optimizer.state.clear()

    @torch.no_grad()
    def keep_(self, indices: Sequence[int]) -> None:
        """Keep only these particles, with their optimiser state."""
        self.check_number(len(set(indices)))
        chosen = torch.tensor(indices, device=self._broken.device)
        for tensor in self.particles.values():
            state = self.optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and len(value) == self.n:
                    state[key] = value.index_select(0, chosen)
            tensor.data = tensor.detach().index_select(0, chosen)
        for name, tensor in self.carried.items():
            self.carried[name] = tensor.index_select(0, chosen)
        self._broken = self._broken.index_select(0, chosen)
        self._warned, self.n = set(), len(chosen)

    def _report_broken(self) -> None:
        """Warn once of each particle that missed a step; raise if all of them missed the last one."""
        if bool(self._all_broken):
            raise TrainingError(
                "No particle has a finite log density and gradient. Try a smaller learning rate, and look for a log of "
                "zero or a division by zero in the model or the likelihood."
            )
        for i in set((self._broken > 0).nonzero().flatten().tolist()) - self._warned:
            self._warned.add(i)
            warnings.warn(
                f"Particle {i} of {self.n} has a log density or gradient that is not finite. It gets no gradient in "
                "such steps; the others continue. Try a smaller learning rate, or another start for it.",
                ParticleWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next step depends on."""
        return {
            "method": self.name,
            "particles": {name: tensor.detach() for name, tensor in self.particles.items()},
            "carried": dict(self.carried),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "broken": self._broken,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless `load_state_dict` would succeed, given tensors of matching shapes."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ConfigError(f"This is no state of an inference method: {missing} is missing. Pass a state_dict().")
        if state["method"] != self.name:
            raise ConfigError(f"This is a state of {state['method']!r} and cannot be resumed by {self.name!r}.")
        if (saved := len(state["broken"])) != self.n:
            raise ShapeError(f"The saved state has {saved} particles, this one {self.n}.")
        form = [
            [(len(group["params"]), sorted(group.keys() - {"param_names"})) for group in groups]
            for groups in (self.optimizer.param_groups, state["optimizer"]["param_groups"])
        ]
        if form[0] != form[1]:
            raise ConfigError("The saved optimiser differs in kind or parameter groups from this one. Make the same.")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, whose tensors must have the shapes of those here; check before any change."""
        self.check_state(state)
        pairs = [("particles", self.particles), ("carried", self.carried)]
        for kind, own in pairs:
            if state[kind].keys() != own.keys() or any(state[kind][name].shape != own[name].shape for name in own):
                raise ShapeError(f"The saved {kind} do not have the names and shapes of those here.")
        for kind, own in pairs:
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])
        self._broken.copy_(state["broken"])


def _row_norms(whole: Tensor) -> Tensor:
    """Norms of the rows, in at least single precision because half precision would overflow."""
    norms: Tensor = torch.linalg.vector_norm(whole, dim=1, dtype=torch.promote_types(whole.dtype, torch.float32))
    return norms


def make_optimizer(make: MakeOptimizer, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """Make an optimiser that moves particles."""
    optimizer = make(named)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates its loss several times per step, which particles do not. Use Adam.")
    return optimizer


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
