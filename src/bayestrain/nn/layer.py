"""What all factorised layers share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Size, Tensor, nn

from bayestrain.errors import ConversionError, ShapeError, check_choice
from bayestrain.formats import Format, get
from bayestrain.nn.factorized import DEFAULT_RANK, INITS, FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.layout import LAYOUTS, Layout
from bayestrain.nn.precision import own_precision, traced
from bayestrain.nn.sizes import count_parameters, dense_parameters

Modes = Sequence[int] | None


class TensorLayer(nn.Module, ABC):
    """A layer whose weight is factorised. Its parameters are the cores of `factorized` and, perhaps, `bias`.

    A new kind of layer names the dense layer it stands for, how a weight of its shape folds, and how it uses the
    weight: `multiply` and `plan`.

    Args:
        *args, **kwargs, device, dtype: as for the dense layer.
        format: name of a format in `bayestrain.formats.FORMATS`, or a `Format`.
        layout: "paired" fuses mode k of the outputs with mode k of the inputs (a TT-matrix); "split" puts all modes of
            the outputs first, so that a batch goes through two thin products.
        in_modes, out_modes: factors of the two sizes; chosen automatically when left out. Where their product is larger
            than the size, the surplus exists only inside.
        max_rank: one number, or one per bond; cut down to what the modes can use.
        init: "he" (variance ``2 / fan_in``) or "paper" (``sqrt(2 / Q)``, Q the number of entries).
    """

    dense_kind: ClassVar[type[nn.Module]]
    settings: ClassVar[tuple[str, ...]] = ()
    """What the dense layer is built with and keeps as attributes; this layer has them, too."""
    input_axis: ClassVar[int]
    """The axis of an input, counted from the end, that has the features or channels."""
    bias: nn.Parameter | None

    def __init__(
        self,
        *args: Any,
        format: str | Format = "tt",
        layout: str = "paired",
        in_modes: Modes = None,
        out_modes: Modes = None,
        max_rank: int | Sequence[int] = DEFAULT_RANK,
        init: str = "he",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        dense: Any = self.dense_kind(*args, **{**kwargs, "device": "meta"})  # checks its arguments as PyTorch does
        how = self.how(dense, format, layout, in_modes=in_modes, out_modes=out_modes)
        check_choice("init", init, INITS)
        self._become(
            dense, FactorizedWeight.random(*how, max_rank, self.start(dense, init), dtype=dtype, device=device)
        )

    def _become(self, dense: Any, weight: FactorizedWeight) -> None:
        """Initialise with this weight and all else that a dense layer has; a bias on the meta device is drawn."""
        super().__init__()
        for name in self.settings:
            setattr(self, name, getattr(dense, name))
        self.outputs, self.inputs = weight.shape[:2]
        self.out_modes, self.in_modes = weight.layout.splits[:2]
        self.factorized = weight.requires_grad_(dense.weight.requires_grad)
        bias, like = getattr(dense, "bias", None), weight.cores[0]
        if bias is not None and bias.is_meta:
            bound = 1.0 / math.sqrt(math.prod(weight.shape[1:]))  # as PyTorch's layers start theirs
            bias = torch.empty_like(bias, dtype=like.dtype, device=like.device).uniform_(-bound, bound)
        own = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=dense.bias.requires_grad)
        self.register_parameter("bias", own)
        self.train(dense.training)

    @staticmethod
    def oriented(weight: Tensor) -> Tensor:
        """The dense layer's weight with its outputs first, as `factorized` has it; and back again."""
        return weight

    @classmethod
    def start(cls, dense: Any, init: str) -> str | float:  # noqa: ARG003
        """How `FactorizedWeight.random` starts the weight that replaces a dense layer's."""
        return init

    @staticmethod
    @abstractmethod
    def fold(shape: Size, format: Format, layout: str, in_modes: Modes = None, out_modes: Modes = None) -> Layout:
        """The layout of a weight; modes not given are chosen by the format's default."""

    @classmethod
    def how(
        cls, dense: Any, format: str | Format = "tt", layout: str = "paired", **modes: Modes
    ) -> tuple[Format, Layout]:
        """The format, and the layout of a dense layer's weight; raises if no layer of this class can stand for it."""
        kind = type(dense).__name__
        if not isinstance(dense, cls.dense_kind):
            raise ConversionError(f"Expected an nn.{cls.dense_kind.__name__} to convert, got {kind}.")
        if is_lazy(dense):
            raise ConversionError(f"{kind} is lazy and has no weights yet. Run one batch through the model first.")
        if (groups := getattr(dense, "groups", 1)) != 1:
            raise ConversionError(f"groups must be 1, got groups={groups}. A grouped kernel is small: leave it dense.")
        check_choice("layout", layout, LAYOUTS)
        weight: Any = dense.weight
        return get(format), cls.fold(cls.oriented(weight).shape, get(format), layout, **modes)

    @classmethod
    def from_dense(
        cls, dense: Any, max_rank: int | Sequence[int] | None = None, tol: float = 0.0, **folding: Any
    ) -> Self:
        """The dense layer with its own weight decomposed, to relative error `tol` and at most `max_rank`.

        Format, layout and modes are keywords as in the constructor.
        """
        how, weight = cls.how(dense, **folding), cls.oriented(dense.weight.detach())
        return cls.of(dense, FactorizedWeight.decomposed(weight, *how, max_rank, tol))

    @classmethod
    def of(cls, dense: Any, weight: FactorizedWeight) -> Self:
        """A layer with this weight, and the settings, bias and training mode of a dense layer; frozen where it is."""
        layer = cls.__new__(cls)
        layer._become(dense, weight)
        return layer

    def blank(self) -> Any:
        """The plain PyTorch layer that this one stands for, without values."""
        settings: dict[str, Any] = {name: getattr(self, name) for name in self.settings}
        if "bias" in signature(self.dense_kind).parameters:
            settings["bias"] = self.bias is not None
        return self.dense_kind(**settings, device="meta")

    @torch.no_grad()
    def to_dense(self) -> Any:
        """A plain PyTorch layer that computes the same."""
        dense = self.blank()
        dense.weight = nn.Parameter(self.weight.clone(memory_format=torch.contiguous_format))
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.clone())
        return dense.train(self.training)

    def check(self, x: Tensor) -> None:
        """Raise unless an input has the right number of features or channels."""
        axis = self.input_axis
        if x.ndim < -axis or x.shape[axis] != self.inputs:
            raise ShapeError(
                f"{type(self).__name__} expects size {self.inputs} in dimension {axis}, got an input {tuple(x.shape)}."
            )

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        perf = None if traced() else fast()
        if perf is not None and (y := perf.multiply(self, x)) is not None:
            return y  # type: ignore[no-any-return]
        return self.multiply(x)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """The readable forward pass."""

    @abstractmethod
    def plan(self, x: Tensor) -> tuple[str, float]:
        """How `multiply` runs this input, and its multiplications relative to the dense layer's."""

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
            return self.oriented(self.factorized.dense())

    def train(self, mode: bool = True) -> Self:
        """As for any module; what `perf` keeps for inference is dropped, since cores may have changed unseen."""
        if (perf := fast()) is not None:
            perf.forget(self)
        return super().train(mode)

    def __repr__(self) -> str:
        known: dict[str, object] = {name: getattr(self, name) for name in self.settings}
        known |= {"bias": self.bias is not None, "format": self.factorized.format.name}
        known |= {name: getattr(self, name) for name in ("in_modes", "out_modes", "ranks")}
        text = ", ".join(f"{name}={value!r}" for name, value in known.items())
        return f"{type(self).__name__}({text}, parameters={count_parameters(self):,} of {dense_parameters(self):,})"


def is_lazy(module: nn.Module) -> bool:
    """Whether it has no weights before its first batch."""
    return any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False))
