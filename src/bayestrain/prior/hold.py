"""Layers whose weight has a free scale, because a normalisation behind them forgets it.

Under the prior such a weight would shrink to nothing: its size is free, and small is likely. So its norm is held: its
cores are rescaled together, and ``log lambda`` with them. The powers of a core's bonds add up to 2, so cores times c
with ``u + log c`` leave every entry where it was relative to its standard deviation.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from bayestrain.errors import ConfigError, HoldWarning
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer

NORMALISATIONS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")
"""Modules that cannot be traced, but only call the one inside of them."""

Followers = dict[str, list[str]]
"""Names of layers, each with those of the normalisations that use its output."""


class Normalised(NamedTuple):
    """Layers whose output a normalisation uses, and nothing else does."""

    sure: Followers
    """Those where the forward pass shows it."""
    possible: Followers
    """Those right before a normalisation in a network that cannot be traced, or with hooks there."""


@dataclass(frozen=True)
class Held:
    """A layer whose norm is held, and the normalisations behind it."""

    layer: nn.Module
    norms: tuple[nn.Module, ...] = ()

    def companions(self) -> list[tuple[Tensor, int]]:
        """What is rescaled with the weight so that the network computes the same, each with the power of the factor."""
        places = [(self.layer, "bias", 1)]
        places += [(norm, *own) for norm in self.norms for own in (("running_mean", 1), ("running_var", 2))]
        found = [(getattr(module, name, None), power) for module, name, power in places]
        return [(tensor, power) for tensor, power in found if tensor is not None]


def forgets_scale(module: nn.Module) -> bool:
    """Whether ``module(c * x)`` is ``module(x)`` for every c > 0: PyTorch's normalisations, and modules that say so."""
    return isinstance(module, NORMALISATIONS) or getattr(module, "forgets_scale", False) is True


def layers_to_hold(
    model: nn.Module, weights: Mapping[str, FactorizedWeight], wanted: str | Iterable[str]
) -> dict[str, Held]:
    """The layers to hold: those found, if `wanted` is "auto", or those named."""
    names = set(weights) if wanted == "auto" else {wanted} if isinstance(wanted, str) else set(wanted)
    if unknown := names - set(weights):
        raise ConfigError(
            f"hold_scale must name factorised layers, got {sorted(unknown)}. There are {sorted(weights)}."
        )
    sure, possible = normalised_layers(model) if names else Normalised({}, {})
    followers = {**possible, **sure}
    if wanted == "auto":
        if unsure := [name for name in weights if name in possible]:
            warnings.warn(
                f"A normalisation follows {', '.join(unsure)}, but hooks there, or a forward pass that torch.fx cannot "
                "trace, hide whether anything else uses their outputs, so their scale is not held. If nothing else "
                f"does, type hold_scale={[name for name in weights if name in followers]}.",
                HoldWarning,
                stacklevel=3,
            )
        names = set(sure)
    return {
        name: Held(model.get_submodule(name), tuple(model.get_submodule(norm) for norm in followers.get(name, [])))
        for name in weights
        if name in names
    }


def normalised_layers(model: nn.Module) -> Normalised:
    """The factorised layers of `model` whose scale is free, in training and in evaluation mode.

    The forward pass is traced with torch.fx. If that fails, neighbours in an `nn.Sequential` count as sure, and other
    modules that were registered one right after the other as possible. A normalisation used in several places does not
    count: its statistics belong to several layers. Nor does a layer that shares its weight with another.
    """
    if type(model).__name__ in WRAPPERS:
        ((prefix, inner),) = model.named_children()
        found = normalised_layers(inner)
        return Normalised(*({f"{prefix}.{n}": [f"{prefix}.{m}" for m in ms] for n, ms in f.items()} for f in found))
    try:
        training, predicting = (_in_graph(model, mode) for mode in (True, False))
        sure, possible = {n: norms for n, norms in training.items() if predicting.get(n) == norms}, Followers()
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        sure, possible = _in_order(model)
    layers = [module for module in model.modules() if isinstance(module, TensorLayer)]
    shared = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    for name, norms in {**sure, **possible}.items():
        layer = model.get_submodule(name)
        if any(shared[id(parameter)] > 1 for parameter in layer.parameters()):
            sure.pop(name, None)
            possible.pop(name, None)
        elif layer._forward_hooks or any(model.get_submodule(norm)._forward_pre_hooks for norm in norms):
            possible[name] = sure.pop(name, norms)
    return Normalised(sure, possible)


class _Tracer(fx.Tracer):
    """Takes factorised layers and normalisations as a whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TensorLayer) or forgets_scale(m) or super().is_leaf_module(m, module_qualified_name)


def _in_graph(model: nn.Module, training: bool) -> Followers:
    """Layers of which every use, in every call of one forward pass, is a normalisation that is called once.

    A copy that shares the parameters is traced, so that the model itself keeps its attributes and buffers. Flags that
    the forward pass branches on take their defaults.
    """
    replica = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in replica.modules():
        module.training = training
    arguments = inspect.signature(replica.forward).parameters.items()
    flags = {n: p.default for n, p in arguments if isinstance(p.default, bool | int | float | str | None)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = _Tracer().trace(replica, flags or None)
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    norms = {name for name, count in calls.items() if count == 1 and forgets_scale(model.get_submodule(name))}
    stored = {v.node for m in replica.modules() for v in tree_leaves(vars(m)) if isinstance(v, fx.Proxy)}
    elsewhere = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    users: Followers = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(name := str(node.target)), TensorLayer):
            own = [str(user.target) if user.op == "call_module" else "" for user in node.users]
            alone = own and node not in stored and not any(used.startswith(f"{name}.") for used in elsewhere)
            users.setdefault(name, []).extend(own if alone else [""])
    return {name: list(dict.fromkeys(own)) for name, own in users.items() if norms.issuperset(own)}


def _in_order(model: nn.Module) -> Normalised:
    """Layers with a normalisation of their size right behind them, as they were registered."""
    found = Normalised({}, {})
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for prefix, parent in model.named_modules():
        for (name, layer), (norm_name, norm) in pairwise(parent.named_children()):
            once = places[id(layer)] == places[id(norm)] == 1
            if once and isinstance(layer, TensorLayer) and forgets_scale(norm):
                size = getattr(norm, "num_features", getattr(norm, "num_channels", layer.outputs))
                kind = found.sure if type(parent) is nn.Sequential else found.possible
                if size == layer.outputs:
                    kind[f"{prefix}.{name}".lstrip(".")] = [f"{prefix}.{norm_name}".lstrip(".")]
    return found
