"""The graph of a network's forward pass, traced symbolically on a copy so that the network itself is not changed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Iterable
from types import MethodType
from typing import Any, NamedTuple

from torch import fx, nn

from bayestrain.nn.layer import TensorLayer

NORMALISATIONS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)

CONTAINERS = (dict, list, tuple, set, deque)


def forgets_scale(module: nn.Module) -> bool:
    """Whether ``module(c * x)`` is ``module(x)`` for every c > 0: PyTorch's normalisations, and modules that say so."""
    return isinstance(module, NORMALISATIONS) or getattr(module, "forgets_scale", False) is True


class Traced(NamedTuple):
    """A forward pass, and what it did besides computing an output."""

    graph: fx.Graph
    kept: set[fx.Node]
    """Values that modules stored, as attributes or in containers."""


def trace(model: nn.Module, training: bool, looked_at: set[int]) -> Traced:
    """Trace a copy of the model in training or evaluation mode; raises whatever the forward pass raises.

    Flags that the forward pass branches on take their defaults. Parameters that code outside of their own layer uses
    are added to `looked_at`, by identity.
    """
    # The copy has modules, containers and buffers of its own. All else is shared: not everything can be copied.
    buffers, own = {id(buffer) for buffer in model.buffers()}, (nn.Module, MethodType, *CONTAINERS)
    shared = {id(v): v for v in _stored(model) if not isinstance(v, own) and id(v) not in buffers}
    replica = copy.deepcopy(model, shared)
    for module in replica.modules():
        module.training = training
    tracer = _Tracer(looked_at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = tracer.trace(replica)
        except Exception:
            arguments = inspect.signature(replica.forward).parameters.items()
            flags = {n: p.default for n, p in arguments if isinstance(p.default, bool | int | float | str | None)}
            if not flags:
                raise
            graph = tracer.trace(replica, flags)
    return Traced(graph, {value.node for value in _stored(replica) if isinstance(value, fx.Proxy)})


def _stored(model: nn.Module) -> Iterable[Any]:
    """Everything in the attributes of a model's modules, and in containers among them."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [vars(module) for module in model.modules()]
    while waiting:
        held = waiting.pop()
        new = {id(value): value for value in (held.values() if isinstance(held, dict) else held)}
        waiting += [value for key, value in new.items() if key not in found and isinstance(value, CONTAINERS)]
        found |= new
    return found.values()


class _Tracer(fx.Tracer):
    """Takes factorised layers and normalisations as a whole."""

    def __init__(self, looked_at: set[int]) -> None:
        super().__init__()
        self.looked_at = looked_at

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, nn.Parameter):
            self.looked_at.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TensorLayer) or forgets_scale(m) or super().is_leaf_module(m, module_qualified_name)
