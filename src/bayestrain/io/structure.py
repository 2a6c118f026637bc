"""A network of PyTorch's own modules as JSON, and back: only classes of the list below are built, nothing is run."""

import json
import warnings
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bayestrain.nn.convert import HOOKS
from bayestrain.nn.layer import TensorLayer
from bayestrain.nn.parameters import HOLDER

CONTAINERS: dict[str, Any] = {"Sequential": nn.Sequential, "ModuleList": nn.ModuleList, "ModuleDict": nn.ModuleDict}
LISTED: dict[str, Any] = CONTAINERS | {name: getattr(nn, name) for name in """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ChannelShuffle Conv1d
    Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout Dropout1d Dropout2d Dropout3d ELU Embedding
    EmbeddingBag Flatten GELU GLU GRU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh Identity InstanceNorm1d
    InstanceNorm2d InstanceNorm3d LSTM LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d
    MaxPool2d MaxPool3d Mish MultiheadAttention PReLU PixelShuffle PixelUnshuffle RMSNorm RNN ReLU ReLU6 ReflectionPad1d
    ReflectionPad2d ReplicationPad1d ReplicationPad2d SELU SiLU Sigmoid Softmax Softplus Softsign Tanh Tanhshrink
    Unflatten Upsample ZeroPad1d ZeroPad2d""".split()}  # fmt: skip  # noqa: SIM905
NAMES = {kind: name for name, kind in LISTED.items()} | {NonDynamicallyQuantizableLinear: "Linear"}


def describe(model: nn.Module) -> Any:
    """What `build` takes, of the network with dense layers; raises ValueError unless every module is in the list."""
    known: set[nn.Module] = set()

    def node(path: str, module: Any) -> dict[str, Any]:
        kind = getattr(type(module), "dense_kind", type(module))
        if kind not in NAMES or (module in known and module.state_dict()):
            raise ValueError(f"{path!r} is {'used twice' if module in known else f'a {kind.__name__}'}")
        if "forward" in vars(module) or any(getattr(module, name) for name in HOOKS):
            raise ValueError(f"{path!r} has hooks or a forward pass of its own")
        known.add(module)
        own = {} if isinstance(module, TensorLayer) else module._modules
        inside = {
            name: node(f"{path}.{name}", child) for name, child in own.items() if child is not None and name != HOLDER
        }
        settings = {} if kind in CONTAINERS.values() else _settings(module, kind)
        return {"class": NAMES[kind], "settings": settings, "children": inside}

    return json.loads(json.dumps(node("", model), allow_nan=False))


def _settings(module: Any, kind: Any) -> dict[str, Any]:
    """What the constructor of a module was called with, as its attributes have it."""
    module, names = module.blank() if isinstance(module, TensorLayer) else module, list(signature(kind).parameters)
    if issubclass(kind, nn.RNNBase):  # whose own signatures are open
        names = [*signature(nn.RNNBase).parameters, "nonlinearity"]
        names = [name for name in names if name != "mode" and (name != "proj_size" or kind is nn.LSTM)]
    found = {name: getattr(module, name) for name in names if hasattr(module, name) and name not in module._modules}
    if kind is nn.MultiheadAttention:
        found |= {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
    elif not isinstance(found.get("bias", True), bool):
        found["bias"] = found["bias"] is not None
    return found


def build(node: Any, most: int) -> Any:
    """The described network, on the meta device; there are `most` tensors for it. Raises what PyTorch does."""
    if _repeated(node) > most:
        raise ValueError(f"it has more layers than the {most} tensors of the file")
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = _build(node)
    if describe(model) != node:
        raise ValueError("what it describes does not come out when it is built")
    return model


def _repeated(node: Any) -> int:
    """How many layers are described by their number."""
    number = node["settings"].get("num_layers", 0)
    return max(int(number), 0) + sum(map(_repeated, node["children"].values()))


def _build(node: Any) -> nn.Module:
    kind, name, children = LISTED[node["class"]], node["class"], node["children"]
    if name == "ModuleList":
        return nn.ModuleList(map(_build, children.values()))
    if name in CONTAINERS:
        built = kind()
        for key, child in children.items():
            built.add_module(key, _build(child))
        return built  # type: ignore[no-any-return]
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in node["settings"].items()}
    if any(key.startswith("_") or key in ("device", "dtype") for key in settings):
        raise ValueError(f"{name} has no such settings")
    return kind(**settings)  # type: ignore[no-any-return]
