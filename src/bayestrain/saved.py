"""Compacted models on disk: ``model.safetensors`` (the numbers) beside ``model.json`` (what they are).

The JSON describes every tensor-train layer, so a model whose ranks were found in training is rebuilt without guessing.
A posterior has the stacked numbers of all its particles in ``posterior.safetensors`` instead.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain import models
from bayestrain.convert import is_lazy, replace_layers
from bayestrain.errors import ConfigError, DataError
from bayestrain.files import write_atomically
from bayestrain.layers import TTConv2d, TTLayer, TTLinear
from bayestrain.posterior import Joint, ParticleModel
from bayestrain.predict import Classification, Likelihood, Regression
from bayestrain.sizes import count_parameters, tt_layers

FORMAT = 1
WEIGHTS, PARTICLES, DESCRIPTION = "model.safetensors", "posterior.safetensors", "model.json"


def save_model(model: nn.Module, folder: Path | str, about: Mapping[str, Any] | None = None) -> None:
    """Write both files into `folder`, which is made if need be.

    `about` is stored in the description (``model`` names a network of `models`). Lambda is no part of a saved model:
    take it off first (`RankPrior.remove_`).
    """
    from safetensors.torch import save_model as write

    text = _description(model, about or {})  # fails, if it does, before anything is written
    folder = _made(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        write(model, str(Path(scratch) / WEIGHTS))
        content = (Path(scratch) / WEIGHTS).read_bytes()
    write_atomically(folder / WEIGHTS, content)
    write_atomically(folder / DESCRIPTION, text)


def load_model(path: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The saved model, in evaluation mode. `path` is its folder or either of its files.

    `model` is the dense network that was tensorised, needed only for networks that are not in `bayestrain.models`. What
    comes back has the types of the file, whatever those of `model` are.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder, description = read_description(path)
    if "particles" in description:
        raise ConfigError(
            f"{folder} holds a posterior of {description['particles']} particles, not one model. "
            "Use load_posterior(path), and its particle(i) for a single network."
        )
    model = _rebuild(folder, description, model)
    try:
        tensors = _under_all_names(model, load_file(folder / WEIGHTS))
        _take_types(model, tensors)
        _load(model, tensors)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise DataError(f"{folder / WEIGHTS} is missing, damaged or not the one described: {error}") from error
    return model.eval()


def save_posterior(posterior: ParticleModel, folder: Path | str, about: Mapping[str, Any] | None = None) -> None:
    """Write the particles and their description into `folder`; as `save_model`.

    Frozen parameters, which all particles share, are saved once. Lambda is no part of it (`Posterior.fix_ranks_`).
    """
    from safetensors.torch import save

    likelihood = posterior.joint.likelihood
    known: dict[str, Any] | None = None
    if isinstance(likelihood, Classification):
        known = {"kind": "classification", "temperature": likelihood.temperature}
    elif isinstance(likelihood, Regression):
        known = {"kind": "regression", "noise": likelihood.noise}
    text = _description(posterior.template, {**(about or {}), "particles": len(posterior), "likelihood": known})
    shared = {
        f"shared.{name}": tensor
        for name, tensor in posterior.joint.named_parameters()
        if name not in posterior.particles
    }
    tensors = {**posterior.particles, **posterior.carried, **shared}
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    folder = _made(folder)
    write_atomically(folder / PARTICLES, content)
    write_atomically(folder / DESCRIPTION, text)


def _under_all_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, those that have several names in the model under each of them; a file has them under one."""
    places: dict[object, list[str]] = {}
    for name, own in model.state_dict(keep_vars=True).items():
        lies = own.numel() > 0 and not own.is_meta
        place = (own.data_ptr(), own.shape, own.stride(), own.dtype) if lies else own
        places.setdefault(place, []).append(name)
    found = dict(tensors)
    for names in places.values():
        for known in [name for name in names if name in tensors][:1]:
            found |= {name: tensors[known] for name in names if name not in tensors}
    return found


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the tensors; a file has no others that lie in their memory, as a view of a weight does."""
    lacking, unknown = model.load_state_dict(tensors, strict=False)
    own = model.state_dict(keep_vars=True)
    there = {own[name].untyped_storage().data_ptr() for name in own if name in tensors}
    if lost := [*unknown, *(name for name in lacking if own[name].untyped_storage().data_ptr() not in there)]:
        raise RuntimeError(f"the file and the network do not have these in common: {', '.join(lost)}")


def _made(folder: Path | str) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_posterior(
    path: Path | str, model: nn.Module | None = None, likelihood: Likelihood | None = None
) -> ParticleModel:
    """The saved posterior, ready to predict. `model` as for `load_model`; `likelihood` only if it is your own."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder, description = read_description(path)
    if "particles" not in description:
        raise ConfigError(f"{folder} holds a single model, not a posterior. Use load_model(path).")
    if likelihood is None:
        likelihood = _likelihood(folder, description.get("likelihood"))
    joint = Joint(_rebuild(folder, description, model), copy.deepcopy(likelihood), None, num_data=1)
    try:
        tensors = load_file(folder / PARTICLES)
        _take_types(joint, {name.removeprefix("shared."): tensor for name, tensor in tensors.items()})
    except (SafetensorError, RuntimeError, OSError) as error:
        raise DataError(f"{folder / PARTICLES} is missing or damaged: {error}") from error
    own = {**dict(joint.named_parameters()), **dict(joint.named_buffers())}
    n = int(description["particles"])
    particles: dict[str, Tensor] = {}
    for name, tensor in own.items():
        shared = tensors.get(f"shared.{name}")
        found = tensors.get(name) if shared is None else shared
        wanted = tensor.shape if shared is not None else (n, *tensor.shape)
        if found is None or found.shape != wanted:
            there = "nothing" if found is None else f"shape {tuple(found.shape)}"
            raise DataError(
                f"{folder / PARTICLES} is not the one described: {name} needs shape {tuple(wanted)}, there is {there}."
            )
        if shared is None:
            particles[name] = found
        else:
            with torch.no_grad():
                tensor.copy_(found)
    buffers = dict(joint.named_buffers())
    carried = {name: tensor for name, tensor in particles.items() if name in buffers}
    joint.eval()
    return ParticleModel(joint, {name: t for name, t in particles.items() if name not in buffers}, carried)


def _likelihood(folder: Path, about: Mapping[str, Any] | None) -> Likelihood:
    if about is not None and about.get("kind") == "classification":
        return Classification(about.get("temperature", 1.0))
    if about is not None and about.get("kind") == "regression":
        return Regression(about.get("noise"))
    raise ConfigError(
        f"{folder / DESCRIPTION} names no likelihood of this package. Pass yours: load_posterior(path, likelihood=..)."
    )


def _description(model: nn.Module, about: Mapping[str, Any]) -> str:
    layers = tt_layers(model)
    if "" in layers:
        raise ConfigError(
            "The model itself is a tensor-train layer, which could not be put into a dense network again. Wrap it in "
            "nn.Sequential, then save that."
        )
    if any(layer.rank_state is not None for layer in layers.values()):
        raise ConfigError(
            "The model still carries lambda. Call prior.remove_() before saving it for use, "
            "RankPrior(model, num_data=1).remove_() if there is no prior any more, "
            "or posterior.fix_ranks_() if it is a posterior."
        )
    description = {
        **about,
        "format": FORMAT,
        "params": count_parameters(model),
        "layers": {name: _describe(layer) for name, layer in layers.items()},
    }
    return json.dumps(description, indent=2) + "\n"


def _rebuild(folder: Path, description: Mapping[str, Any], model: nn.Module | None) -> nn.Module:
    """The network described, with layers of the right shapes and any values."""
    if model is None:
        build = models.BUILDERS.get(str(description.get("model")))
        if build is None:
            raise ConfigError(
                f"{folder / DESCRIPTION} names the network {description.get('model')!r}, which is not one of "
                f"{sorted(models.BUILDERS)}. Pass the dense network as the second argument."
            )
        require(description, "classes")
        model = build(num_classes=len(description["classes"]))
    try:
        originals = {name: model.get_submodule(name) for name in description["layers"]}
    except AttributeError as error:
        raise ConfigError(f"The network given is not the one that was saved in {folder}: {error}.") from error
    if lazy := [name for name, layer in originals.items() if is_lazy(layer)]:
        raise ConfigError(
            f"The network given has lazy layers without weights: {', '.join(lazy)}. Run one batch through it first."
        )
    try:
        layers = {originals[name]: _build(about) for name, about in description["layers"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / DESCRIPTION} does not describe its layers completely: {error!r}.") from error
    replace_layers(model, layers)
    return model


def _take_types(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter and buffer the type that it has in the file: what is copied into it is then not rounded."""
    names = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, own in (pair for pairs in names for pair in pairs):
        if name in tensors:
            own.data = own.data.to(tensors[name].dtype)


def read_description(path: Path | str) -> tuple[Path, dict[str, Any]]:
    """The folder of a saved model and its description."""
    path = Path(path)
    if not path.is_dir() and path.name not in (WEIGHTS, PARTICLES, DESCRIPTION):
        raise DataError(f"{path} is no saved model. Name its folder, its {DESCRIPTION} or its {WEIGHTS}.")
    folder = path if path.is_dir() else path.parent
    file = folder / DESCRIPTION
    if not file.exists():
        raise DataError(f"There is no saved model at {path}: {file.name} is missing.")
    try:
        description = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT or "layers" not in description:
        raise DataError(f"{file} does not describe a saved model of format {FORMAT}.")
    return folder, description


def require(description: Mapping[str, Any], *keys: str) -> None:
    """Refuse a description that lacks what a caller needs."""
    lacking = [key for key in keys if key not in description]
    if lacking:
        raise DataError(f"{DESCRIPTION} says nothing of {', '.join(lacking)}. A run of bayestrain train has all.")


def _describe(layer: TTLayer) -> dict[str, Any]:
    assert isinstance(layer, TTLinear | TTConv2d)
    about: dict[str, Any] = {
        "in_modes": list(layer.in_modes),
        "out_modes": list(layer.out_modes),
        "ranks": list(layer.ranks),
        "bias": layer.bias is not None,
        "dense_parameters": layer.dense_parameters,
        "parameters": layer.parameters_left,
    }
    if isinstance(layer, TTLinear):
        return {"kind": "linear", "in_features": layer.in_features, "out_features": layer.out_features, **about}
    return {
        "kind": "conv2d", "in_channels": layer.in_channels, "out_channels": layer.out_channels,
        "kernel_size": layer.kernel_size, "stride": layer.stride, "padding": layer.padding,
        "dilation": layer.dilation, "padding_mode": layer.padding_mode, **about,
    }  # fmt: skip


def _build(about: Mapping[str, Any]) -> TTLayer:
    shared: dict[str, Any] = {
        "bias": about["bias"],
        "in_modes": tuple(about["in_modes"]),
        "out_modes": tuple(about["out_modes"]),
        "max_rank": tuple(about["ranks"][1:-1]),
    }
    if about["kind"] == "linear":
        return TTLinear(about["in_features"], about["out_features"], **shared)
    padding = about["padding"] if isinstance(about["padding"], str) else tuple(about["padding"])
    return TTConv2d(
        about["in_channels"], about["out_channels"], tuple(about["kernel_size"]), tuple(about["stride"]), padding,
        tuple(about["dilation"]), padding_mode=about["padding_mode"], **shared,
    )  # fmt: skip
