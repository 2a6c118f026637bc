"""Saved models and posteriors: a folder with the tensors (safetensors) and ``model.json``, which describes them.

A dense network becomes the saved model. What is read is compared with the network before that changes.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from bayestrain.errors import BayesTrainError, ConfigError, DataError, ShapeError
from bayestrain.files import checksum, locked, reading, write_atomically, writing
from bayestrain.formats import get
from bayestrain.io.card import HEAD, card
from bayestrain.io.structure import build, describe
from bayestrain.nn.convert import Place, find_places, install
from bayestrain.nn.factorized import FactorizedWeight, RankState
from bayestrain.nn.layer import is_lazy
from bayestrain.nn.layout import Layout
from bayestrain.nn.parameters import HOLDER
from bayestrain.nn.sizes import count_parameters, dense_parameters, layer_name
from bayestrain.posterior import Classification, Joint, Likelihood, ParticleModel, Regression

VERSION = 2
WEIGHTS, PARTICLES, DESCRIPTION, CARD = "model.safetensors", "posterior.safetensors", "model.json", "README.md"
LARGEST_DESCRIPTION, MOST_SIZES = 64 << 20, 64  # bounds on what is read: bytes of the JSON, and sizes in one list
LAYOUT = {"shape": 1, "axes": 1, "splits": 2, "modes": 2}  # of a layout, and how deep its lists of sizes are nested


def save(model: nn.Module | ParticleModel, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
    """Write a model or a posterior into a folder, which is created if necessary; ``model.json`` includes `about`.

    The JSON describes a network whose modules are all PyTorch's own, such as an `nn.Sequential` of layers, so that
    `load` builds it. The schema of the file is ``model.schema.json`` beside this module.

    A model card, ``README.md``, shows what is known; one that you wrote or changed the head of stays. Remove lambda
    first, with `RankPrior.remove_` or `Posterior.fix_ranks_`. Frozen parameters are saved once.
    """
    if not isinstance(model, nn.Module | ParticleModel):
        raise ConfigError(f"Expected a torch.nn.Module or a posterior, got a {type(model).__name__}. Pass the model.")
    module, folder = model if isinstance(model, nn.Module) else model.joint, Path(path)
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"A model is saved into a folder, but {path} is a file. Choose another name.")
        judged = (DESCRIPTION,) if (folder / DESCRIPTION).exists() else (WEIGHTS, PARTICLES)
        for file in (folder / name for name in (DESCRIPTION, WEIGHTS, PARTICLES, CARD)):
            if file.exists() and not (file.is_file() and (file.name not in judged or _ours(file))):
                raise ConfigError(f"{file} is not of a model that save wrote. Choose another folder, or delete it.")
    own: dict[str, Any] = {"version": VERSION, "kind": "model"}
    tensors = _tensors(module)
    if not isinstance(model, nn.Module):
        stacked = {n: t for n, t in {**model.particles, **model.carried}.items() if n in tensors}
        own |= {"kind": "posterior", "particles": len(model), "likelihood": None}
        if type(likelihood := model.likelihood) is Classification:
            own["likelihood"] = {"kind": "classification", "temperature": likelihood.temperature}
        elif type(likelihood) is Regression:
            own["likelihood"] = {"kind": "regression", "noise": likelihood.noise}
        own["shared"] = sorted(tensors.keys() - stacked.keys())
        tensors |= stacked
    check_values(module, tensors)
    if any(isinstance(state, RankState) for state in module.modules()):
        raise ConfigError("The model still carries lambda. Call RankPrior.remove_(), or Posterior.fix_ranks_().")
    own |= {"parameters": count_parameters(module), "dense_parameters": dense_parameters(module)}
    own |= {"weights": described(module), "network": _network(model)}
    plain = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    content = safetensors.torch.save(plain, {"bayestrain": str(VERSION)})  # of two keys the order would vary
    own["sha256"] = hashlib.sha256(content).hexdigest()
    text = as_json(own, about or {}, "about")
    file = folder / (WEIGHTS if own["kind"] == "model" else PARTICLES)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):  # a process that is killed leaves the old model or the new one
        write_atomically(_new(file), content)
        write_atomically(folder / DESCRIPTION, text)
        with writing(file):
            _new(file).replace(file)
            if _ours(other := folder / (PARTICLES if file.name == WEIGHTS else WEIGHTS)):  # of what was there before
                other.unlink()
    if not (readme := folder / CARD).is_file() or readme.read_bytes().startswith(HEAD.encode()):
        ranks = {name: weight.ranks for name, weight in module.named_modules() if name in own["weights"]}
        write_atomically(readme, card({**(about or {}), **own}, ranks))


def load(path: Path | str, into: nn.Module | None = None, likelihood: Likelihood | None = None) -> Any:
    """Read a saved model, in evaluation mode, or a saved posterior (a `ParticleModel`), ready to predict.

    Args:
        path: the folder, or one of its files.
        into: a freshly built network, before or after `tensorize_`, which takes the layers, values and types of the
            file, and is returned, or becomes the posterior's template. Not needed if all modules are PyTorch's own.
        likelihood: of a posterior, if it is neither a `Classification` nor a `Regression`.
    """
    if not isinstance(into, nn.Module | None):
        raise ConfigError(f"into must be a network, got {into!r}. If that builds one, call it first.")
    folder, description = _read_description(path)
    into = _built_network(folder, description) if into is None else into
    if description["kind"] == "model":
        _fill(folder, description, into, _read_tensors(folder / WEIGHTS, description, into))
        return into.eval()
    likelihood = description["likelihood"] if likelihood is None else copy.deepcopy(likelihood)
    if likelihood is None:
        raise ConfigError(f"{folder / DESCRIPTION} names no likelihood of BayesTrain. Pass likelihood=yours to load.")
    joint, n = Joint(into, likelihood), description["particles"]
    tensors = _read_tensors(folder / PARTICLES, description, joint)
    stacked = {name: tensor for name, tensor in tensors.items() if name not in description["shared"]}
    if not n or {tensor.shape[:1] for tensor in stacked.values()} != {(n,)}:
        raise DataError(f"{folder / PARTICLES} does not hold the {n} particles that {DESCRIPTION} describes.")
    _fill(folder, description, joint, {**tensors, **{name: tensor[0] for name, tensor in stacked.items()}})
    particles, carried = (
        {name: stacked[name].to(own.device) for name, own in owned if name in stacked}
        for owned in (joint.named_parameters(), joint.named_buffers())
    )
    return ParticleModel(joint.eval(), particles, carried)


def as_json(own: Mapping[str, Any], given: Mapping[str, Any], name: str) -> str:
    """What is known of a model, and what a user says of it in the argument `name`."""
    if taken := sorted(own.keys() & given.keys() if isinstance(given, Mapping) else ()):
        raise ConfigError(f"{name} must not contain {taken[0]!r}, which is written anyway. Give it another name.")
    try:
        return json.dumps({**given, **own}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must hold what JSON can: text, finite numbers, lists and dicts. {error}.") from error


def _ours(file: Path) -> bool:
    """Whether `save` wrote a file."""
    try:
        if file.name == DESCRIPTION:
            return bool({"version", "kind", "weights"} <= json.loads(file.read_bytes()).keys())
        with safetensors.safe_open(file, "pt") as found:
            return "bayestrain" in (found.metadata() or {})
    except (AttributeError, OSError, RecursionError, SafetensorError, ValueError):
        return False


def described(module: nn.Module) -> dict[str, dict[str, Any]]:
    """What ``model.json`` says of the factorised weights of a module."""
    return {
        name: {"format": own.format.name, "equation": str(own.equation),
               "layout": {key: getattr(own.layout, key) for key in ("name", *LAYOUT)}}
        for name, own in module.named_modules() if isinstance(own, FactorizedWeight)
    }  # fmt: skip


def parsed(about: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of one weight, with its layout as an object; raises if that cannot be."""
    sizes = {key: _sizes(about["layout"][key], depth) for key, depth in LAYOUT.items()}
    return {**about, "layout": Layout(**sizes, name=str(about["layout"]["name"]))}


def _network(model: nn.Module | ParticleModel) -> Any:
    """The modules of a network for ``model.json``, or None if that cannot say how to build it."""
    module = model if isinstance(model, nn.Module) else model.joint
    tensors = _tensors(module)
    try:
        weights = {name: parsed(about) for name, about in described(module).items()}
        found = describe(module if isinstance(model, nn.Module) else model.joint.model)
        network = build(found, len(tensors))
        whole = network if isinstance(model, nn.Module) else Joint(network, copy.deepcopy(model.joint.likelihood))
        made = _built(Path(DESCRIPTION), {"weights": weights}, whole, tensors)[2]
    except (BayesTrainError, RuntimeError, TypeError, ValueError):
        return None
    return found if {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in tensors.items()} else None


def _built_network(folder: Path, description: Mapping[str, Any]) -> nn.Module:
    """The network that a description describes, on the meta device."""
    file = _current(folder / (WEIGHTS if description["kind"] == "model" else PARTICLES), description)
    if description.get("network") is None:
        raise ConfigError(f"{folder / DESCRIPTION} does not say how to build a network. Use load(path, into=network).")
    with reading(file):
        if not file.is_file():
            raise ValueError("there is no such file")
        with safetensors.safe_open(file, "pt") as tensors:
            number = len(tensors.keys())
    with reading(folder / DESCRIPTION, "Build the network yourself, and pass it: load(path, into=network)."):
        return build(description["network"], number)  # type: ignore[no-any-return]


def _read_description(path: Path | str) -> tuple[Path, dict[str, Any]]:
    """The folder of a saved model and its description, with layouts and likelihood as objects."""
    folder = Path(path).parent if Path(path).name in (WEIGHTS, PARTICLES, DESCRIPTION) else Path(path)
    file = folder / DESCRIPTION
    try:
        if not file.is_file():
            raise DataError(f"There is no saved model at {path}: {file} is missing. Name the folder of one.")
        if file.stat().st_size > LARGEST_DESCRIPTION:
            raise ValueError(f"it has more than {LARGEST_DESCRIPTION:,} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["version"] != VERSION or found["kind"] not in ("model", "posterior"):
            raise ValueError(f"its kind is {found['kind']!r}, its version {found['version']!r}")
        found["weights"] = {name: parsed(about) for name, about in found["weights"].items()}
        if found["kind"] == "posterior":
            found["particles"], found["shared"] = _sizes(found["particles"], 0), set(found["shared"])
            if (about := found["likelihood"]) is not None:
                known = about["kind"] == "classification"
                found["likelihood"] = Classification(about["temperature"]) if known else Regression(about["noise"])
    except (AttributeError, KeyError, OSError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{file} describes no saved model of version {VERSION}: {error!r}.") from error
    return folder, found


def _sizes(value: object, depth: int = 1) -> Any:
    """Sizes, in lists nested to this depth, as tuples; raises for anything else: a number times a tuple repeats it."""
    if depth and isinstance(value, list | tuple) and len(value) <= MOST_SIZES:
        return tuple(_sizes(each, depth - 1) for each in value)
    if not depth and type(value) is int and 0 <= value < 2**63:
        return value
    raise ValueError(f"{str(value)[:40]} is no size or short list of sizes")


def _new(file: Path) -> Path:
    """Where tensors are until the description is theirs."""
    return file.with_name(f".{file.name}.new")


def _current(file: Path, description: Mapping[str, Any]) -> Path:
    """The tensors that a description is of: saving may have been interrupted just after that was written."""
    new = _new(file)
    return new if new.is_file() and checksum(new) == description.get("sha256") else file


def check_values(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless a module's tensors, which may have another shape, are there and finite."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(f"{name!r} has no values yet. Run one batch through the model, then save it.")
        try:  # a mask, which is a buffer, may be infinite
            finite = not bool(tensor.isnan().any()) and (name not in parameters or not bool(tensor.isinf().any()))
        except NotImplementedError:
            kind = f"{name!r} is stored as {type(tensor).__name__}, which cannot be written"
            raise ConfigError(f"{kind}. Save or export before you quantise; export has weights='int8'.") from None
        if not finite:
            raise ConfigError(f"{name!r} has NaN or infinite values. Go back to a checkpoint from before that.")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, each under its first name."""
    kept = model.state_dict(keep_vars=True)
    if odd := next((name for name, value in kept.items() if not isinstance(value, Tensor)), None):
        raise ConfigError(f"{odd!r} is a {type(kept[odd]).__name__}, and only tensors are saved. Remove that state.")
    return {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n in kept}


def _read_tensors(file: Path, description: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a file, of which safetensors compares the header with the size before it reads any."""
    with reading(file, "Restore it, or save the model again."):
        known = description.get("sha256")
        file = _current(file, description)
        if not file.is_file():
            raise ValueError("there is no such file")
        tensors = safetensors.torch.load_file(file)
        if known not in (None, checksum(file)):  # an older description has none
            raise ValueError(f"its checksum is not that in {DESCRIPTION}; perhaps saving was interrupted")
        masks = dict(module.named_buffers())
        for name, tensor in tensors.items():
            if bool(tensor.isnan().any()) or (name not in masks and bool(tensor.isinf().any())):
                raise ValueError(f"it has NaN or infinite values in {name!r}")
    return tensors


def _fill(folder: Path, description: Mapping[str, Any], module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put factorised weights in place where the description has them, then give all tensors the values of the file."""
    if lazy := [name for name, layer in module.named_modules() if is_lazy(layer)]:
        raise ConfigError(f"The network given has lazy layers: {', '.join(lazy)}. Run one batch through it first.")
    weights, places, own = _built(folder, description, module, tensors)
    states = {id(each) for weight in module.modules() if isinstance(weight, RankState) for each in weight.buffers()}
    own = {name: tensor for name, tensor in own.items() if id(tensor) not in states}
    wrong = f"The tensors in {folder} are not those of the network given"
    if odd := own.keys() ^ tensors.keys():
        raise DataError(f"{wrong}: these are not in both: {', '.join(sorted(odd))}.")
    for name, tensor in own.items():
        found = tensors[name]
        if (tensor.shape, tensor.is_floating_point()) != (found.shape, found.is_floating_point()):
            needed, there = (f"shape {tuple(t.shape)} of {t.dtype}" for t in (tensor, found))
            raise DataError(f"{wrong}: {name} needs {needed}, there is {there}.")
    left = [name for name, tensor in module.named_buffers() if tensor.is_meta and id(tensor) not in states]
    if empty := [name for name in left if name not in own]:
        raise ConfigError(f"{empty[0]!r} is on the meta device, and no file holds it. Build the network on a device.")
    install(module, places)
    for old, new in weights.items():
        old.rank_state = None  # a saved model has none
        if (old.format, old.layout) != (new.format, new.layout):
            new.requires_grad_(old.cores[0].requires_grad)
            old.format, old.layout, old.equation, old.cores = new.format, new.layout, new.equation, new.cores
        old.set_cores(list(new.cores))
    _leave_meta(module)
    for name, tensor in _tensors(module).items():
        tensor.data = tensors[name].to(tensor.device, copy=True)


def _leave_meta(model: nn.Module) -> None:
    """Give tensors on the meta device memory, and let what was shared stay so; all others stay as they are."""
    made = dict[Tensor, Tensor]()
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                if tensor not in made:
                    new = torch.empty_like(tensor, device="cpu")
                    made[tensor] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                setattr(module, name, made[tensor])


def _built(
    folder: Path, description: Mapping[str, Any], model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[dict[FactorizedWeight, FactorizedWeight], dict[Place, FactorizedWeight], dict[str, Tensor]]:
    """All factorised weights, by the weights and the places they are for, and the tensors the model will have then."""
    modules, places, own = dict(model.named_modules()), list(find_places(model)), _tensors(model)
    by_path = {place.path: place for place in places}
    weights, placed = dict[FactorizedWeight, FactorizedWeight](), dict[Place, FactorizedWeight]()
    for path, about in description["weights"].items():
        name = layer_name(path)
        module = modules.get(path)
        old = module if isinstance(module, FactorizedWeight) else None
        inside = f".{path}".replace(f".{HOLDER}.", ".").removeprefix(".")
        place = by_path.get(f"{name}.weight".removeprefix(".")) or by_path.get(inside)
        try:  # a format that no list names may be one of the user's
            format = old.format if old and old.format.name == about["format"] else get(about["format"])
            equation = format.equation(about["layout"].sizes)
            if str(equation) != about["equation"]:
                raise ShapeError(f"format {format.name!r} has the equation {equation}, not {about['equation']}.")
            names = [f"{path}.cores.{k}".removeprefix(".") for k in range(len(equation.cores))]
            weight = FactorizedWeight(format, about["layout"], [tensors[name] for name in names])
        except (BayesTrainError, KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"The files in {folder} do not fit each other at layer {name!r}: {error}") from error
        shape = old.shape if old else tuple(place.oriented().shape) if place else None
        if shape != weight.shape or (place and place.kind and place.module is model):
            there = f"{type(modules.get(name)).__name__} with weight {shape}, not {weight.shape}"
            raise ConfigError(f"The network given is not the one saved in {folder}: layer {name!r} is a {there}.")
        if old is not None:
            gone = tuple(f"{path}.cores.{k}".removeprefix(".") for k in range(len(old.cores)))
            weights[old] = weight.to(old.cores[0].device)
        elif place is not None:  # and whatever shares its weight
            sharing = [other for other in places if other.weight is place.weight]
            gone = tuple(other.path for other in sharing)
            placed |= dict.fromkeys(sharing, weight.to(place.weight.device))
        own = {name: tensor for name, tensor in own.items() if name not in gone}
        own |= dict(zip(names, weight.cores, strict=True))
    return weights, placed, own
