"""Saved models and posteriors: a folder with the tensors (safetensors) and ``model.json``, which describes them.

The JSON describes every factorised weight: format, equation, layout and shapes of its cores. So a model whose ranks
were found in training is rebuilt from a freshly built dense network, whatever the format. Both files hold data only,
and the sizes in them are compared with each other before anything is allocated.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bayestrain.errors import BayesTrainError, ConfigError, DataError, ShapeError
from bayestrain.files import write_atomically
from bayestrain.formats import get
from bayestrain.nn.convert import TWINS, replace_layers
from bayestrain.nn.factorized import FactorizedWeight
from bayestrain.nn.layer import TensorLayer, is_lazy
from bayestrain.nn.layout import Layout
from bayestrain.nn.sizes import count_parameters, dense_parameters, factorized_weights
from bayestrain.posterior import Classification, Joint, Likelihood, ParticleModel, Regression

VERSION = 1
WEIGHTS, PARTICLES, DESCRIPTION = "model.safetensors", "posterior.safetensors", "model.json"
LARGEST_DESCRIPTION, LARGEST_SIZE, MOST_SIZES = 64 << 20, 1 << 40, 64
"""Bounds on what is read: bytes of the JSON, a size in it, and the number of sizes in one list."""

LIKELIHOODS: dict[str, tuple[Callable[[Any], Likelihood], str]] = {
    "classification": (Classification, "temperature"),
    "regression": (Regression, "noise"),
}
"""Likelihoods that a file can describe, each with its setting."""


def save(model: nn.Module | ParticleModel, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
    """Write a model or a posterior into a folder, which is created if necessary.

    Lambda is not part of a saved model: remove it first, with `RankPrior.remove_` or `Posterior.fix_ranks_`. Frozen
    parameters, which all particles share, are saved once.

    Args:
        model: any network, or a posterior.
        path: the folder.
        about: stored in ``model.json`` as it is.
    """
    module = model if isinstance(model, nn.Module) else model.joint
    own: dict[str, Any] = {"version": VERSION, "kind": "model"}
    tensors = _tensors(module)
    if not isinstance(model, nn.Module):
        stacked = {n: t for n, t in {**model.particles, **model.carried}.items() if n in tensors}
        own |= {"kind": "posterior", "particles": len(model), "likelihood": _describe_likelihood(model.likelihood)}
        own["shared"] = sorted(tensors.keys() - stacked.keys())
        tensors |= stacked
    _check_savable(module, tensors)
    own |= {"parameters": count_parameters(module), "dense_parameters": dense_parameters(module)}
    own["weights"] = {name: _describe(module, weight) for name, weight in factorized_weights(module).items()}
    if taken := sorted(set(own) & set(about or {})):
        raise ConfigError(f"about must not contain {taken[0]!r}, which save writes itself. Give it another name.")
    try:
        text = json.dumps({**(about or {}), **own}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"about must hold what JSON can: text, finite numbers, lists and dicts. {error}.") from error
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    content = safetensors.torch.save(plain)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / (WEIGHTS if own["kind"] == "model" else PARTICLES), content)
    write_atomically(folder / DESCRIPTION, text)


def load(path: Path | str, into: nn.Module, likelihood: Likelihood | None = None) -> Any:
    """Read a saved model, in evaluation mode, or a saved posterior (a `ParticleModel`), ready to predict.

    Args:
        path: the folder, or one of its files.
        into: a freshly built network, before or after `tensorize_`. Its layers are replaced where they were factorised,
            its tensors take the values and types of the file, and it is returned, or becomes the posterior's template.
        likelihood: of a posterior, if it is neither a `Classification` nor a `Regression`.
    """
    folder, description = read_description(path)
    module, stacked = into, description["kind"] == "posterior"
    if stacked:
        known = _likelihood(folder, description) if likelihood is None else copy.deepcopy(likelihood)
        module = Joint(into, known)
    file = folder / (PARTICLES if stacked else WEIGHTS)
    tensors = _read_tensors(file, description)
    _rebuild(folder, description, module)
    shared = description["shared"] if stacked else tensors.keys()
    _fill(file, module, {name: tensor if name in shared else tensor[0] for name, tensor in tensors.items()})
    module.eval()
    if not isinstance(module, Joint):
        return into
    particles, carried = (
        {name: tensors[name].to(own.device) for name, own in owned if name in tensors.keys() - shared}
        for owned in (module.named_parameters(), module.named_buffers())
    )
    return ParticleModel(module, particles, carried)


# --- the description --------------------------------------------------------------------------------------------------


def _describe(model: nn.Module, weight: FactorizedWeight) -> dict[str, Any]:
    """One factorised weight as data."""
    return {
        "module": next(name for name, module in model.named_modules() if module is weight),
        "format": weight.format.name,
        "equation": str(weight.equation),
        "layout": {key: getattr(weight.layout, key) for key in ("name", "shape", "axes", "splits", "modes")},
        "cores": [list(core.shape) for core in weight.cores],
    }


def _describe_likelihood(likelihood: Likelihood) -> dict[str, Any] | None:
    known = ((kind, setting) for kind, (own, setting) in LIKELIHOODS.items() if type(likelihood) is own)
    return next(({"kind": kind, setting: getattr(likelihood, setting)} for kind, setting in known), None)


def _likelihood(folder: Path, description: Mapping[str, Any]) -> Likelihood:
    about = description.get("likelihood")
    try:
        if isinstance(about, dict) and about["kind"] in LIKELIHOODS:
            kind, setting = LIKELIHOODS[about["kind"]]
            return kind(about[setting])
    except (BayesTrainError, KeyError, TypeError) as error:
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
            _sizes([found["particles"]])
            found["shared"] = set(map(str, found["shared"]))
        for weight in found["weights"].values():
            if not all(isinstance(weight[key], str) for key in ("module", "format", "equation")):
                raise TypeError("module, format and equation must be text")
            layout = {key: _sizes(weight["layout"][key]) for key in ("shape", "axes", "splits", "modes")}
            weight["layout"] = Layout(**layout, name=str(weight["layout"]["name"]))
            weight["cores"] = _sizes(weight["cores"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file} is damaged: {type(error).__name__}, {error}.") from error
    return folder, found


def _sizes(value: object) -> Any:
    """Sizes, in lists or lists of lists, as tuples; raises if there are other things in them, or too large ones."""
    if isinstance(value, list) and len(value) <= MOST_SIZES:
        return tuple(map(_sizes, value))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE:
        return value
    raise ValueError(f"{str(value)[:40]} is no size or short list of sizes")


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, each under its first name."""
    kept = model.state_dict(keep_vars=True)
    if odd := next((name for name, value in kept.items() if not isinstance(value, Tensor)), None):
        raise ConfigError(f"{odd!r} is a {type(kept[odd]).__name__}, and only tensors are saved. Remove that state.")
    return {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}


def _check_savable(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what would not load, or would be useless."""
    if any(weight.rank_state is not None for weight in factorized_weights(model).values()):
        raise ConfigError(
            "The model still carries lambda. Call prior.remove_() before saving it for use, "
            "RankPrior(model, num_data=1).remove_() if there is no prior any more, "
            "or posterior.fix_ranks_() if it is a posterior."
        )
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(f"{name!r} has no values yet. Run one batch through the model, then save it.")
        # A mask, which is a buffer, may be infinite.
        if bool(tensor.isnan().any()) or (name in parameters and bool(tensor.isinf().any())):
            raise ConfigError(f"{name!r} has NaN or infinite values. Go back to a checkpoint from before that.")


def _read_tensors(file: Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file; its header must agree with the description before any of them is read."""
    wrong = f"{file} is not the one that {DESCRIPTION} describes"
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if description["kind"] == "posterior":
                stacked, n = shapes.keys() - description["shared"], description["particles"]
                if any(shapes[name][:1] != (n,) for name in stacked):
                    raise DataError(f"{wrong}: it does not hold {n} particles.")
                shapes |= {name: shapes[name][1:] for name in stacked}
            for weight in description["weights"].values():
                for k, wanted in enumerate(weight["cores"]):
                    name = f"{weight['module']}.cores.{k}".removeprefix(".")
                    if (found := shapes.get(name)) != wanted:
                        raise DataError(f"{wrong}: {name} needs shape {wanted}, there is {found or 'nothing'}.")
            tensors = {name: opened.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file} is missing or damaged: {error}") from error
    if broken := [name for name, tensor in tensors.items() if bool(tensor.isnan().any())]:
        raise DataError(f"{file} has NaN values in {broken[0]!r}. Save the model again from before that.")
    return tensors


def _fill(file: Path, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the values and types of the file."""
    wrong, own = f"{file} is not the one that {DESCRIPTION} describes", _tensors(module)
    if odd := own.keys() ^ tensors.keys():
        raise DataError(f"{wrong}: the file and the network do not have these in common: {', '.join(sorted(odd))}.")
    for name, tensor in own.items():
        if tensor.shape != (found := tensors[name].shape):
            raise DataError(f"{wrong}: {name} needs shape {tuple(tensor.shape)}, there is {tuple(found)}.")
    for name, tensor in own.items():
        tensor.data = tensors[name].to(tensor.device, copy=True)


# --- rebuilding -------------------------------------------------------------------------------------------------------


def _rebuild(folder: Path, description: Mapping[str, Any], model: nn.Module) -> None:
    """Put factorised weights in place where the description has them; all are built before the first one is put in."""
    if lazy := [name for name, layer in model.named_modules() if is_lazy(layer)]:
        raise ConfigError(
            f"The network given has lazy layers without weights: {', '.join(lazy)}. Run one batch through it first."
        )
    built: dict[nn.Module, nn.Module] = {}
    same: dict[FactorizedWeight, list[Tensor]] = {}
    for name, about in description["weights"].items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(f"The network given is not the one that was saved in {folder}: {error}.") from error
        old = layer.factorized if isinstance(layer, TensorLayer) else layer
        try:
            weight = _weight(about, old)
        except (BayesTrainError, IndexError) as error:
            raise DataError(f"{folder / DESCRIPTION} cannot be used for layer {name!r}: {error}") from error
        if isinstance(old, FactorizedWeight) and (old.format, old.layout) == (weight.format, weight.layout):
            same[old] = list(weight.cores)
            continue
        shape = getattr(old if isinstance(old, FactorizedWeight) else getattr(old, "weight", None), "shape", ())
        if shape != weight.shape or old is model or type(old) not in (FactorizedWeight, *TWINS):
            raise ConfigError(
                f"The network given is not the one that was saved in {folder}: layer {name!r} is a "
                f"{type(layer).__name__} with a weight of shape {tuple(shape)}, and one of {weight.shape} was saved."
            )
        built[old] = weight if isinstance(old, FactorizedWeight) else TWINS[type(old)].of(old, weight)
    replace_layers(model, built)
    for own, cores in same.items():
        own.set_cores(cores)  # perhaps with other ranks


def _weight(about: Mapping[str, Any], old: nn.Module) -> FactorizedWeight:
    """The weight that a description stands for; its values come later."""
    layout, format = about["layout"], old.format if isinstance(old, FactorizedWeight) else None
    if format is None or format.name != about["format"]:  # otherwise perhaps one of the user's
        format = get(about["format"])
    if (equation := str(format.equation(layout.sizes))) != about["equation"]:
        raise ShapeError(f"the format {format.name!r} has the equation {equation} here, not {about['equation']}.")
    like = next(old.parameters(), torch.empty(0))
    cores = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in about["cores"]]
    return FactorizedWeight(format, layout, cores).requires_grad_(like.requires_grad)
