"""`Watch` notices when a prior erases weights instead of pruning their ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.prior.groups import norm_of, whole

EARLY = 100  # steps at first with many looks. What a look costs is that a GPU is waited for
VANISHED = 1 / 3  # the share of a norm that early is left only if a prior erases; pruning takes longer
MATTERS = 0.2  # a prior with fewer entries of a weight than this per term of the data cannot have erased it
STRONG = 2.0
"""A prior with as many outweighs most data. Under a weaker one less must be left: where outputs are far larger than
their noise, it is the data that first shrink a random start, to a seventh or so, before it grows again."""


class Watch:
    """The norms of weights, relative to those at the start of the prior.

    The scale that one weight loses and another one gains is not lost: layers around a ReLU exchange it freely. So a
    share is multiplied with all that others have gained, of which the dense ones in `places` are only watched for that.
    """

    def __init__(self, weights: Mapping[str, FactorizedWeight], places: Sequence[tuple[nn.Module, str]]) -> None:
        known: list[tuple[Any, nn.Module, str]] = [(m._parameters[n], m, n) for m, n in places]
        self.places = [(m, n) for p, m, n in known if not nn.parameter.is_lazy(p) and p.ndim > 1]
        self.weights = dict(weights)
        self.ranks = [own.ranks for own in weights.values()]  # at the last look: what a cut took away is no loss
        self.start = self._norms()
        self.shares = [1.0] * len(self.start)

    @torch.no_grad()
    def _norms(self) -> list[float]:
        own: list[Any] = [module._parameters[name] for module, name in self.places]
        norms: list[Tensor] = [*map(norm_of, self.weights.values()), *(whole(p.norm()) for p in own)]
        if not norms or norms[0].is_meta:
            return []
        found: list[float] = torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).tolist()
        return found

    @staticmethod
    def due(steps: int, aligned: bool) -> bool:
        """Whether to look after so many steps; those that align are never captured in a CUDA graph."""
        return aligned or steps % (EARLY // 10 if steps <= EARLY else EARLY) == 0

    def look(self, steps: int, terms: float) -> list[str]:
        """The weights that have vanished after so many steps, under a prior that counts so many terms of data."""
        now, ranks = self._norms(), [own.ranks for own in self.weights.values()]
        for i, before in enumerate(self.ranks):
            if self.start and ranks[i] != before:
                self.start[i] = now[i] / max(self.shares[i], 1e-30)
        self.ranks, self.start = ranks, self.start or now  # which may have been on the meta device
        self.shares = [size / start if start > 0 else 1.0 for size, start in zip(now, self.start, strict=True)]
        limit = VANISHED * min(1.0, EARLY / steps) / math.prod(max(share, 1.0) for share in self.shares)
        pulls = [own.numel / terms for own in self.weights.values()]
        return [
            name
            for name, share, pull in zip(self.weights, self.shares, pulls, strict=False)
            if pull >= MATTERS and share < limit * min(1.0, pull / STRONG)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"start": list(self.start), "shares": list(self.shares), "ranks": list(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        start, shares = (list(map(float, state[name])) for name in ("start", "shares"))
        self.ranks, self.start, self.shares = [tuple(own) for own in state["ranks"]], start, shares
