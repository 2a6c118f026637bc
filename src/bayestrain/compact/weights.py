"""What is compacted: the factorised weights of n particles of one network. A plain model is one particle."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayestrain.compact.measure import weight_inner
from bayestrain.compact.optimizers import carry_state_
from bayestrain.errors import ConfigError
from bayestrain.infer import Spread
from bayestrain.nn.factorized import FactorizedWeight, RankState, replace_data
from bayestrain.nn.sizes import layer_name
from bayestrain.prior.density import conditional_mode

Particles = Any  # a `ParticleModel`, which a room above has; tensors are stacked ``{"model.<name>": (n, ..)}``


class Weight:
    """The factorised weight at `path` of n particles, or of a plain model; refuses one that cannot be compacted."""

    def __init__(self, path: str, module: FactorizedWeight, posterior: Particles | None) -> None:
        self.name, self.module, self.posterior = layer_name(path), module, posterior
        self.format, self.equation, self.layout = module.format, module.equation, module.layout
        self.number = 1 if posterior is None else len(posterior)
        self.spread: Spread = getattr(getattr(posterior, "method", None), "spread", None) or Spread(self.number)
        self._prefix = f"model.{path}." if path else "model."
        stacks = () if posterior is None else (posterior.particles, posterior.carried)
        self._stacks: Mapping[str, Tensor] = ChainMap(*stacks)
        finite = torch.stack([core.isfinite().flatten(1).all(1) for core in self.cores]).all(0).tolist()
        if not all(finite):
            who = "" if posterior is None else f" in particle {finite.index(False)} (see Posterior.drop_)"
            raise ConfigError(f"Layer {self.name!r} has NaN or infinite weights{who}. Go back to a checkpoint.")
        if len({leaf is None for leaf in self.leaves}) > 1:
            raise ConfigError(
                f"Layer {self.name!r} has cores that train and cores that are frozen, hence the same in all particles: "
                "no cut suits each of them. Freeze all of its cores, or none."
            )

    @property
    def leaves(self) -> list[Tensor | None]:
        """Per core the tensor that an optimiser knows; None if it is frozen, and so common to all particles."""
        cores = enumerate(self.module.cores)
        return [core if self.posterior is None else self._stacks.get(f"{self._prefix}cores.{k}") for k, core in cores]

    def _all(self, name: str, own: Tensor) -> Tensor:
        """One of the module's tensors in all particles, stacked ``(n, ..)``."""
        return self._stacks.get(f"{self._prefix}{name}", own.expand(self.number, *own.shape)).detach()

    @property
    def cores(self) -> list[Tensor]:
        """The cores of all particles, stacked ``(n, ..)``."""
        return [self._all(f"cores.{k}", core) for k, core in enumerate(self.module.cores)]

    @property
    def log_lambdas(self) -> list[Tensor]:
        """``log lambda`` of every bond, stacked ``(n, R)``; empty if the weight has no lambda."""
        own = [] if self.module.rank_state is None else self.module.rank_state.log_lambdas
        return [self._all(f"rank_state.log_lambda_{bond}", u) for bond, u in enumerate(own)]

    @cached_property
    def exact(self) -> list[list[Tensor]]:
        """The cores of every particle before any cut, in double precision; many small SVDs are slow on a GPU."""
        stacked = [core.cpu().double() for core in self.cores]
        return [[core[i] for core in stacked] for i in range(self.number)]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over particles, also those of other processes."""
        return self.spread.sum(values.sum(0)) / self.spread.total

    def largest(self, sizes: Sequence[int]) -> list[int]:
        """The largest of each of these sizes, also of those in other processes."""
        return self.spread.gather(torch.tensor([sizes] * self.number)).amax(0).tolist()

    @cached_property
    def norms(self) -> Tensor:
        """``(n, 1)``: the norm of every particle's weight, without the padding of its tensor."""
        squares = [[weight_inner(self.module, cores, cores)] for cores in self.exact]
        return torch.tensor(squares, dtype=torch.float64).clamp_min(1e-300).sqrt()

    def fingerprint(self, rule: str | None) -> tuple[float, ...]:
        """Numbers that change when anything changes that this rule depends on."""
        tensors = [tensor.double() for tensor in (*self.cores, *(self.log_lambdas if rule == "lambda" else []))]
        sums = torch.stack([value for t in tensors for value in (t.sum(), t.square().sum())])
        return tuple(self.mean(sums[None]).tolist())

    def write(
        self, cores: Sequence[Tensor], keep: Mapping[str, Tensor] | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Put new cores ``(n, ..)`` in place; gradients, lambda and the optimiser's state are sliced along.

        If `keep` is None, because the rule has mixed indices, the state restarts and lambda is solved for again.
        """
        if [core.shape[1:] for core in cores] == [core.shape for core in self.module.cores]:
            return
        # Frozen cores are the same in all particles, and only in the template.
        known = [(k, leaf, leaf.shape, leaf.grad) for k, leaf in enumerate(self.leaves) if leaf is not None]
        self.module.set_cores([core[0] for core in cores])
        for k, leaf, shape, grad in known:
            if self.posterior is not None:
                replace_data(leaf, cores[k].to(leaf))
            take = None if keep is None else partial(self._take, self.equation.cores[k], keep)
            leaf.grad = None if grad is None or take is None else take(grad)
            carry_state_(optimizer, leaf, shape, take)
        if self.module.rank_state is not None:
            self._write_lambdas(self.module.rank_state, cores, keep)

    def _take(self, labels: Sequence[str], keep: Mapping[str, Tensor], tensor: Tensor) -> Tensor:
        """Cut a tensor shaped like a leaf to the surviving indices of each of its bonds."""
        result = tensor[None] if self.posterior is None else tensor
        for axis, label in enumerate(labels, start=1):
            if label in keep:
                index = keep[label].to(tensor.device)
                shape = [-1 if a == axis else 1 for a in range(1, result.ndim)]
                result = result.take_along_dim(index.view(self.number, *shape), dim=axis)
        return result[0] if self.posterior is None else result

    def _write_lambdas(self, state: RankState, cores: Sequence[Tensor], keep: Mapping[str, Tensor] | None) -> None:
        before, starts = self.log_lambdas, [cores[0].new_zeros(rank) for rank in self.module.ranks]
        if keep is not None:
            moved = [u.gather(1, keep[bond].to(u.device)) for u, bond in zip(before, self.equation.bonds, strict=True)]
        else:
            mode = partial(conditional_mode, self.equation, us=starts, a=state.a, b=state.b, floor=state.floor)
            moved = vmap(partial(mode, start=state.start))(list(cores))
        for bond, (u, old) in enumerate(zip(moved, before, strict=True)):
            new = u.to(old).contiguous()
            state.set_log_lambda(bond, new[0].clone())
            if self.posterior is not None:
                self.posterior.carried[f"{self._prefix}rank_state.log_lambda_{bond}"] = new


def find_weights(model: nn.Module | Particles) -> tuple[nn.Module, list[Weight]]:
    """The network whose shapes all particles have, and its factorised weights; raises if it has none."""
    template, posterior = (model, None) if isinstance(model, nn.Module) else (model.template, model)
    paths = [(path, module) for path, module in template.named_modules() if isinstance(module, FactorizedWeight)]
    if not paths:
        raise ConfigError("The model has no factorised weight to compact. Call bayestrain.tensorize_(model) first.")
    return template, [Weight(path, module, posterior) for path, module in paths]
