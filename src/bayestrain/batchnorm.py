"""Layers whose output goes straight into a batch norm: the scale of their weight is free, and their bias idle."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.layers import TTConv2d, TTLayer
from bayestrain.layers.evaluation import evaluating

Kinds = tuple[type[nn.Module], ...]


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
    tracer = _Tracer()
    found = _by_graph(model, _trace(model, tracer), (TTConv2d, nn.Conv2d))
    exact = {name: norms for name, norms in found.items() if type(model.get_submodule(name)) in (TTConv2d, nn.Conv2d)}
    return exact, tracer.looked_at


def normalised_layers(model: nn.Module, guess: bool = False) -> dict[str, list[str]]:
    """``{layer name: [batch norm names]}`` for every TT layer whose output is used by batch norms and nothing else.

    A batch norm that is used in several places does not count: its statistics belong to more than one layer. Nor does a
    layer with hooks, or one whose weight the network itself looks at.

    The model is traced symbolically. Where it cannot be (its forward branches on data, or it is wrapped), its parts
    are, each by itself. In what then is left, batch norms count that stand right behind a layer in an `nn.Sequential`;
    with `guess` also those that were registered right behind one, which may be used elsewhere.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {
        name: norms
        for name, norms in _normalised(model, guess).items()
        if uses[id(model.get_submodule(name))] == 1
        and all(uses[id(model.get_submodule(norm))] == 1 for norm in norms)
        and not model.get_submodule(name)._forward_hooks
        and not any(model.get_submodule(norm)._forward_pre_hooks for norm in norms)
    }


def _normalised(model: nn.Module, guess: bool) -> dict[str, list[str]]:
    tracer = _Tracer()
    try:
        graph = _trace(model, tracer)
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        found = _by_order(model) if guess or type(model) is nn.Sequential else {}
        for part, module in model.named_children():
            inside = _normalised(module, guess)
            found |= {f"{part}.{name}": [f"{part}.{norm}" for norm in norms] for name, norms in inside.items()}
        return found
    return {
        name: norms
        for name, norms in _by_graph(model, graph, (TTLayer,)).items()
        if not any(id(parameter) in tracer.looked_at for parameter in model.get_submodule(name).parameters())
    }


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.looked_at: set[int] = set()
        """Parameters, by identity, that code outside of the layers has asked for."""

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, nn.Parameter):
            self.looked_at.add(id(attr_val))
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TTLayer) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module, tracer: _Tracer) -> fx.Graph:
    """The graph of a copy, for the forward pass of a network may leave something behind. The parameters are shared."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    computed = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    shared |= {id(value): value for value in computed if not value.is_leaf}  # these cannot be copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tracer.trace(copy.deepcopy(model, shared))


def _by_graph(model: nn.Module, graph: fx.Graph, kinds: Kinds) -> dict[str, list[str]]:
    found: dict[str, list[str | None]] = {}
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(model.get_submodule(node.target), kinds):
            continue
        users = [
            str(user.target)
            if user.op == "call_module"
            and isinstance(model.get_submodule(str(user.target)), _BatchNorm)
            and calls[str(user.target)] == 1
            else None
            for user in node.users
        ]
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
