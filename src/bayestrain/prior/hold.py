"""Layers whose weight has a free scale, because a normalisation behind them forgets it.

Under the prior such a weight would shrink to nothing: its size is free, and small is likely. So its norm is held: its
cores are rescaled together, and ``log lambda`` with them. The powers of a core's bonds add up to 2, so cores times c
with ``u + log c`` leave every entry where it was relative to its standard deviation.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from bayestrain.errors import ConfigError, HoldWarning
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer
from bayestrain.prior.tracing import Traced, forgets_scale, trace

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")
"""Modules that cannot be traced, but only call the one inside of them."""

Followers = dict[str, list[str]]
"""Names of layers, each with those of the normalisations that use its output."""


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


class Normalised(NamedTuple):
    """Layers whose output a normalisation uses, and nothing else does."""

    sure: Followers
    """Those where the forward pass shows it."""
    possible: Followers
    """Those right before a normalisation in a network that cannot be traced, or with hooks there."""


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
    count: its statistics belong to several layers. Nor does a layer whose parameters other code or another layer uses.
    """
    if type(model).__name__ in WRAPPERS:
        ((prefix, inner),) = model.named_children()
        found = normalised_layers(inner)
        return Normalised(*({f"{prefix}.{n}": [f"{prefix}.{m}" for m in ms] for n, ms in f.items()} for f in found))
    looked_at: set[int] = set()
    try:
        training, predicting = (_in_graph(model, trace(model, mode, looked_at)) for mode in (True, False))
        sure, possible = {n: norms for n, norms in training.items() if predicting.get(n) == norms}, Followers()
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        sure, possible = _in_order(model)
    owners = Counter(
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.ParameterList)
        for parameter in module.parameters(recurse=isinstance(module, TensorLayer))
    )
    for name, norms in [*sure.items(), *possible.items()]:
        layer = model.get_submodule(name)
        if any(owners[id(parameter)] > 1 or id(parameter) in looked_at for parameter in layer.parameters()):
            for place in (sure, possible):
                place.pop(name, None)
        elif layer._forward_hooks or any(model.get_submodule(norm)._forward_pre_hooks for norm in norms):
            possible[name] = norms
            sure.pop(name, None)
    return Normalised(sure, possible)


def _in_graph(model: nn.Module, traced: Traced) -> Followers:
    """Layers of which every use, in every call, is a normalisation that is called once."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    calls = Counter(str(node.target) for node in nodes)
    norms = {name for name, count in calls.items() if count == 1 and forgets_scale(model.get_submodule(name))}
    users: Followers = {}
    for node in nodes:
        if isinstance(model.get_submodule(name := str(node.target)), TensorLayer):
            own = [str(user.target) if user.op == "call_module" else "" for user in node.users]
            users.setdefault(name, []).extend([*own, ""] if node in traced.kept or not own else own)
    return {name: list(dict.fromkeys(own)) for name, own in users.items() if norms.issuperset(own)}


def _in_order(model: nn.Module) -> Normalised:
    """Layers with a normalisation of their size right behind them, as they were registered."""
    found = Normalised({}, {})
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for prefix, parent in model.named_modules():
        for (name, layer), (norm_name, norm) in pairwise(parent.named_children()):
            if not (
                isinstance(layer, TensorLayer) and forgets_scale(norm) and places[id(layer)] == places[id(norm)] == 1
            ):
                continue
            if getattr(norm, "num_features", getattr(norm, "num_channels", layer.outputs)) == layer.outputs:
                kind = found.sure if type(parent) is nn.Sequential else found.possible
                kind[f"{prefix}.{name}".lstrip(".")] = [f"{prefix}.{norm_name}".lstrip(".")]
    return found
