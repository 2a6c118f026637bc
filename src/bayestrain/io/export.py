"""`export`: a network or a posterior as one file for another runtime, compared with PyTorch before it is written."""

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from bayestrain.errors import BayesTrainError, ConfigError, ConversionError, check_choice
from bayestrain.files import write_atomically, writing
from bayestrain.io.plain import plain
from bayestrain.io.runtimes import NEEDED, WRITERS, quiet
from bayestrain.io.save import as_json, check_values
from bayestrain.io.stored import BITS, Mixture, Packed, share_
from bayestrain.nn.evaluation import evaluating
from bayestrain.nn.sizes import count_parameters, dense_parameters, ranks
from bayestrain.posterior import ParticleModel, Regression

Axes = Mapping[int, str]
BATCH: Axes = {0: "batch"}
TOLERANCE = 1e-4  # largest difference between a file and PyTorch, relative to the largest value of the same output


@dataclass(frozen=True)
class ExportReport:
    """What `export` wrote, and how its outputs compare with the model's. Prints as text.

    Attributes:
        nodes: operations in the file.
        error: the largest difference from PyTorch with the same stored weights, relative to the same output's largest.
        loss: the same for what storing the weights in fewer bits changed.
        kept: parameters that were not stored in fewer bits, and why.
    """

    path: Path
    format: str
    bytes: int
    nodes: int
    error: float
    loss: float
    kept: Mapping[str, str]

    def __str__(self) -> str:
        text = f"{self.path}: {self.format}, {self.bytes:,} bytes, {self.nodes} operations.\n"
        text += f"Largest difference from PyTorch, relative to the largest of an output: {self.error:.1e}."
        text += f"\nThe stored weights change the outputs by {self.loss:.1e}, likewise." if self.loss else ""
        return text + "".join(f"\nStored as it was: {name}, {reason}." for name, reason in self.kept.items())


@torch.no_grad()
def export(
    model: nn.Module | ParticleModel, path: Path | str, format: str = "onnx", *, example: Any,
    dynamic: Axes | Sequence[Axes] = BATCH, weights: str | None = None, metadata: Mapping[str, Any] | None = None,
) -> ExportReport:  # fmt: skip
    """Write a model, in evaluation mode, as one file for another runtime.

    Weights stay factorised. The file's outputs are compared with PyTorch's on the example and on other sizes of it, and
    unless they agree, nothing is written. A posterior's file returns the mean prediction and the total, aleatoric and
    epistemic uncertainty; its particles run one after another.

    Args:
        model: any module, or a posterior with a classification or regression likelihood.
        path: the file to write, in a folder that exists; an older file is replaced.
        format: "onnx"; "pt2" for `torch.export.load`; or "executorch", where the example has the largest sizes.
        example: what to call the model with: a tensor, a tuple of them, or a dict of them by argument.
        dynamic: the axes whose size may vary and their names, such as ``{0: "batch", 1: "length"}``, for all inputs, or
            a list with those of each.
        weights: "int8" or "bf16" stores weights in fewer bits; they are restored where they are used.
        metadata: what else the file is to say of itself, such as classes and normalisation: values that JSON can hold.
    """
    path = Path(path)
    check_choice("format", format, tuple(WRITERS))
    if weights is not None:
        check_choice("weights", weights, tuple(BITS))
    if missing := " ".join(name for name in NEEDED.get(format, ()) if find_spec(name) is None):
        raise ConfigError(f"format={format!r} needs packages that are not installed. Type: pip install {missing}")
    with writing(path):
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"Cannot write {path}: it is a folder, or its folder is missing or not writable.")
    about = _about(model, weights, metadata or {})
    if isinstance(model, ParticleModel) and isinstance(example, Mapping):  # whose networks are called with one input
        example = tuple(example.values())
    inputs, axes, spec = _inputs(example, dynamic)
    # An axis of size 1 would be traced as one that never varies.
    sizes = {name: max(x.shape[k], 2) for x, own in zip(inputs, axes, strict=True) for k, name in own.items()}
    rows, largest = {own[0] for own in axes if 0 in own}, sizes if format == "executorch" else {}
    other = {name: n - 1 if largest or name not in rows else 2 * n + 1 for name, n in sizes.items()}
    calls = [_resized(inputs, axes, spec, own) for own in (sizes, other, sizes | dict.fromkeys(rows, 1))]
    forward = inspect.signature((model.template if isinstance(model, ParticleModel) else model).forward).parameters
    known = [name for name, own in forward.items() if own.kind == own.POSITIONAL_OR_KEYWORD]
    args, kwargs = calls[0]
    names = [*[*known, *(f"input_{k}" for k in range(len(known), len(args)))][: len(args)], *kwargs]
    network = Mixture(model) if isinstance(model, ParticleModel) else model
    network = plain(network, smallest=True, folds=format == "onnx").cpu().eval()
    share_(network)
    try:
        expected = goal = [_outputs(model, *own) for own in calls]
    except Exception as error:
        raise ConversionError(f"The model itself fails where {dynamic} have other sizes: {error}") from error
    if not expected[0]:
        raise ConfigError("The model returns no tensor. Export a module whose forward pass returns one.")
    if weights is not None:
        network = Packed(network, weights).eval()
        goal = [_outputs(network, *own) for own in calls]
    try:
        with quiet():
            program = _program(network, calls[0], axes, largest)
            content, nodes, run = WRITERS[format](program, about, dict(zip(names, axes, strict=True)), list(goal[0]))
            found = [_outputs(run, *own) for own in calls]
    except BayesTrainError:
        raise
    except Exception as error:  # exporters raise anything
        raise ConversionError(f"The network cannot be exported as {format} where {dynamic} vary: {error}") from error
    # Probabilities and entropies have one scale, and so have variances: small ones come of differences of large ones.
    alike = list(goal[0])[type(model.likelihood) is Regression :] if isinstance(model, ParticleModel) else []
    worst, loss = (_difference(goal, others, alike) for others in (found, expected))
    if not worst <= TOLERANCE:
        why = "Does the forward pass depend on values, or run in less than single precision?"
        raise ConversionError(f"Nothing was written: the outputs differ from PyTorch's by {worst:.1e}. {why}")
    write_atomically(path, content)
    return ExportReport(path, format, len(content), nodes, worst, loss, getattr(network, "kept", {}))


def _about(model: Any, weights: str | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of itself; raises unless the model has values that a file can hold."""
    module = model.joint if isinstance(model, ParticleModel) else model
    if not isinstance(module, nn.Module):
        raise ConfigError(f"Expected a torch.nn.Module or a posterior, got a {type(model).__name__}.")
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    about: dict[str, Any] = {"kind": "model", "weights": weights or "as trained", "ranks": ranks(module)}
    about |= {"parameters": count_parameters(module), "dense_parameters": dense_parameters(module)}
    if isinstance(model, ParticleModel):
        tensors |= {**model.particles, **model.carried}
        about |= {"kind": "posterior", "particles": len(model), "likelihood": type(model.likelihood).__name__}
        about["temperature"] = getattr(model.likelihood, "temperature", None)
    check_values(module, tensors)
    return dict(json.loads(as_json(about, metadata, "metadata")))


def _inputs(example: Any, dynamic: Axes | Sequence[Axes]) -> tuple[list[Tensor], list[Axes], Any]:
    """The tensors of an example, the axes of each that vary, and how the tensors become arguments."""
    by_name = isinstance(example, Mapping)
    args = () if by_name else example if isinstance(example, tuple) else (example,)
    given, spec = tree.tree_flatten((args, dict(example) if by_name else {}))
    if not given or not all(isinstance(own, Tensor) and own.numel() for own in given):
        raise ConfigError("example must be a tensor, or a tuple or dict of tensors, none of them empty.")
    each: Any = [dynamic] * len(given) if isinstance(dynamic, Mapping) else dynamic
    mappings = isinstance(each, list | tuple) and all(isinstance(own, Mapping) for own in each)
    named = mappings and all(type(k) is int and k >= 0 and isinstance(v, str) for own in each for k, v in own.items())
    if not named or len(each) != len(given):
        needed = f"one mapping for all inputs or {len(given)}, from axes, 0 on, to names ({{}} if none vary)"
        raise ConfigError(f"dynamic must be {needed}, got {dynamic}.")
    axes = [{k: name for k, name in own.items() if k < x.ndim} for own, x in zip(each, given, strict=True)]
    return [own.detach().cpu() for own in given], list(axes), spec


def _resized(inputs: Sequence[Tensor], axes: Sequence[Axes], spec: Any, sizes: Mapping[str, int]) -> Any:
    """Arguments with these sizes of the axes that vary: cut short, or continued from the start."""
    found = list(inputs)
    for place, own in enumerate(axes):
        for axis, name in own.items():
            index = torch.arange(sizes[name]) % found[place].shape[axis]
            found[place] = found[place].index_select(axis, index)
    return tree.tree_unflatten(found, spec)


def _outputs(model: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The tensors that a module, in evaluation mode, a posterior or a function returns, by name."""
    if isinstance(model, ParticleModel):
        prediction = model.predict(next(iter((*args, *kwargs.values()))), chunk=1)  # an LSTM cannot run for several
        return {name: getattr(prediction, name) for name in ("mean", "total", "aleatoric", "epistemic")}
    module = model if isinstance(model, nn.Module) else nn.Module()
    device = next((own.device for own in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    args, kwargs = tree.tree_map(lambda own: own.to(device), (args, kwargs))
    with evaluating(module):
        made = model(*args, **kwargs)
    found = [own.cpu() for own in tree.tree_leaves(made) if isinstance(own, Tensor)]
    named = isinstance(made, Mapping) and len(found) == len(made)
    return dict(zip(made if named else [f"output_{k}" for k in range(len(found))], found, strict=True))


def _program(network: nn.Module, call: Any, axes: Sequence[Axes], largest: Mapping[str, int]) -> Any:
    """The network as `torch.export` describes it, without the example, and without traces of the code."""
    shapes, (args, kwargs) = torch.export.ShapesCollection(), call
    dims: dict[str, Any] = {name: torch.export.Dim(name, max=size) for name, size in largest.items()}
    for own, varying in zip((*args, *kwargs.values()), axes, strict=True):
        shapes[own] = {axis: dims.get(name, torch.export.Dim.DYNAMIC) for axis, name in varying.items()}
    options: dict[str, Any] = {"dynamic_shapes": shapes, "strict": False}
    program: Any = torch.export.export(network, args, kwargs, **options)
    if not largest and (limits := [own for own in program.range_constraints.values() if own.upper < 2**31]):
        raise ConversionError(f"The forward pass branches on the size of an axis, at {limits[0].upper}.")
    for node in program.graph.nodes:
        for key in ("stack_trace", "from_node", "source_fn_stack", "nn_module_stack"):
            node.meta.pop(key, None)
    program.example_inputs = None
    return program


def _difference(calls: Sequence[Mapping[str, Tensor]], found: Sequence[Mapping[str, Tensor]], alike: Any) -> float:
    """The largest difference relative to an output's largest value, or that of all of `alike`; NaN if shapes differ."""
    worst = [0.0]
    for expected, own in zip(calls, found, strict=True):
        sizes = {
            name: float(a.double().abs().nan_to_num(posinf=0.0).amax()) for name, a in expected.items() if a.numel()
        }
        sizes |= dict.fromkeys(alike, max((sizes.get(name, 0.0) for name in alike), default=0.0))
        for (name, a), b in zip(expected.items(), own.values(), strict=True):
            if a.shape != b.shape:
                return float("nan")
            if not a.numel():
                continue
            far = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a.double() - b.double()).abs())
            worst.append(float(far.amax()) / (sizes[name] or 1.0))
    return float(torch.tensor(worst).amax())  # NaN if one is
