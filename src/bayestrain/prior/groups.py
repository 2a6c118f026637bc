"""`Group`: the prior of several weights as a readable loop; `perf` may register a subclass that is faster."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayestrain.errors import ConfigError
from bayestrain.formats import algebra
from bayestrain.nn.factorized import FactorizedWeight, RankState
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.hold import Held


class Group:
    """The prior of some weights, by name, of which some have a norm that is held.

    Every method reads the tensors when it is called, changes them in place, and branches on no value, so that it runs
    under `torch.func.functional_call` and `torch.vmap`. (A format's alignment may branch, but not in vmap.)
    """

    def __init__(self, weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> None:
        self.weights = dict(weights)
        self.trained = [name for name, own in weights.items() if all(core.requires_grad for core in own.cores)]
        """The weights of which every core trains; only these are aligned."""
        self.held = {name: held[name] for name in weights if name in held}

    def log_prob(self, other_variance: float) -> Tensor:
        """``log p`` of all cores and lambdas, differentiable with respect to both."""
        terms = []
        for name, weight in self.weights.items():
            state, cores = self._state(name), list(weight.cores)
            settings = state.a, state.b, state.start, other_variance
            terms.append(density.log_prob(weight.equation, cores, state.log_lambdas, *settings))
        return total(terms)

    @torch.no_grad()
    def move_(self, move: Move, sweeps: int = 1) -> None:
        """Move every lambda towards its conditional mode, by rounds of one step per bond."""
        for name, weight in self.weights.items():
            state, cores = self._state(name), list(weight.cores)
            args = weight.equation, cores, state.log_lambdas, state.a, state.b, state.floor, state.start, sweeps, move
            for u, new in zip(state.log_lambdas, density.conditional_mode(*args), strict=True):
                u.copy_(new)

    @torch.no_grad()
    def align_(self) -> None:
        """Turn rank indices to singular directions, unless an entry is not finite; no weight changes."""
        for name in self.trained:
            weight, cores = self.weights[name], list(self.weights[name].cores)
            turned = weight.format.align(weight.equation, cores)
            finite = torch.stack([core.isfinite().all() for core in turned]).all()
            for core, new in zip(cores, turned, strict=True):
                core.copy_(torch.where(finite, new, core))

    @torch.no_grad()
    def hold_scale_(self) -> None:
        """Rescale held weights to the first norm they had that was not zero; lambda, bias and statistics follow."""
        for name, held in self.held.items():
            weight, state = self.weights[name], self._state(name)
            norm = norm_of(weight)
            state.held_norm.copy_(torch.where(state.held_norm > 0, state.held_norm, norm))
            factor = torch.where(norm > 0, state.held_norm / norm, 1.0)
            share, factor = shares(factor, len(weight.cores), weight.cores[0].dtype)
            for core in weight.cores:
                core.mul_(share.to(core.dtype))
            for u in state.log_lambdas:
                u.add_(share.log().to(u.dtype))
            for tensor, power in held.companions():
                tensor.mul_((factor**power).to(tensor.dtype))

    def _state(self, name: str) -> RankState:
        if (state := self.weights[name].rank_state) is None:
            raise ConfigError("The model has lost its lambda: the prior was removed. Make a new RankPrior to continue.")
        return state


def norm_of(weight: FactorizedWeight) -> Tensor:
    """The Frobenius norm of a weight, in single precision at least."""
    return algebra.norm(weight.equation, density.exact(list(weight.cores)))


def shares(factor: Tensor, cores: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each core's share of a weight's factor, and the factor that these make, for cores of this dtype."""
    if dtype not in (torch.float16, torch.bfloat16):
        return factor ** (1 / cores), factor
    share = (factor.log2() / cores).round().exp2()  # most numbers but powers of two would be lost in rounding
    return share, share**cores


def is_sharded(tensor: Tensor) -> bool:
    """Whether `fully_shard` has spread it over processes: a DTensor, whose module takes a second to import."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor, put together if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of scalars, on the device of the first."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
