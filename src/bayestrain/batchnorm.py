"""Find the tensor-train layers whose output goes straight into a batch norm: the scale of their weight is free."""

import warnings
from collections import Counter
from itertools import pairwise

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain.layers import TTLayer


def normalised_layers(model: nn.Module) -> dict[str, list[str]]:
    """``{layer name: [batch norm names]}`` for every TT layer whose output is used by batch norms and nothing else.

    A batch norm that is used in several places does not count: its statistics belong to more than one layer.

    The model is traced symbolically. A model that cannot be traced (its forward branches on data) is searched by the
    order of registration instead: a batch norm of matching size right behind the layer in the same parent.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(model)
    except Exception:  # tracing runs arbitrary user code on symbols and may fail in any way
        return _by_registration(model)
    return _by_graph(model, graph)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, TTLayer) or super().is_leaf_module(m, module_qualified_name)


def _by_graph(model: nn.Module, graph: fx.Graph) -> dict[str, list[str]]:
    found: dict[str, list[str | None]] = {}
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(model.get_submodule(node.target), TTLayer):
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


def _by_registration(model: nn.Module) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for parent_name, parent in model.named_modules():
        children = [(f"{parent_name}.{name}".lstrip("."), child) for name, child in parent.named_children()]
        for (name, layer), (norm_name, norm) in pairwise(children):
            if isinstance(layer, TTLayer) and isinstance(norm, _BatchNorm) and norm.num_features == layer.outputs:
                found[name] = [norm_name]
    return found
