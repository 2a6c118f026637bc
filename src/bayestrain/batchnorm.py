"""Layers whose output goes straight into a batch norm: the scale of their weight is free, and their bias idle."""

import copy
import inspect
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.layers import TTConv2d, TTLayer
from bayestrain.layers.evaluation import evaluating

Kinds = tuple[type[nn.Module], ...]

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")
"""Modules that cannot be traced, but call what is in them as a whole."""

CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)


class IdleBiases:
    """Leaves biases of convolutions out of training that a batch norm takes away again.

    Adding them, and summing up their gradients, which are zero, is a noticeable part of a network's work on a GPU.

    ::

        idle = IdleBiases(model)
        with idle():
            F.cross_entropy(model(x), y).backward()

    They are set to zero and the running means lowered by them, which changes nothing that the model computes. Inside of
    ``with`` they are not there; outside the model is an ordinary one. Biases stay where it is not certain that they are
    idle: in a model that cannot be traced, or with hooks at that place, a batch norm that `model.train()` leaves in
    evaluation mode, a bias that something else looks at.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[str, list[str]] = {}
        """The layers with such biases, and the batch norms behind each."""
        self._found: list[tuple[nn.Module, list[_BatchNorm]]] = []
        try:
            with evaluating(model):
                predicting, looked_at = _idle(model)
                training, looked_at_too = _idle(model.train())
                kept = {id(module) for module in model.modules() if not module.training}
        except Exception:  # as in `normalised_layers`
            return
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for name, norms in training.items():
            layer, bias = model.get_submodule(name), model.get_submodule(name).bias
            followers = [norm for each in norms if isinstance(norm := model.get_submodule(each), _BatchNorm)]
            if (
                predicting.get(name) == norms
                and isinstance(bias, nn.Parameter)
                and bias.requires_grad
                and uses[id(bias)] == 1
                and id(bias) not in looked_at | looked_at_too
                and not layer._forward_hooks
                and not any(id(norm) in kept or norm._forward_pre_hooks for norm in followers)
            ):
                self.names[name] = norms
                self._found.append((layer, followers))
        self.empty()

    @property
    def layers(self) -> list[nn.Module]:
        """The layers with such biases."""
        return [layer for layer, _ in self._found]

    @torch.no_grad()
    def empty(self) -> None:
        """Move the biases into the running means, for example after a state was loaded."""
        for layer, norms in self._found:
            bias = layer.bias
            assert isinstance(bias, nn.Parameter)
            for norm in norms:
                if norm.running_mean is not None:
                    norm.running_mean -= bias
            bias.zero_()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        biases = [layer._parameters["bias"] for layer in self.layers]
        try:
            for layer in self.layers:
                layer._parameters["bias"] = None
            yield
        finally:
            for layer, bias in zip(self.layers, biases, strict=True):
                layer._parameters["bias"] = bias


def _idle(model: nn.Module) -> tuple[dict[str, list[str]], set[int]]:
    """Convolutions that only batch norms follow, with these; and the parameters that the model itself looks at."""
    tracer = _Tracer(set())
    graph = _trace(model, tracer)
    found = _by_graph(model, graph, (TTConv2d, nn.Conv2d), tracer.kept)
    exact = {name: norms for name, norms in found.items() if type(model.get_submodule(name)) in (TTConv2d, nn.Conv2d)}
    return exact, tracer.looked_at


@dataclass(frozen=True)
class Normalised:
    """TT layers whose output is used by batch norms and nothing else, each with the names of these."""

    seen: dict[str, list[str]]
    """Those of which that was seen."""
    doubtful: dict[str, list[str]]
    """Those that stand before a batch norm where the network could not be traced, or that have hooks there."""


def normalised_layers(model: nn.Module) -> Normalised:
    """The layers of `model` whose scale is free, because batch norms alone see it, in training and in evaluation mode.

    A batch norm that is used in several places does not count: its statistics belong to more than one layer. Nor does a
    layer whose weight the network looks at by itself, or shares.

    The model is traced symbolically, as called with its defaults if need be. Where it cannot be (its forward branches
    on data), its parts are, each by itself. Then layers in an `nn.Sequential`, or registered right before a batch norm,
    are doubtful: the network may use what lies between.
    """
    with evaluating(model):
        predicting = _in_this_mode(model)
        training = _in_this_mode(model.train())
    seen = {name: norms for name, norms in training.seen.items() if predicting.seen.get(name) == norms}
    either, other = ({**found.doubtful, **found.seen} for found in (training, predicting))
    doubtful = training.doubtful.keys() | predicting.doubtful.keys()
    return Normalised(seen, {name: either[name] for name in either if name in doubtful and name in other})


def _in_this_mode(model: nn.Module) -> Normalised:
    looked_at: set[int] = set()
    found = _normalised(model, looked_at)
    owners = _owners(model)
    elsewhere = {
        name
        for name in (*found.seen, *found.doubtful)
        for parameter in model.get_submodule(name).parameters()
        if id(parameter) in looked_at or owners[id(parameter)] > 1
    }
    hooked = {
        name
        for name, norms in found.seen.items()
        if model.get_submodule(name)._forward_hooks
        or any(model.get_submodule(norm)._forward_pre_hooks for norm in norms)
    }
    doubtful = found.doubtful | {name: found.seen[name] for name in found.seen if name in hooked}
    return Normalised(
        {name: norms for name, norms in found.seen.items() if name not in elsewhere | hooked},
        {name: norms for name, norms in doubtful.items() if name not in elsewhere},
    )


def _normalised(model: nn.Module, looked_at: set[int]) -> Normalised:
    """What a trace shows; parameters that forward passes have asked for are added to `looked_at`."""
    tracer = _Tracer(looked_at)
    try:
        return Normalised(_by_graph(model, _trace(model, tracer), (TTLayer,), tracer.kept), {})
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        whole = type(model) is nn.Sequential or type(model).__name__ in WRAPPERS
    seen, doubtful = (_by_order(model), {}) if whole else ({}, _by_order(model))
    parts = Counter(id(module) for part in model.children() for module in part.modules())
    for part, module in model.named_children():
        inside = _normalised(module, looked_at)
        for found, names in ((seen, inside.seen), (doubtful, inside.doubtful)):
            for name, norms in names.items():
                sure = found is seen and (whole or _enclosed(module, name))
                alone = all(parts[id(module.get_submodule(each))] == 1 for each in (name, *norms))
                place = seen if sure and alone else doubtful
                place[f"{part}.{name}"] = [f"{part}.{norm}" for norm in norms]
    return Normalised(seen, doubtful)


def _enclosed(part: nn.Module, name: str) -> bool:
    """Whether the module of that name lies in one with a forward of its own, which nobody looks into as a rule."""
    around = [part]
    for each in name.split(".")[:-1]:
        around.append(around[-1].get_submodule(each))
    return not all(isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) for module in around)


def _owners(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by identity; cores belong to their layers."""
    return Counter(
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.ParameterList)
        for parameter in module.parameters(recurse=isinstance(module, TTLayer))
    )


class _Tracer(fx.Tracer):
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


def _trace(model: nn.Module, tracer: _Tracer) -> fx.Graph:
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
        inside = [
            item for held in _containers(attributes) for item in (held.values() if isinstance(held, dict) else held)
        ]
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
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if type(value) in CONTAINERS and id(value) not in found:
            found[id(value)] = value
            inside: Iterable[object] = value.values() if isinstance(value, dict) else value  # type: ignore[assignment]
            waiting += inside
    return list(found.values())


def _by_graph(model: nn.Module, graph: fx.Graph, kinds: Kinds, kept: Set[fx.Node]) -> dict[str, list[str]]:
    found: dict[str, list[str | None]] = {}
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(model.get_submodule(node.target), kinds):
            continue
        users: list[str | None] = [
            str(user.target)
            if user.op == "call_module"
            and isinstance(model.get_submodule(str(user.target)), _BatchNorm)
            and calls[str(user.target)] == 1
            else None
            for user in node.users
        ]
        if node in kept:
            users.append(None)
        # A layer called twice must feed a batch norm each time; one other use and the scale matters.
        found.setdefault(node.target, []).extend(users)
    named = {
        name: [user for user in dict.fromkeys(users) if user] for name, users in found.items() if None not in users
    }
    return {name: users for name, users in named.items() if users}


def _by_order(model: nn.Module) -> dict[str, list[str]]:
    """Children that a batch norm of their size stands right behind."""
    return {
        name: [norm_name]
        for (name, layer), (norm_name, norm) in pairwise(model.named_children())
        if isinstance(layer, TTLayer) and isinstance(norm, _BatchNorm) and norm.num_features == layer.outputs
    }
