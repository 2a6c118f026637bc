"""What all tensor-train layers share: cores whose ranks may change, and the state of their bonds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayestrain import shrinkage, tt
from bayestrain.errors import ConversionError, ShapeError
from bayestrain.layers.planned import Kept, traced, transformed
from bayestrain.plans import Cost, Plan


def replace_data(parameter: Tensor, value: Tensor) -> None:
    """Give a leaf tensor new data of another shape, keeping its identity, which optimisers and EMA lists rely on.

    While the loss of an earlier step is still alive, autograd remembers the old shape in the parameter's gradient
    accumulator and would refuse the new one. It forgets it when the dtype changes, hence the detour.
    """
    value = value.detach().clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    other = torch.float32 if value.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=value.device)
    parameter.data = value


def check_dense(dense: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse what is no dense layer of that kind, or has no weights yet."""
    if not isinstance(dense, kind):
        raise ConversionError(f"Expected an nn.{kind.__name__} to convert, got {type(dense).__name__}.")
    if any(nn.parameter.is_lazy(parameter) for parameter in dense.parameters()):
        raise ConversionError(f"{type(dense).__name__} is lazy and has no weights yet. Run one batch through it first.")


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off: weights are formed in the precision of the cores, only products with data are lowered."""
    kind = x.device.type  # the meta device, for one, knows no autocast
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


LOWERED = (torch.float32, torch.float16, torch.bfloat16)
"""Types that autocast brings into its own."""


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for this input."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") and not torch.amp.is_autocast_available(kind):
        return False
    return torch.is_autocast_enabled(kind) and x.dtype in LOWERED


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that products with this input are computed in: autocast's, where it is on."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


class RankState(nn.Module):
    """``log lambda`` of every bond and the weight norm to hold, where one is held (else 0).

    Attached to a layer by `RankPrior`, saved in the model's ``state_dict``, taken off again by `RankPrior.remove_`.
    """

    held_norm: Tensor
    start_ranks: Tensor

    def __init__(self, ranks: Sequence[int], like: Tensor) -> None:
        super().__init__()
        self.started_with = tuple(ranks)
        self.register_buffer("start_ranks", torch.tensor(ranks, dtype=torch.int64, device=like.device))
        self.bonds = len(ranks)
        self.a, self.b, self.floor = shrinkage.GAMMA_SHAPE, shrinkage.GAMMA_RATE, shrinkage.FLOOR
        for k, rank in enumerate(ranks, start=1):
            self.register_buffer(f"log_lambda_{k}", torch.zeros(rank, dtype=like.dtype, device=like.device))
        self.register_buffer("held_norm", torch.zeros((), dtype=like.dtype, device=like.device))

    @property
    def log_lambdas(self) -> list[Tensor]:
        """One vector per bond, in order."""
        return [self.get_buffer(f"log_lambda_{k}") for k in range(1, self.bonds + 1)]

    @property
    def dropped(self) -> list[int]:
        """Per bond, how many rank indices compaction has cut since the prior was attached."""
        return [start - len(u) for start, u in zip(self.started_with, self.log_lambdas, strict=True)]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.started_with = tuple(self.start_ranks.tolist())

    def set_log_lambda(self, bond: int, value: Tensor) -> None:
        """Replace the vector of one bond; its length may change."""
        setattr(self, f"log_lambda_{bond}", value)


class TTLayer(nn.Module, ABC):
    """A layer whose weight is a tensor train.

    Parameters are `cores` and, perhaps, `bias`. A ``state_dict`` with other ranks than the layer's own loads: the cores
    take the shapes they find, as long as the modes agree, so a compacted model can be loaded into a freshly built one.
    """

    bias: nn.Parameter | None

    def __init__(self, cores: Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        tt.check(cores)
        self.cores = nn.ParameterList([nn.Parameter(core) for core in cores])
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        self.rank_state: RankState | None = None
        self.compacted: object = None
        """What the last `compact_` left here; the same cores are not compacted twice."""
        self.low_memory = False
        """Whether training saves as little as possible for the backward pass, at some cost of time."""
        self.given: Tensor | None = None
        """The weight, formed by somebody else for the passes to come (`forming.FormTogether`)."""
        self._forced: str | None = None
        self._kept = Kept()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, the two boundary ones included: ``(1, R_1, .., 1)``."""
        return tt.ranks(list(self.cores))

    @property
    def weight(self) -> Tensor:
        """The full weight in the shape of the dense layer's, formed anew at each access."""
        return self.dense_weight(list(self.cores))

    @abstractmethod
    def dense_weight(self, cores: Sequence[Tensor]) -> Tensor:
        """The full weight that these cores, with this layer's modes, stand for."""

    @property
    def is_padded(self) -> bool:
        """Whether the modes hold more entries than the weight has: then some exist only inside."""
        held = math.prod(int(size) for core in self.cores for size in core.shape[1:-1])
        return held > math.prod(self.weight_shape)

    @abstractmethod
    def plan_costs(self, x: Tensor) -> list[Cost]:
        """Every way to run on this input, with its predicted cost, cheapest first."""

    @abstractmethod
    def dense_cost(self, x: Tensor) -> Cost:
        """The predicted cost of the dense layer that this one stands for."""

    @abstractmethod
    def plan_for(self, x: Tensor) -> Plan:
        """How this input would be run: the cheapest plan, or the forced one."""

    def plans(self, x: Tensor) -> list[str]:
        """The names of all plans for this input."""
        return [cost.plan.name for cost in self.plan_costs(x)]

    def force_plan(self, name: str | None) -> None:
        """Always run this plan, as "dense" or "right:2"; None lets the cost decide again.

        A plan that the layer has not is refused when it runs.
        """
        self._forced = name
        self._kept.forget()

    @property
    def forced_plan(self) -> str | None:
        """The plan that was forced, if one was."""
        return self._forced

    @property
    def plan(self) -> Plan | None:
        """How the last pass was run; None before the first."""
        return self._kept.plan

    def _trains(self, x: Tensor) -> bool:
        """Whether a pass now would be followed by a backward pass."""
        if not torch.is_grad_enabled():
            return False
        if x.requires_grad or (self.bias is not None and self.bias.requires_grad):
            return True
        return any(core.requires_grad for core in self.cores)

    def _keeps(self) -> bool:
        """Whether what a pass forms now may be kept: evaluation, no gradients, nobody looking on, all changes seen."""
        if self.training or torch.is_grad_enabled() or traced() or transformed():
            return False
        own = self.cores._parameters.values()  # a parametrised core is elsewhere
        return len(own) == len(self.cores) and True not in [core.is_inference() for core in own]  # type: ignore[union-attr]

    def _note(self, plan: Plan) -> None:
        """Remember how the pass is run."""
        if not torch.compiler.is_compiling():
            self._kept.plan = plan

    def _forget(self) -> None:
        """A pass with gradients: the cores are about to change."""
        if not torch.compiler.is_compiling():
            self._kept.forget()

    def _fits(self, x: Tensor) -> bool:
        """Whether an input's type is one for the cores: their own, or one that autocast makes the same."""
        like = self.cores[0].dtype
        return x.dtype == like or autocasts(x)

    def train(self, mode: bool = True) -> Self:
        """As for any module; factors kept for inference are forgotten."""
        self._kept.forget()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._kept.forget()  # what was formed elsewhere shall not stay there
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of output features or channels."""

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the full weight."""

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of the dense layer this one stands for."""
        return math.prod(self.weight_shape) + (0 if self.bias is None else self.bias.numel())

    @property
    def parameters_left(self) -> int:
        """Number of parameters of this layer, bias included, ``lambda`` not."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _take_over(self, dense: nn.Linear | nn.Conv2d) -> Self:
        """Copy what a dense layer keeps when its weight becomes a tensor train: bias, frozenness, training mode."""
        if self.bias is not None and dense.bias is not None:
            self.bias.data.copy_(dense.bias.detach())
            self.bias.requires_grad_(dense.bias.requires_grad)
        for core in self.cores:
            core.requires_grad_(dense.weight.requires_grad)
        return self.train(dense.training)

    @torch.no_grad()
    def zero_(self) -> Self:
        """Make the weight zero by its last core alone: through the others, which are not, it can train."""
        self.cores[-1].zero_()
        return self

    def attach_rank_state(self) -> RankState:
        """Give the layer its ``lambda``, unless it has one."""
        if self.rank_state is None:
            self.rank_state = RankState(self.ranks[1:-1], self.cores[0])
        return self.rank_state

    @torch.no_grad()
    def set_cores(self, cores: Sequence[Tensor]) -> None:
        """Put other cores in place, perhaps with other ranks; the parameters keep their identity."""
        tt.check(cores)
        for own, new in zip(self.cores, cores, strict=True):
            if own.shape[1:-1] != new.shape[1:-1]:
                raise ShapeError(
                    f"New cores must keep the modes {tuple(own.shape[1:-1])}, got {tuple(new.shape[1:-1])}."
                )
        self._kept.forget()
        for own, new in zip(self.cores, cores, strict=True):
            if own.shape == new.shape:
                own.copy_(new)
            else:
                replace_data(own, new.to(own))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._kept.forget()
        keys = [f"{prefix}cores.{k}" for k in range(len(self.cores))]
        incoming = [state_dict[key] for key in keys if key in state_dict]
        if [new.shape[1:-1] for new in incoming] == [own.shape[1:-1] for own in self.cores]:
            self.set_cores([own.new_empty(new.shape) for own, new in zip(self.cores, incoming, strict=True)])
            if self.rank_state is not None or f"{prefix}rank_state.held_norm" in state_dict:
                before, self.rank_state = self.rank_state, None
                state = self.attach_rank_state()  # with the ranks that come in
                if before is not None:
                    state.a, state.b, state.floor = before.a, before.b, before.floor
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _saving(self) -> str:
        """The part of ``repr`` that all layers share."""
        left, dense = self.parameters_left, self.dense_parameters
        return f"ranks={self.ranks}, parameters={left:,} of {dense:,} ({dense / left:.3g}x)"
