"""Saved models and posteriors: a folder with the tensors (safetensors) and ``model.json``, which says what they are.

The JSON describes every factorised weight: format, equation, layout and shapes of its cores. So a model whose ranks
were found in training is rebuilt from a freshly built dense network, whatever the format. Both files hold data only.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.errors import BayesTrainError, ConfigError, DataError, ShapeError
from bayestrain.files import write_atomically
from bayestrain.formats import get
from bayestrain.nn.convert import TWINS, is_lazy, replace_layers
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer
from bayestrain.nn.layout import Layout
from bayestrain.nn.sizes import count_parameters, dense_parameters, factorized_weights
from bayestrain.posterior import Classification, Joint, Likelihood, ParticleModel, Regression

VERSION = 1
WEIGHTS, PARTICLES, DESCRIPTION = "model.safetensors", "posterior.safetensors", "model.json"
LARGEST_DESCRIPTION, LARGEST_SIZE, MOST_SIZES = 64 << 20, 1 << 40, 64
"""Bounds on what is read: bytes of the JSON, a size in it, and how many sizes stand in one list."""


def save(model: nn.Module | ParticleModel, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
    """Write a model or a posterior into a folder, which is created if need be.

    Lambda is not part of a saved model: remove it first, with `RankPrior.remove_` or `Posterior.fix_ranks_`. Frozen
    parameters, which all particles share, are saved once.

    Args:
        model: any network, or a posterior.
        path: the folder.
        about: stored in ``model.json`` as it is. ``{"model": "package.module:function"}`` names a function without
            arguments that builds the network, so that `load` can rebuild it.
    """
    network = model if isinstance(model, nn.Module) else model.template
    own: dict[str, Any] = {"version": VERSION, "kind": "model"}
    tensors: dict[str, Any] = dict(network.state_dict(keep_vars=True))
    buffers = set(dict(network.named_buffers(remove_duplicate=False)))
    if not isinstance(model, nn.Module):
        own |= {"kind": "posterior", "particles": len(model), "likelihood": _describe_likelihood(model.likelihood)}
        tensors, buffers = {**model.particles, **model.carried}, set(model.carried)
        tensors |= {f"shared.{name}": p for name, p in model.joint.named_parameters() if name not in model.particles}
    _check_savable(network, tensors, buffers)
    own |= {"parameters": count_parameters(network), "dense_parameters": dense_parameters(network)}
    own["weights"] = {name: _describe(network, weight) for name, weight in factorized_weights(network).items()}
    if taken := sorted(set(own) & set(about or {})):
        raise ConfigError(f"about must not contain {taken[0]!r}, which save writes itself. Give it another name.")
    try:
        text = json.dumps({**(about or {}), **own}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"about must hold what JSON can: text, finite numbers, lists and dicts. {error}.") from error
    content = _serialised(tensors)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / (WEIGHTS if own["kind"] == "model" else PARTICLES), content)
    write_atomically(folder / DESCRIPTION, text)


def load(
    path: Path | str,
    into: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    *,
    trust_builder: bool = False,
) -> Any:
    """Read a saved model, in evaluation mode, or a saved posterior (a `ParticleModel`), ready to predict.

    Args:
        path: the folder, or one of its files.
        into: a freshly built network, before or after `tensorize_`. Its layers are replaced where they were factorised,
            its tensors take the values and types of the file, and it is returned, or becomes the posterior's template.
        likelihood: of a posterior, if it is neither a `Classification` nor a `Regression`.
        trust_builder: instead of passing `into`, call the function that the file names. That imports and runs code by
            a name that stands in the file, so pass it only for files you trust.
    """
    folder, description = read_description(path)
    posterior = description["kind"] == "posterior"
    if posterior and likelihood is None:
        likelihood = _likelihood(folder, description.get("likelihood"))
    file = folder / (PARTICLES if posterior else WEIGHTS)
    model = _build(folder, description.get("model"), trust_builder) if into is None else into
    tensors = _read_tensors(file, description)
    _rebuild(folder, description, model, _of_network(tensors, posterior))
    try:
        if not posterior:
            return _filled(model, tensors).eval()
        assert likelihood is not None
        return _particles(Joint(model, copy.deepcopy(likelihood)), tensors, description["particles"])
    except RuntimeError as error:
        raise DataError(f"{file} is not the one that {DESCRIPTION} describes: {error}") from error


# --- the description --------------------------------------------------------------------------------------------------


def _describe(network: nn.Module, weight: FactorizedWeight) -> dict[str, Any]:
    """One factorised weight as data."""
    layout = weight.layout
    owner = next((module for module in network.modules() if weight in module.children()), weight)
    return {
        "module": next(name for name, module in network.named_modules() if module is weight),
        "layer": type(owner).__name__,
        "format": weight.format.name,
        "equation": str(weight.equation),
        "layout": {key: getattr(layout, key) for key in ("name", "shape", "axes", "splits", "modes")},
        "cores": [list(core.shape) for core in weight.cores],
        "ranks": weight.ranks,
        "parameters": weight.numel,
        "dense_parameters": weight.dense_numel,
    }


def _describe_likelihood(likelihood: Likelihood) -> dict[str, Any] | None:
    if isinstance(likelihood, Classification):
        return {"kind": "classification", "temperature": likelihood.temperature}
    if isinstance(likelihood, Regression):
        return {"kind": "regression", "noise": likelihood.noise}
    return None


def _likelihood(folder: Path, about: object) -> Likelihood:
    known = about if isinstance(about, dict) else {}
    try:
        if known.get("kind") == "classification":
            return Classification(known.get("temperature", 1.0))
        if known.get("kind") == "regression":
            return Regression(known.get("noise"))
    except (BayesTrainError, TypeError) as error:
        raise DataError(f"{folder / DESCRIPTION} is damaged: {error}") from error
    raise ConfigError(f"{folder / DESCRIPTION} names no likelihood of BayesTrain. Pass yours: load(.., likelihood=..).")


def read_description(path: Path | str) -> tuple[Path, dict[str, Any]]:
    """Read and check the description of a saved model; return its folder and the description."""
    path = Path(path)
    if not path.is_dir() and path.name not in (WEIGHTS, PARTICLES, DESCRIPTION):
        raise DataError(f"{path} is no saved model. Name its folder, its {DESCRIPTION} or its {WEIGHTS}.")
    folder = path if path.is_dir() else path.parent
    file = folder / DESCRIPTION
    if not file.is_file():
        raise DataError(f"There is no saved model at {path}: {DESCRIPTION} is missing.")
    if file.stat().st_size > LARGEST_DESCRIPTION:
        raise DataError(f"{file} has {file.stat().st_size:,} bytes; a description has at most {LARGEST_DESCRIPTION:,}.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise DataError(f"{file} does not describe a saved model of version {VERSION}.")
    try:
        if found["kind"] not in ("model", "posterior"):
            raise ValueError(f"{found['kind']!r} is no kind")
        if found["kind"] == "posterior":
            _sizes([found["particles"]], 1)
        for weight in found["weights"].values():
            if not all(isinstance(weight[key], str) for key in ("module", "format", "equation")):
                raise TypeError("module, format and equation must be text")
            known = weight["layout"]
            sizes = {key: _sizes(known[key], depth) for key, depth in (("shape", 1), ("axes", 1), ("splits", 2))}
            weight["layout"] = {**sizes, "modes": _sizes(known["modes"], 2, least=0), "name": str(known["name"])}
            weight["cores"] = _sizes(weight["cores"], 2)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} is damaged: {type(error).__name__}, {error}.") from error
    return folder, found


def _sizes(value: object, depth: int, least: int = 1) -> tuple[Any, ...]:
    """Lists of sizes, one in the other, as tuples; raises if there are other things in them, or too large ones."""
    if not isinstance(value, list) or len(value) > MOST_SIZES:
        raise TypeError(f"a list of at most {MOST_SIZES} must stand where there is {str(value)[:40]}")
    if depth > 1:
        return tuple(_sizes(each, depth - 1, least) for each in value)
    if any(not isinstance(each, int) or isinstance(each, bool) or not least <= each <= LARGEST_SIZE for each in value):
        raise ValueError(f"{str(value)[:40]} is no list of sizes")
    return tuple(value)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _check_savable(network: nn.Module, tensors: Mapping[str, Any], buffers: set[str]) -> None:
    """Refuse what would not load, and what nobody wants to load."""
    if any(weight.rank_state is not None for weight in factorized_weights(network).values()):
        raise ConfigError(
            "The model still carries lambda. Call prior.remove_() before saving it for use, "
            "RankPrior(model, num_data=1).remove_() if there is no prior any more, "
            "or posterior.fix_ranks_() if it is a posterior."
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name!r} is a {type(tensor).__name__}, and only tensors are saved. Remove that state.")
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(f"{name!r} has no values yet. Run one batch through the model, then save it.")
        if bool(tensor.isnan().any()) or (name not in buffers and bool(tensor.isinf().any())):  # a mask may be infinite
            raise ConfigError(f"{name!r} has NaN or infinite values. Go back to a checkpoint from before that.")


def _place(tensor: Tensor) -> object:
    """What all names of one tensor have in common."""
    lies = tensor.numel() > 0 and not tensor.is_meta
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if lies else id(tensor)


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as a safetensors file; one that has several names is in it under the first."""
    from safetensors.torch import save as serialise

    first: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first.setdefault(_place(tensor), (name, tensor))
    return serialise({n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in first.values()})


def _of_network(tensors: Mapping[str, Any], posterior: bool) -> dict[str, Any]:
    """Tensors, or their shapes, by their names in the network, without the axis of the particles."""
    if not posterior:
        return dict(tensors)
    shared, own = "shared.model.", "model."
    return {name.removeprefix(shared): tensors[name] for name in tensors if name.startswith(shared)} | {
        name.removeprefix(own): tensors[name][0 if isinstance(tensors[name], Tensor) else slice(1, None)]
        for name in tensors
        if name.startswith(own)
    }


def _read_tensors(file: Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file; its header must agree with the description before any of them is read."""
    from safetensors import SafetensorError, safe_open

    wrong = f"{file} is not the one that {DESCRIPTION} describes"
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            posterior, n = description["kind"] == "posterior", description.get("particles")
            if posterior and any(not name.startswith("shared.") and shapes[name][:1] != (n,) for name in shapes):
                raise DataError(f"{wrong}: it does not hold {n} particles.")
            there = _of_network(shapes, posterior)
            for weight in description["weights"].values():
                for k, wanted in enumerate(weight["cores"]):
                    if (found := there.get(name := _core(weight, k))) != wanted:
                        raise DataError(f"{wrong}: {name} needs shape {wanted}, there is {found or 'nothing'}.")
            return {name: opened.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is missing or damaged: {error}") from error


def _core(weight: Mapping[str, Any], number: int) -> str:
    """The name of a core in the network."""
    return f"{weight['module']}.cores.{number}".removeprefix(".")


def _filled(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """The model with the values and types of the file."""
    places: dict[object, list[str]] = {}
    for name, own in model.state_dict(keep_vars=True).items():
        places.setdefault(_place(own) if isinstance(own, Tensor) else name, []).append(name)
    found = dict(tensors)
    for names in places.values():
        for known in [name for name in names if name in tensors][:1]:
            found |= {name: tensors[known] for name in names if name not in tensors}
    _take_types(model, found)
    lacking, unknown = model.load_state_dict(found, strict=False)
    if lacking or unknown:
        raise RuntimeError(f"the file and the network do not have these in common: {', '.join([*unknown, *lacking])}")
    return model


def _take_types(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter and buffer its type in the file, so that what is copied into it is not rounded."""
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, own in pairs:
            if name in tensors:
                own.data = own.data.to(tensors[name].dtype)


def _particles(joint: Joint, tensors: Mapping[str, Tensor], n: int) -> ParticleModel:
    """The particles of a posterior; frozen parameters go into its network."""
    _take_types(joint, {name.removeprefix("shared."): tensor for name, tensor in tensors.items()})
    buffers = dict(joint.named_buffers())
    own = {**dict(joint.named_parameters()), **buffers}
    if odd := own.keys() ^ {name.removeprefix("shared.") for name in tensors}:
        raise RuntimeError(f"the file and the network do not have these in common: {', '.join(sorted(odd))}")
    particles: dict[str, Tensor] = {}
    carried: dict[str, Tensor] = {}
    for name, tensor in own.items():
        shared = tensors.get(f"shared.{name}")
        found = tensors[name] if shared is None else shared
        wanted = (n, *tensor.shape) if shared is None else tuple(tensor.shape)
        if tuple(found.shape) != wanted:
            raise RuntimeError(f"{name} needs shape {wanted}, there is {tuple(found.shape)}.")
        if shared is None:
            (carried if name in buffers else particles)[name] = found.to(tensor.device)
        else:
            tensor.data.copy_(found)
    return ParticleModel(joint.eval(), particles, carried)


# --- rebuilding -------------------------------------------------------------------------------------------------------


def _build(folder: Path, name: object, trusted: bool) -> nn.Module:
    """The network that a description names, if that is allowed."""
    file = folder / DESCRIPTION
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(f"{file} names no function that builds the network. Build it and pass it: load(.., into=..).")
    if not trusted:
        raise ConfigError(
            f"{file} says that {name} builds the network. Build it and pass it, load(.., into=..), or, if you trust "
            "the file, load(.., trust_builder=True): that imports and runs code by that name."
        )
    module, _, function = name.partition(":")
    try:
        build: Callable[[], object] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file} names {name}, which cannot be imported: {error}. Pass into=..") from error
    model = build()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} must return an nn.Module, got {type(model).__name__}.")
    return model


def _rebuild(folder: Path, description: Mapping[str, Any], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put factorised weights in place where the description has them; all are built before the first one is put in."""
    if lazy := [name for name, layer in model.named_modules() if is_lazy(layer)]:
        raise ConfigError(
            f"The network given has lazy layers without weights: {', '.join(lazy)}. Run one batch through it first."
        )
    built: dict[nn.Module, nn.Module] = {}
    same: list[tuple[FactorizedWeight, list[Tensor]]] = []
    for name, about in description["weights"].items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(f"The network given is not the one that was saved in {folder}: {error}.") from error
        old = layer.factorized if isinstance(layer, TensorLayer) else layer
        cores = [tensors[_core(about, k)] for k in range(len(about["cores"]))]
        try:
            weight = _weight(about, old, cores)
        except (BayesTrainError, IndexError) as error:
            raise DataError(f"{folder / DESCRIPTION} cannot be used for layer {name!r}: {error}") from error
        if isinstance(old, FactorizedWeight) and (old.format, old.layout) == (weight.format, weight.layout):
            same.append((old, cores))
            continue
        shape = getattr(old if isinstance(old, FactorizedWeight) else getattr(old, "weight", None), "shape", ())
        if shape != weight.shape or old is model or type(old) not in (FactorizedWeight, *TWINS):
            raise ConfigError(
                f"The network given is not the one that was saved in {folder}: layer {name!r} is a "
                f"{type(layer).__name__} with a weight of shape {tuple(shape)}, and a {about.get('layer')} of shape "
                f"{weight.shape} was saved."
            )
        built[old] = weight if isinstance(old, FactorizedWeight) else TWINS[type(old)].of(old, weight)
    replace_layers(model, built)
    for old, cores in same:
        old.set_cores(cores)  # perhaps with other ranks


def _weight(about: Mapping[str, Any], old: nn.Module, cores: list[Tensor]) -> FactorizedWeight:
    """The weight that a description stands for, with these cores."""
    layout = Layout(**about["layout"])
    format = old.format if isinstance(old, FactorizedWeight) else None
    if format is None or format.name != about["format"]:  # otherwise perhaps one of the user's
        format = get(about["format"])
    if (equation := str(format.equation(layout.sizes))) != about["equation"]:
        raise ShapeError(f"the format {format.name!r} has the equation {equation} here, not {about['equation']}.")
    like = next(old.parameters(), cores[0])
    weight = FactorizedWeight(format, layout, [core.to(like.device, copy=True) for core in cores])
    return weight.requires_grad_(like.requires_grad)
