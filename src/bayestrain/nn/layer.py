"""What all factorised layers share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from bayestrain.errors import ConfigError, ConversionError
from bayestrain.formats import Format, algebra
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.layout import Layout

INITS = ("he", "paper")

DEFAULT_RANK = 20


class Folding(TypedDict, total=False):
    """How a weight is folded, as the keywords of constructors have it."""

    format: str | Format
    layout: str
    in_modes: Sequence[int] | None
    out_modes: Sequence[int] | None


class TensorLayer(nn.Module, ABC):
    """A layer whose weight is factorised. Its parameters are the cores of `factorized` and, perhaps, `bias`."""

    bias: nn.Parameter | None

    def __init__(self, factorized: FactorizedWeight, bias: bool) -> None:
        super().__init__()
        self.factorized = factorized
        own, fan_in = factorized.cores[0], math.prod(factorized.shape[1:])
        bound = 1.0 / math.sqrt(max(fan_in, 1))  # as `nn.Linear` and `nn.Conv2d` start theirs
        start = torch.empty(factorized.shape[0], dtype=own.dtype, device=own.device).uniform_(-bound, bound)
        self.register_parameter("bias", nn.Parameter(start) if bias else None)

    @property
    def cores(self) -> nn.ParameterList:
        """The cores of the weight."""
        return self.factorized.cores

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every bond; for a tensor train with the ones at both ends, ``(1, r1, .., 1)``."""
        return self.factorized.format.shown_ranks(self.factorized.ranks)

    @property
    def weight(self) -> Tensor:
        """The whole weight in the shape of the dense layer's, materialised at each access."""
        with own_precision(self.cores[0]):
            return self.factorized.dense()

    @property
    def outputs(self) -> int:
        """Number of output features or channels."""
        return self.factorized.shape[0]

    @property
    def out_modes(self) -> tuple[int, ...]:
        """The factors of the outputs."""
        return self.factorized.layout.splits[0]

    @property
    def in_modes(self) -> tuple[int, ...]:
        """The factors of the inputs."""
        return self.factorized.layout.splits[1]

    @classmethod
    @abstractmethod
    def _folding(cls, dense: Any, **folding: Unpack[Folding]) -> tuple[Format, Layout]:
        """How the weight of this dense layer folds; refuses a layer that cannot be factorised."""

    @abstractmethod
    def _set_up(self, dense: Any, weight: FactorizedWeight, bias: bool) -> None:
        """Become a layer with this weight and the settings of a dense layer."""

    @abstractmethod
    def _empty_dense(self) -> nn.Linear | nn.Conv2d:
        """The plain PyTorch layer of the same shape and settings."""

    @classmethod
    def like(
        cls, dense: Any, max_rank: int | Sequence[int] = DEFAULT_RANK, init: str = "he", **folding: Unpack[Folding]
    ) -> Self:
        """A layer with the shape, settings, device, dtype and bias of a dense one, and random cores."""
        how = cls._folding(dense, **folding)
        return cls.of(dense, random_weight(*how, max_rank, init, dense.weight.dtype, dense.weight.device))

    @classmethod
    def from_dense(
        cls, dense: Any, max_rank: int | Sequence[int] | None = None, tol: float = 0.0, **folding: Unpack[Folding]
    ) -> Self:
        """The dense layer with its own weight decomposed, to relative error `tol` and at most `max_rank`.

        Format, layout and modes are keywords as in the constructor.
        """
        how = cls._folding(dense, **folding)
        return cls.of(dense, decomposed_weight(dense.weight, *how, max_rank, tol))

    @classmethod
    def of(cls, dense: Any, weight: FactorizedWeight) -> Self:
        """A layer with this weight, and all else that a dense layer has: bias, frozenness, training mode."""
        layer = cls.__new__(cls)
        layer._set_up(dense, weight, dense.bias is not None)
        if layer.bias is not None:
            layer.bias.data.copy_(dense.bias.detach())
            layer.bias.requires_grad_(dense.bias.requires_grad)
        layer.cores.requires_grad_(dense.weight.requires_grad)
        return layer.train(dense.training)

    @torch.no_grad()
    def to_dense(self) -> nn.Linear | nn.Conv2d:
        """A plain PyTorch layer that computes the same."""
        own = self.cores[0]
        dense = self._empty_dense().to(own.device, own.dtype)
        dense.weight.copy_(self.weight)
        if self.bias is not None and dense.bias is not None:
            dense.bias.copy_(self.bias)
        return dense.train(self.training)

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of the dense layer this one stands for."""
        return self.factorized.dense_numel + (0 if self.bias is None else self.bias.numel())

    @property
    def parameters_left(self) -> int:
        """Number of parameters of this layer, bias included, ``lambda`` not."""
        return sum(parameter.numel() for parameter in self.parameters())

    def set_cores(self, cores: Sequence[Tensor]) -> None:
        """Put other cores in place, perhaps with other ranks; the parameters keep their identity."""
        self.factorized.set_cores(cores)

    def train(self, mode: bool = True) -> Self:
        """As for any module; what `perf` keeps for inference is dropped, since cores may have changed unseen."""
        if (perf := fast()) is not None:
            perf.forget(self)
        return super().train(mode)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _summary(self) -> str:
        """The part of ``repr`` that all layers share."""
        left, whole = self.parameters_left, self.dense_parameters
        format, layout = self.factorized.format.name, self.factorized.layout.name
        return (
            f"format={format!r}, layout={layout!r}, ranks={self.ranks}, "
            f"parameters={left:,} of {whole:,} ({whole / left:.3g}x)"
        )


def random_weight(
    format: Format,
    layout: Layout,
    max_rank: int | Sequence[int],
    init: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> FactorizedWeight:
    """A weight with random cores, whose entries have the variance that `init` names."""
    ranks = format.max_ranks(layout.sizes, max_rank)
    variance = start_variance(init, fan_in=math.prod(layout.shape[1:]), entries=math.prod(layout.shape))
    equation = format.equation(layout.sizes)
    cores = algebra.random_cores(equation, layout.sizes, ranks, variance, dtype=dtype, device=device)
    return FactorizedWeight(format, layout, cores)


@torch.no_grad()
def decomposed_weight(
    weight: Tensor, format: Format, layout: Layout, max_rank: int | Sequence[int] | None, tol: float
) -> FactorizedWeight:
    """A weight with the cores of a given one, to relative error `tol` and at most `max_rank`.

    One that is all zeros says nothing of ranks: it gets `max_rank`, or 20, and a last core of zeros to train with.
    """
    if not bool(weight.any()):
        ranks = DEFAULT_RANK if max_rank is None else max_rank
        found = random_weight(format, layout, ranks, "he", weight.dtype, weight.device)
        found.cores[-1].zero_()
        return found
    cores = format.decompose(layout.fold(weight.detach()), tol, max_rank)
    return FactorizedWeight(format, layout, [core.contiguous() for core in cores])


def start_variance(init: str, *, fan_in: int, entries: int) -> float:
    """The variance of a fresh weight's entries: He's ``2 / fan_in``, or the paper's ``sqrt(2 / entries)``."""
    if init not in INITS:
        raise ConfigError(f"init must be one of {INITS}, got {init!r}.")
    return 2.0 / max(fan_in, 1) if init == "he" else math.sqrt(2.0 / max(entries, 1))


def check_dense(dense: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse what is no dense layer of that kind, or has no weights yet."""
    if not isinstance(dense, kind):
        raise ConversionError(f"Expected an nn.{kind.__name__} to convert, got {type(dense).__name__}.")
    if any(nn.parameter.is_lazy(parameter) for parameter in dense.parameters()):
        raise ConversionError(f"{type(dense).__name__} is lazy and has no weights yet. Run one batch through it first.")


def own_precision(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast: a weight is materialised in the precision of its cores."""
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


def traced() -> bool:
    """Whether the pass is being compiled, exported or traced: what it chooses must not depend on the batch."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def sides(weight: FactorizedWeight) -> tuple[set[int], set[int]]:
    """The cores with factors of the outputs, and those with factors of the inputs."""
    layout, equation = weight.layout, weight.equation
    outs: set[int] = set()
    ins: set[int] = set()
    for mode, label in zip(layout.modes, equation.modes, strict=True):
        for n in mode:
            (outs if layout.axis_of[n] == 0 else ins).update(equation.owners(label))
    return outs, ins


def factor_operands(weight: FactorizedWeight, cores: Sequence[Tensor], which: Sequence[int]) -> list[algebra.Operand]:
    """Some of the cores, their modes taken apart into factors: mode labels become ``f0``, ``f1``, .."""
    layout, equation = weight.layout, weight.equation
    parts = dict(zip(equation.modes, layout.modes, strict=True))
    found: list[algebra.Operand] = []
    for k in which:
        shape: list[int] = []
        labels: list[str] = []
        for label, size in zip(equation.cores[k], cores[k].shape, strict=True):
            if label in parts:
                shape += [layout.factors[n] for n in parts[label]]
                labels += [f"f{n}" for n in parts[label]]
            else:
                shape.append(size)
                labels.append(label)
        found.append((cores[k].reshape(shape), tuple(labels)))
    return found
