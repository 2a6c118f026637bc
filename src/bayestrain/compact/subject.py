"""What is compacted: n particles of one network. A plain model is one particle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayestrain.compact.rules import Cut, Seen
from bayestrain.errors import ConfigError
from bayestrain.nn.factorized import replace_data
from bayestrain.nn.sizes import factorized_weights
from bayestrain.prior.density import conditional_mode


class Particles(Protocol):
    """What compaction needs of a posterior: a network of their shape, and stacked tensors by name.

    `particles` holds what trains, `carried` buffers: ``{"model.<name in the template>": (n, ..)}``.
    """

    @property
    def template(self) -> nn.Module: ...
    @property
    def particles(self) -> dict[str, Tensor]: ...
    @property
    def carried(self) -> dict[str, Tensor]: ...
    def __len__(self) -> int: ...


class Subject:
    """The factorised weights of n particles, as stacked tensors ``(n, ..)``; refuses what cannot be compacted."""

    def __init__(self, model: nn.Module | Particles) -> None:
        self.stacked = None if isinstance(model, nn.Module) else model
        self.template = model if isinstance(model, nn.Module) else model.template
        self.number = 1 if self.stacked is None else len(self.stacked)
        self.weights = factorized_weights(self.template)
        if not self.weights:
            raise ConfigError("The model has no factorised weight to compact. Call bayestrain.tensorize_(model) first.")
        self._names = {id(module): name for name, module in self.template.named_modules()}
        for name in self.weights:
            self._check(name)

    def _check(self, name: str) -> None:
        cores = self.cores(name)
        finite = torch.stack([core.isfinite().flatten(1).all(1) for core in cores]).all(0).tolist()
        if not all(finite):
            who = "" if self.stacked is None else f" in particle {finite.index(False)} (see Posterior.drop_)"
            raise ConfigError(
                f"Layer {name!r} has NaN or infinite weights{who}. Go back to a checkpoint from before that."
            )
        if len({self.leaf(name, k) is None for k in range(len(cores))}) > 1:
            raise ConfigError(
                f"Layer {name!r} has cores that train and cores that are frozen, hence common to all particles: no cut "
                "suits each of them. Freeze all of its cores, or none."
            )

    def _key(self, name: str, rest: str) -> str:
        """What particles call a tensor of a weight, which may be the whole network."""
        return ".".join(part for part in ("model", self._names[id(self.weights[name])], rest) if part)

    def leaf(self, name: str, core: int) -> Tensor | None:
        """The tensor that an optimiser knows for a core; None if it is frozen, and so common to all particles."""
        if self.stacked is not None:
            return self.stacked.particles.get(self._key(name, f"cores.{core}"))
        own: Tensor = self.weights[name].cores[core]
        return own

    def cores(self, name: str) -> list[Tensor]:
        """The stacked cores of one weight."""
        found = []
        for k, core in enumerate(self.weights[name].cores):
            leaf = None if self.stacked is None else self.leaf(name, k)
            found.append((core.expand(self.number, *core.shape) if leaf is None else leaf).detach())
        return found

    def log_lambdas(self, name: str) -> list[Tensor]:
        """``log lambda`` of every bond of one weight, stacked; empty if it has no lambda."""
        state = self.weights[name].rank_state
        own = [] if state is None else state.log_lambdas
        if self.stacked is None:
            return [u[None] for u in own]
        return [self.stacked.carried[self._key(name, f"rank_state.log_lambda_{bond}")] for bond in range(len(own))]

    def seen(self, name: str) -> Seen:
        """One weight as a rule sees it, on the CPU: many small decompositions are no work for a GPU."""
        weight = self.weights[name]
        exact = [core.cpu().double() for core in self.cores(name)]
        particles = [[core[i] for core in exact] for i in range(self.number)]
        return Seen(name, weight.format, weight.equation, weight.layout, particles, self.log_lambdas(name))

    def check_optimizer(self, optimizer: torch.optim.Optimizer, cuts: Mapping[str, Cut]) -> None:
        """Refuse what could not follow."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS keeps one flat vector for all parameters, which cannot follow their new shapes. "
                "Compact without optimizer=, then make a new one."
            )
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        leaves = ((name, k, self.leaf(name, k)) for name in cuts for k in range(len(cuts[name].cores)))
        for name, k, leaf in leaves:
            if leaf is None:
                continue
            if leaf.requires_grad and id(leaf) not in known:
                raise ConfigError(
                    f"The optimiser does not hold core {k} of layer {name!r}. Pass the one that trains it."
                )
            for key, value in optimizer.state.get(leaf, {}).items() if cuts[name].keep is not None else ():
                if isinstance(value, Tensor) and value.ndim and value.shape != leaf.shape:
                    raise ConfigError(
                        f"The optimiser's state {key!r} for core {k} of layer {name!r} has shape {tuple(value.shape)}, "
                        f"not the core's {tuple(leaf.shape)}, and cannot be sliced. Leave rule out: the state restarts."
                    )

    def write(self, name: str, cut: Cut, optimizer: torch.optim.Optimizer | None) -> None:
        """Put new cores in place, with gradients, lambda and the optimiser's state sliced along, or restarted."""
        weight = self.weights[name]
        if [core.shape for core in weight.cores] == [core.shape[1:] for core in cut.cores]:
            return
        leaves = [self.leaf(name, k) for k in range(len(cut.cores))]
        grads = [None if leaf is None else leaf.grad for leaf in leaves]
        weight.set_cores([core[0] for core in cut.cores])
        for leaf, grad, new, labels in zip(leaves, grads, cut.cores, weight.equation.cores, strict=True):
            if leaf is None:
                continue  # frozen: the same in all particles, and now in the template
            if self.stacked is not None:
                replace_data(leaf, new.to(leaf))
            leaf.grad = None if grad is None or cut.keep is None else self._take(grad, labels, cut.keep)
            if optimizer is None:
                continue
            if cut.keep is None:
                restart_state(optimizer, leaf)
                continue
            state = optimizer.state.get(leaf, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = self._take(value, labels, cut.keep)
        self._write_lambdas(name, cut)

    def _take(self, tensor: Tensor, labels: Sequence[str], keep: Mapping[str, Tensor]) -> Tensor:
        """Cut a tensor shaped like a core to the surviving indices ``(n, rank)`` of each of its bonds."""
        result = tensor[None] if self.stacked is None else tensor
        for axis, label in enumerate(labels, start=1):
            if label in keep:
                index = keep[label].to(tensor.device)
                shape = [1] * result.ndim
                shape[0], shape[axis] = index.shape
                result = result.take_along_dim(index.view(shape), dim=axis)
        return result[0] if self.stacked is None else result

    def _write_lambdas(self, name: str, cut: Cut) -> None:
        """Slice lambda, or solve for it again."""
        state, equation, before = self.weights[name].rank_state, self.weights[name].equation, self.log_lambdas(name)
        if state is None:
            return
        if cut.keep is not None:
            moved = [u.gather(1, cut.keep[bond].to(u.device)) for u, bond in zip(before, equation.bonds, strict=True)]
        else:

            def mode(cores: list[Tensor]) -> list[Tensor]:
                starts = [cores[0].new_zeros(rank) for rank in equation.ranks([core.shape for core in cores])]
                return conditional_mode(equation, cores, starts, state.a, state.b, state.floor, start=state.start)

            moved = vmap(mode)(cut.cores)
        for bond, (u, old) in enumerate(zip(moved, before, strict=True)):
            new = u.to(old).contiguous()
            state.set_log_lambda(bond, new[0].clone())
            if self.stacked is not None:
                self.stacked.carried[self._key(name, f"rank_state.log_lambda_{bond}")] = new


def restart_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Forget what an optimiser knows of a parameter that has a new shape."""
    known: dict[str, Any] = optimizer.state.pop(parameter, {})
    if isinstance(optimizer, torch.optim.SGD) and known.get("momentum_buffer") is not None:
        # Fused SGD needs a buffer of all parameters or of none; one of zeros does what none does, without dampening.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
