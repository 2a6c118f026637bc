"""Any named parameter of any module as a `FactorizedWeight`, made whole wherever the module reads it.

The module keeps its class's code: it gets a subclass in which the parameter is a property. Attention's packed
projection, recurrent layers and experts are factorised so.
"""

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from bayestrain.errors import ConversionError
from bayestrain.formats import Format
from bayestrain.formats.modes import check_modes
from bayestrain.nn.attention import attend, forget
from bayestrain.nn.conv import TWO_MODES_FROM
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import Modes
from bayestrain.nn.layout import Layout
from bayestrain.nn.linear import TensorLinear
from bayestrain.nn.precision import own_precision, traced

HOLDER = "factorized"
"""The name of the submodule that holds a module's factorised parameters by their names."""

_made: ContextVar[dict[Any, Tensor]] = ContextVar("made")
"""What the forward pass that is running has made: modules read their parameters several times."""


def fold(
    shape: tuple[int, ...], format: Format, layout: str, in_modes: Modes = None, out_modes: Modes = None
) -> Layout:
    """The layout of any parameter: of a matrix that of a linear layer, else axis after axis."""
    if len(shape) == 2:
        return TensorLinear.fold(shape, format, layout, in_modes, out_modes)  # type: ignore[arg-type]
    if in_modes or out_modes:
        raise ConversionError(f"Modes can be given for parameters of two axes, this one has shape {shape}.")
    splits = tuple(check_modes(n, None, 2 if format.splits and n >= TWO_MODES_FROM else 1, "modes") for n in shape)
    return Layout(shape, shape, splits, tuple((k,) for k in range(sum(map(len, splits)))), "split")


def put_(module: nn.Module, weights: Mapping[str, FactorizedWeight]) -> None:
    """Replace parameters of a module, in place, by these weights."""
    known = getattr(module, HOLDER, None)
    if known is not None and not is_parametrised(module):
        raise ConversionError(f"{type(module).__name__} has an attribute {HOLDER!r} already. Leave it dense.")
    for name, weight in weights.items():
        weight.requires_grad_(module._parameters[name].requires_grad)  # type: ignore[union-attr]
        del module._parameters[name]
    holder = nn.Module() if known is None else known
    for name, weight in weights.items():
        holder.add_module(name, weight)
    base = module.dense_kind if known is not None else type(module)
    module.__class__ = _kind(base, tuple(holder._modules))  # type: ignore[arg-type]
    module.add_module(HOLDER, holder)
    if isinstance(module, nn.RNNBase):
        del module.__dict__["_flat_weights"]


def take_(module: Any) -> nn.Module:
    """Undo `put_`, in place: the module has its class and whole parameters again."""
    names, holder = type(module).factorized_names, module._modules.pop(HOLDER)
    module.__class__ = type(module).dense_kind
    for name in names:
        weight = holder.get_submodule(name)
        trains = weight.cores[0].requires_grad
        module.register_parameter(name, nn.Parameter(weight.dense().detach(), requires_grad=trains))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module  # type: ignore[no-any-return]


def is_parametrised(module: nn.Module) -> bool:
    """Whether parameters of this module are factorised."""
    return hasattr(type(module), "factorized_names")


@cache
def _kind(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass in which these parameters are made from their factors."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(base, nn.MultiheadAttention):
            packed = self._modules[HOLDER]._modules.get("in_proj_weight")
            if (found := attend(self, packed, *args, **kwargs)) is not None:
                return found
        if traced():
            return base.forward(self, *args, **kwargs)
        token = _made.set({})
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            _made.reset(token)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *rest = base.__reduce_ex__(self, protocol)
        return _blank, (base, names), *rest

    def to_dense(self: Any) -> nn.Module:
        """The module with whole parameters, as it was before `tensorize_`."""
        return take_(copy.deepcopy(self))

    def train(self: Any, mode: bool = True) -> Any:
        forget(self)
        return base.train(self, mode)

    def read(self: Any) -> list[Any]:
        return [getattr(self, name, None) for name in self._flat_weights_names]

    found: dict[str, Any] = {name: property(partial(_whole, name=name)) for name in names}
    found |= {"__reduce_ex__": reduce, "__module__": base.__module__, "__doc__": base.__doc__, "to_dense": to_dense}
    found |= {"forward": forward, "train": train, "dense_kind": base, "factorized_names": names}
    if issubclass(base, nn.RNNBase):  # which keeps a list of whole weights, and moves them
        found |= {"_flat_weights": property(read, lambda *_: None), "flatten_parameters": lambda _: None}
    kind: Any = type(base.__name__, (base,), found)
    return kind  # type: ignore[no-any-return]


def _blank(base: Any, names: tuple[str, ...]) -> nn.Module:
    """An instance without state, for copies and pickles."""
    kind: Any = _kind(base, names)
    return kind.__new__(kind)  # type: ignore[no-any-return]


def _whole(module: nn.Module, name: str) -> Tensor:
    weight: Any = module._modules[HOLDER]._modules[name]  # type: ignore[union-attr]
    made = {} if traced() else _made.get({})
    if weight not in made:
        with own_precision(weight.cores[0]):
            made[weight] = weight.dense()
    return made[weight]
