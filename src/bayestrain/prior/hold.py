"""Layers whose weight has a free scale, because a normalisation behind them forgets it.

Under the prior such a weight would shrink to nothing, so its norm is held: its cores are rescaled together, and
``u = log lambda`` with them. The powers of a core's bonds add up to 2, so cores times c with ``u + log c`` leave every
entry where it was relative to its standard deviation.
"""

import copy
import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from bayestrain.errors import ConfigError, HoldWarning
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer

NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")  # cannot be traced; call the one inside

Followers = dict[nn.Module, set[nn.Module]]  # layers, each with the normalisations that use its output


class Normalised(NamedTuple):
    """Layers whose output normalisations use, and nothing else does: their names, each with those of the norms."""

    sure: dict[str, list[str]]  # the forward pass shows it
    possible: dict[str, list[str]]  # right before a normalisation, but the network cannot be traced or has hooks there


class Held(NamedTuple):
    """A layer whose norm is held, and the normalisations behind it."""

    layer: nn.Module
    norms: tuple[nn.Module, ...] = ()

    def companions(self) -> list[tuple[Tensor, int]]:
        """What is rescaled with the weight so that the network computes the same, each with the power of the factor."""
        found = [(getattr(self.layer, "bias", None), 1)]
        for norm in self.norms:
            found += [(getattr(norm, "running_mean", None), 1), (getattr(norm, "running_var", None), 2)]
        return [(tensor, power) for tensor, power in found if tensor is not None]


def forgets_scale(module: nn.Module) -> bool:
    """Whether ``module(c * x)`` is ``module(x)`` for every c > 0: PyTorch's normalisations, and modules that say so."""
    return isinstance(module, NORMALISATIONS) or getattr(module, "forgets_scale", False) is True


def layers_to_hold(
    model: nn.Module, weights: Mapping[str, FactorizedWeight], wanted: str | Iterable[str]
) -> dict[str, Held]:
    """The layers to hold: those found, if `wanted` is "auto", or those named; none with a frozen parameter."""
    names = set(weights) if wanted == "auto" else {wanted} if isinstance(wanted, str) else set(wanted)
    if unknown := names - set(weights):
        raise ConfigError(f"hold_scale must name factorised layers of {sorted(weights)}, got {sorted(unknown)}.")
    sure, possible = normalised_layers(model) if names else Normalised({}, {})
    if wanted == "auto":
        names = set(sure)
        if unsure := [name for name in weights if name in possible]:
            warnings.warn(
                f"A normalisation follows {', '.join(unsure)}, but hooks or a forward pass that torch.fx cannot trace "
                "hide whether anything else uses its output, so its scale is not held. If nothing else does, type "
                f"hold_scale={[name for name in weights if name in sure | possible]}.",
                HoldWarning,
                stacklevel=3,
            )
    layers = {name: model.get_submodule(name) for name in weights if name in names}
    return {
        name: Held(layer, tuple(map(model.get_submodule, (sure | possible).get(name, ()))))
        for name, layer in layers.items()
        if all(parameter.requires_grad for parameter in layer.parameters())
    }


def normalised_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (TensorLayer,)) -> Normalised:
    """The layers of these kinds in `model` whose scale is free, in training and in evaluation mode.

    The forward pass is traced with torch.fx. If that fails, neighbours in an `nn.Sequential` count as sure, and other
    modules registered one right after the other as possible. A normalisation used in several places does not count,
    because its statistics belong to several layers, nor does a layer that shares its weight.
    """
    names = {module: name for name, module in model.named_modules()}
    shared = Counter(p for layer in names if isinstance(layer, kinds) for p in layer.parameters())
    while type(model).__name__ in WRAPPERS:
        (model,) = model.children()
    try:
        training, predicting = (_in_graph(model, mode, kinds) for mode in (True, False))
        shown, likely = {layer: own for layer, own in training.items() if predicting.get(layer) == own}, Followers()
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        shown, likely = _in_order(model, kinds)
    found = Normalised({}, {})
    for layer, norms in (shown | likely).items():
        if all(shared[parameter] == 1 for parameter in layer.parameters()):
            hooks = layer._forward_hooks or any(norm._forward_pre_hooks for norm in norms)
            kind = found.sure if layer in shown and not hooks else found.possible
            kind[names[layer]] = sorted(names[norm] for norm in norms)
    return found


class _Tracer(fx.Tracer):
    """Takes factorised layers and normalisations as a whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TensorLayer) or forgets_scale(m) or super().is_leaf_module(m, module_qualified_name)


def _in_graph(model: nn.Module, training: bool, kinds: tuple[type[nn.Module], ...]) -> Followers:
    """Layers of which every use, in every call of one forward pass, is a normalisation that is called once.

    A copy is traced, so that the model keeps its attributes and buffers; flags take their defaults.
    """
    replica = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).train(training)
    arguments = inspect.signature(replica.forward).parameters.items()
    flags = {n: p.default for n, p in arguments if isinstance(p.default, bool | int | float | str | None)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = _Tracer().trace(replica, flags or None).nodes
    called = {node: model.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    calls = Counter(called.values())
    norms = {node for node, module in called.items() if forgets_scale(module) and calls[module] == 1}
    stored = {v.node for m in replica.modules() for v in tree_leaves(vars(m)) if isinstance(v, fx.Proxy)}
    read = {id(attrgetter(str(node.target))(replica)) for node in nodes if node.op == "get_attr"}
    users: dict[nn.Module, set[fx.Node]] = defaultdict(set)
    for node, layer in called.items():
        if isinstance(layer, kinds):
            hidden = not node.users or node in stored or not read.isdisjoint(map(id, layer.parameters()))
            users[layer] |= {node} if hidden else set(node.users)  # no layer is a normalisation
    return {layer: {called[user] for user in own} for layer, own in users.items() if own <= norms}


def _in_order(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[Followers, Followers]:
    """Layers with a normalisation registered right behind them: in an `nn.Sequential`, and elsewhere."""
    sequential, others = Followers(), Followers()
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for parent in model.modules():
        for layer, norm in pairwise(parent.children()):
            if isinstance(layer, kinds) and forgets_scale(norm) and places[layer] == places[norm] == 1:
                (sequential if type(parent) is nn.Sequential else others)[layer] = {norm}
    return sequential, others
