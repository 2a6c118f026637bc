"""`FactorizedWeight`: a weight held as the cores of a format, and the state of its bonds under the prior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.errors import ShapeError
from bayestrain.formats import Format, algebra
from bayestrain.nn.layout import Layout

GAMMA_SHAPE, GAMMA_RATE, FLOOR = 1.0, 5.0, 1e-3
"""The paper's Gamma prior on every lambda, and the smallest lambda of a bond relative to its largest."""


class RankState(nn.Module):
    """``log lambda`` of every bond, and the weight norm that is held, if one is (else 0).

    `RankPrior` attaches it to a weight, the model's ``state_dict`` saves it, and `RankPrior.remove_` removes it.
    """

    held_norm: Tensor
    start_ranks: Tensor

    def __init__(self, ranks: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.start = tuple(ranks)
        """The ranks the prior started with; cut indices go on counting in it."""
        self.a, self.b, self.floor = GAMMA_SHAPE, GAMMA_RATE, FLOOR
        self.register_buffer("start_ranks", torch.tensor(ranks, dtype=torch.int64, device=like.device))
        self.register_buffer("held_norm", torch.zeros((), dtype=like.dtype, device=like.device))
        for k, rank in enumerate(ranks):
            self.register_buffer(f"log_lambda_{k}", torch.zeros(rank, dtype=like.dtype, device=like.device))

    @property
    def log_lambdas(self) -> list[Tensor]:
        """One vector per bond, in order."""
        return [self.get_buffer(f"log_lambda_{k}") for k in range(len(self.start))]

    def set_log_lambda(self, bond: int, value: Tensor) -> None:
        """Replace the vector of one bond; its length may change."""
        setattr(self, f"log_lambda_{bond}", value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.start = tuple(self.start_ranks.tolist())


class FactorizedWeight(nn.Module):
    """A weight as the cores of a low-rank format.

    The parameters are `cores`, whose axes are the labels of `equation`. A ``state_dict`` with other ranks loads: the
    cores take the shapes they find, as long as the modes agree, so a compacted model loads into a freshly built one.

    Args:
        format: the family of tensor networks.
        layout: how the weight folds into modes.
        cores: the starting values.
    """

    def __init__(self, format: Format, layout: Layout, cores: Sequence[Tensor]) -> None:
        super().__init__()
        self.format, self.layout = format, layout
        self.equation = format.equation(layout.sizes)
        self._check(cores)
        self.cores = nn.ParameterList([nn.Parameter(core) for core in cores])
        self.rank_state: RankState | None = None
        self.compacted: object = None
        """What the last compaction left here; unchanged cores are not compacted twice."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.layout.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every bond, in order of appearance in the equation."""
        return self.equation.ranks([core.shape for core in self.cores])

    @property
    def dense_numel(self) -> int:
        """Entries of the whole weight."""
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Entries of all cores."""
        return sum(core.numel() for core in self.cores)

    def dense(self, cores: Sequence[Tensor] | None = None) -> Tensor:
        """The whole weight, in the layer's shape, of these cores or the own ones."""
        return self.layout.unfold(algebra.dense(self.equation, list(self.cores) if cores is None else cores))

    def norm(self, cores: Sequence[Tensor] | None = None) -> Tensor:
        """The Frobenius norm of the tensor, padding included, without materialising it."""
        return algebra.norm(self.equation, list(self.cores) if cores is None else cores)

    def attach_rank_state(self) -> RankState:
        """Give the weight its ``lambda``, unless it has one."""
        if self.rank_state is None:
            self.rank_state = RankState(self.ranks, self.cores[0])
        return self.rank_state

    @torch.no_grad()
    def set_cores(self, cores: Sequence[Tensor]) -> None:
        """Put other cores in place, perhaps with other ranks; the parameters keep their identity."""
        self._check(cores)
        for own, new in zip(self.cores, cores, strict=True):
            if own.shape == new.shape:
                own.copy_(new)
            else:
                replace_data(own, new.to(own))

    def _check(self, cores: Sequence[Tensor]) -> None:
        sizes = self.equation.sizes([core.shape for core in cores])
        modes = tuple(sizes[mode] for mode in self.equation.modes)
        if modes != self.layout.sizes:
            raise ShapeError(f"Cores must have modes of sizes {self.layout.sizes}, got {modes}.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        incoming = [state_dict.get(f"{prefix}cores.{k}") for k in range(len(self.cores))]
        found = [core for core in incoming if core is not None]
        if len(found) == len(incoming) and self._fits(found):
            self.set_cores([own.new_empty(new.shape) for own, new in zip(self.cores, found, strict=True)])
            if self.rank_state is not None or f"{prefix}rank_state.held_norm" in state_dict:
                before, self.rank_state = self.rank_state, None
                state = self.attach_rank_state()  # with the ranks that come in
                if before is not None:
                    state.a, state.b, state.floor = before.a, before.b, before.floor
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _fits(self, cores: Sequence[Tensor]) -> bool:
        try:
            self._check(cores)
        except ShapeError:
            return False
        return True

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.equation}, ranks={self.ranks}"


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give a leaf tensor data of another shape; its identity, which optimisers and averages rely on, stays.

    While the loss of an earlier step is alive, autograd remembers the old shape in the parameter's gradient accumulator
    and refuses the new one. It forgets when the dtype changes, hence the detour.
    """
    value = value.detach().clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    other = torch.float32 if value.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=value.device)
    parameter.data = value
