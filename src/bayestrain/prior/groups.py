"""`Group`: the prior of several factorised weights, as a readable loop over them.

Its methods are the protocol between `RankPrior` and the arithmetic. `perf` may register a subclass that treats many
weights in a few large operations; it computes the same, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.nn.factorized import FactorizedWeight, RankState
from bayestrain.prior import density
from bayestrain.prior.density import Move
from bayestrain.prior.hold import Held


class Group:
    """The prior of some weights.

    A group refers to modules, never to their tensors: `torch.func.functional_call` puts others in their place,
    `torch.vmap` runs a method for many particles, and compaction changes shapes. So every method reads the tensors when
    it is called, branches on no value, and changes tensors in place. (A format's alignment may branch, but then cannot
    run in vmap.)

    Args:
        weights: by name; each has a rank state.
        held: the layers whose norm is held. Those with a frozen parameter are not.
    """

    def __init__(self, weights: Mapping[str, FactorizedWeight], held: Mapping[str, Held]) -> None:
        self.weights = dict(weights)
        self.trained = [name for name, own in weights.items() if all(core.requires_grad for core in own.cores)]
        """The weights of which every core trains; only these are held and aligned."""
        self.held = {
            name: held[name]
            for name in self.trained
            if name in held and all(parameter.requires_grad for parameter in held[name].layer.parameters())
        }

    def cores(self) -> list[Tensor]:
        """The cores of all weights, in order."""
        return [core for weight in self.weights.values() for core in weight.cores]

    def log_prob(self, a: float, b: float, other_variance: float) -> Tensor:
        """``log p`` of all cores and lambdas, differentiable with respect to both."""
        terms = []
        for name, weight in self.weights.items():
            cores, us, linear = list(weight.cores), self._state(name).log_lambdas, self._linear(name, a)
            terms.append(density.log_prob(weight.equation, cores, us, linear, a, b, other_variance))
        return total(terms)

    @torch.no_grad()
    def move_(self, move: Move, a: float, floor: float, sweeps: int = 1) -> None:
        """Move every lambda by rounds of one step on each bond's conditional (`density.sweep`)."""
        self._move_(self.weights, move, a, floor, sweeps)

    @torch.no_grad()
    def align_(self, move: Move, a: float, floor: float, sweeps: int) -> None:
        """Turn rank indices to singular directions, as the format does it; lambda follows by rounds of steps.

        The tensors do not change. Cores stay as they are if any entry is not finite, before or after.
        """
        for name in self.trained:
            weight, cores = self.weights[name], list(self.weights[name].cores)
            turned = weight.format.align(weight.equation, cores)
            finite = torch.stack([core.isfinite().all() for core in turned]).all()
            for core, new in zip(cores, turned, strict=True):
                core.copy_(torch.where(finite, new, core))
        self._move_(self.trained, move, a, floor, sweeps)

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """The Frobenius norm of every held weight."""
        weights = {name: self.weights[name] for name in self.held}
        return {name: algebra.norm(own.equation, density.exact(list(own.cores))) for name, own in weights.items()}

    @torch.no_grad()
    def hold_scale_(self) -> None:
        """Rescale held weights to the first norm they had that was not zero; lambda, bias and statistics follow."""
        for name, norm in self.norms().items():
            state, cores = self._state(name), list(self.weights[name].cores)
            held = torch.where(state.held_norm > 0, state.held_norm, norm)
            state.held_norm.copy_(held)
            factor = torch.where(norm > 0, held / norm, torch.ones_like(norm))
            share, factor = shares(factor, len(cores), cores[0].dtype)
            for core in cores:
                core.mul_(share.to(core.dtype))
            for u in state.log_lambdas:
                u.add_(share.log().to(u.dtype))
            for tensor, power in self.held[name].companions():
                tensor.mul_((factor**power).to(tensor.dtype))

    def _state(self, name: str) -> RankState:
        state = self.weights[name].rank_state
        assert state is not None
        return state

    def _linear(self, name: str, a: float) -> tuple[float, ...]:
        weight = self.weights[name]
        shapes = tuple(core.shape for core in weight.cores)
        return density.linear_terms(weight.equation, shapes, self._state(name).start, a)

    def _move_(self, names: Iterable[str], move: Move, a: float, floor: float, sweeps: int) -> None:
        for name in names:
            weight, us, linear = self.weights[name], self._state(name).log_lambdas, self._linear(name, a)
            moved = density.sweep(weight.equation, list(weight.cores), us, linear, move, floor, sweeps)
            for u, new in zip(us, moved, strict=True):
                u.copy_(new)


def shares(factor: Tensor, cores: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each core's share of a weight's factor, and the factor that these make, for cores of this dtype.

    In half precision a share is the nearest power of two: most others would be lost when cores are rounded.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return factor ** (1 / cores), factor
    share = (factor.log2() / cores).round().exp2()
    return share, share**cores


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of scalars, on the device of the first."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
