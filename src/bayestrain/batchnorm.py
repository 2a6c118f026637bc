"""Layers whose output goes straight into a batch norm: the scale of their weight is free, and their bias idle."""

from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.layers import TTConv2d, TTLayer
from bayestrain.layers.evaluation import evaluating
from bayestrain.tracing import Tracer, traced

Kinds = tuple[type[nn.Module], ...]

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule")
"""Modules that cannot be traced, but call what is in them as a whole."""


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
    tracer = Tracer(set())
    graph = traced(model, tracer)
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
    tracer = Tracer(looked_at)
    try:
        return Normalised(_by_graph(model, traced(model, tracer), (TTLayer,), tracer.kept), {})
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        whole = type(model) is nn.Sequential or type(model).__name__ in WRAPPERS
    seen, doubtful = (_by_order(model), {}) if whole else ({}, _by_order(model))
    parts = Counter(id(module) for part in model.children() for module in part.modules())
    for part, module in model.named_children():
        inside = _normalised(module, looked_at)
        for name, norms in (inside.doubtful | inside.seen).items():
            sure = name in inside.seen and (whole or _enclosed(module, name))
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
