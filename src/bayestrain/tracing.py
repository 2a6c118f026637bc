"""What a network does with the outputs of its layers, by a symbolic forward pass that leaves no marks in it."""

import copy
import inspect
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from bayestrain.layers import TTLayer

CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)


class Tracer(fx.Tracer):
    """Sees tensor-train layers as a whole, and what else a network does with its parameters and outputs."""

    def __init__(self, looked_at: set[int]) -> None:
        super().__init__()
        self.looked_at = looked_at
        """Parameters, by identity, that code outside of the layers has asked for."""
        self.kept: set[fx.Node] = set()
        """What modules have kept of the pass, as attributes or in lists and the like."""

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, nn.Parameter):
            self.looked_at.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TTLayer) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module, tracer: Tracer) -> fx.Graph:
    """The graph of a forward pass in the model's present mode, with the defaults of its flags where it needs them."""
    with warnings.catch_warnings(), _undisturbed(model):
        warnings.simplefilter("ignore")
        try:
            graph = tracer.trace(model)
        except Exception:
            fixed = {
                name: parameter.default
                for name, parameter in inspect.signature(model.forward).parameters.items()
                if parameter.default is None or isinstance(parameter.default, bool | int | float | str)
            }
            if not fixed:
                raise
            graph = tracer.trace(model, fixed)
        attributes = [value for module in model.modules() for value in vars(module).values()]
        inside = [item for held in _containers(attributes) for item in _items(held)]
        tracer.kept = {value.node for value in (*attributes, *inside) if isinstance(value, fx.Proxy)}
        return graph


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards attributes, what they contain, and buffers are what they were: a forward pass may leave its marks."""
    buffers = [
        (buffer, buffer.clone(), buffer._version)
        for buffer in model.buffers()
        if buffer.layout == torch.strided and not (buffer.is_meta or buffer.is_quantized or buffer.is_inference())
    ]
    before = [(module, dict(vars(module))) for module in model.modules()]
    contents = [(held, copy.copy(held)) for held in _containers([v for _, own in before for v in own.values()])]
    try:
        yield
    finally:
        for module, attributes in before:
            own = vars(module)
            for name in [name for name in own if name not in attributes]:
                del own[name]
            own.update(attributes)
        for held, content in contents:
            held.clear()
            held.update(content) if isinstance(held, dict | set) else held.extend(content)
        with torch.no_grad():
            for buffer, value, version in buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _containers(values: Iterable[object]) -> list[Any]:
    """The lists, dicts and sets among these values, and those inside of them."""
    found: dict[int, Any] = {}
    waiting: list[Any] = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) in CONTAINERS and id(value) not in found:
            found[id(value)] = value
            waiting += _items(value)
    return list(found.values())


def _items(held: Any) -> list[Any]:
    return list(held.values() if isinstance(held, dict) else held)
