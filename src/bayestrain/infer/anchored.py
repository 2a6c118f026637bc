"""Randomised maximum a posteriori, or anchored ensembles (Bardsley et al. 2014; Pearce et al. 2020).

Every particle climbs a log density of its own, in which targets are as noisy as the likelihood says, and the prior is
centred at an anchor instead of zero::

    theta_k = argmax  sum_i log p(y_i + noise_ik | x_i, theta)  +  log p(theta - anchor_k)

With anchors drawn from the prior, the particles of a linear model with Gaussian noise are exact draws from its
posterior, in any number of dimensions, and any optimiser will do.

A particle must meet the same noise whenever it meets a datum, so that is a hash of the datum's numbers and the
particle's (`keys`, `normals`). Augmented inputs are new data, whose noise averages out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayestrain.infer.method import Ensemble

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Anchored(Ensemble):
    """Randomised MAP; arguments as for `Method`.

    The `gradients` add what is random: `Posterior` perturbs its likelihood with `numbers` and pulls to the `anchors`.

    Args:
        seed: of the noise.
    """

    name = "anchored"
    options = Ensemble.options | {"seed"}

    def __init__(self, *args: Any, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.anchors = {name: tensor.detach().clone() for name, tensor in self.particles.items()}
        """Where the particles started: draw that from the prior."""
        own = self.spread.own  # numbers tell the particles' noise apart
        self.numbers = torch.arange(own.start, own.stop, device=self.broken.device) + seed * 1_000_003

    def keep_(self, indices: Sequence[int]) -> None:
        super().keep_(indices)
        self.anchors = {name: tensor[list(indices)] for name, tensor in self.anchors.items()}
        self.numbers = self.numbers[list(indices)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "anchors": self.anchors, "numbers": self.numbers}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        here = self.broken.device
        self.anchors = {name: tensor.to(here, copy=True) for name, tensor in state["anchors"].items()}
        self.numbers = state["numbers"].to(here, copy=True)


def keys(data: Sequence[Tensor], numbers: Tensor) -> Tensor:
    """A whole number for each particle's number and each datum, ``(n, B)``, that depends on nothing else."""
    own = torch.zeros(len(data[0]), dtype=torch.int64, device=data[0].device)
    for tensor in data:
        rows = tensor.reshape(len(tensor), -1).contiguous()
        bits = rows.view(BITS[rows.element_size()]) if rows.is_floating_point() else rows
        places = torch.arange(bits.shape[1], device=bits.device)
        own = _mixed(own + _mixed(bits.long() ^ _mixed(places)).sum(1))
    return _mixed(own + _mixed(numbers)[:, None])


def normals(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal(0, 1) noise ``(B, *shape)`` that the keys ``(B,)`` determine."""
    places = _mixed(torch.arange(math.prod(shape), device=keys.device)).reshape(1, *shape)
    bits = _mixed(keys.reshape(-1, *[1] * len(shape)) + places) & 0x7FFFFF
    noise: Tensor = torch.special.ndtri((bits.float() + 0.5) / 2**23)
    return noise


def _mixed(keys: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014): every bit of the result depends on every bit of the key."""
    keys = keys - 0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        keys = (keys ^ (keys >> shift)) * factor
    return keys ^ (keys >> 31)
