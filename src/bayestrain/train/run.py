"""What `bayestrain train` does: from names to a folder with a network, its predictions, and their metrics."""

import fnmatch
import importlib
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save as serialised
from torch import Tensor, nn

from bayestrain.errors import ConfigError
from bayestrain.files import reading
from bayestrain.io import load, save
from bayestrain.nn import TensorizeConfig, count_parameters, dense_parameters, factorized_weights, ranks, tensorize_
from bayestrain.nn.fast import fast
from bayestrain.posterior.likelihoods import Classification, Likelihood, as_likelihood
from bayestrain.posterior.model import Joint, ParticleModel, stack_joints
from bayestrain.posterior.posterior import around, independent
from bayestrain.posterior.prediction import ClassPrediction, RegressionPrediction, auroc, fit_temperature
from bayestrain.train import config as configs
from bayestrain.train.batches import Batches
from bayestrain.train.config import RunConfig, TensorizeSettings
from bayestrain.train.distributed import join, own_device, rank, reporting, shared, whole_state
from bayestrain.train.environment import describe_environment, peak_memory_bytes, record_environment
from bayestrain.train.fit import fit
from bayestrain.train.folder import RunFolder, read_json
from bayestrain.train.search import check_target
from bayestrain.train.subject import predict

COLLAPSED = 0.5  # fewer different particles than this share of all deserve a warning
DATA = ("train", "validation", "test", "outside", "classes", "mean", "std")  # what a run may know of its data


@reporting()
def train_run(
    config: RunConfig, folder: Path | str, *, resume: bool = False, overwrite: bool = False,
    device: torch.device | str = "cpu", callbacks: Sequence[Any] = (), command: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Train what the config names, fill the folder, and return its ``result.json``, also if it is finished already."""
    path, place, how, seed = Path(folder), own_device(torch.device(device)), config.posterior, config.run.seed
    join(place)
    if resume and (path / "config.toml").is_file():
        before = configs.load(path / "config.toml")
        each = (configs.flat(*vars(one).values()) for one in (before, config))
        if changed := "; ".join(configs.differences(*each)):
            raise ConfigError(f"{path} has other settings ({changed}). Resume with the same, or choose another folder.")
    data, likelihood, note, settings = load_data(config.run.data), _likelihood(config.run.likelihood), None, config.fit
    if config.run.from_run:
        start, note = _finished_run(config)
        models = [start]
        if how.particles > 1:  # their ranks stay as they are
            models, settings = around(start, how.particles, how.jitter, seed), replace(settings, search=False)
    else:
        models = independent(lambda: tensorized(built(config.run.model), config.tensorize), how.particles, seed)
    if not resume:
        check_target(settings, models[0])  # before a run is overwritten
    main = rank() == 0  # the only process that writes
    with RunFolder(path, resume=resume, overwrite=overwrite) if main else nullcontext() as opened:
        resume = opened is not None and opened.resumed
        if shared(opened is not None and resume and opened.finished):
            return read_json(path / "result.json") if main else {}
        if opened is not None:
            opened.write("config.toml", configs.dumps(config))
            environment = record_environment(opened, place, command, resume=resume)
        if (perf := fast()) is not None:
            perf.memory.retain_freed_memory()
        fitted = fit(
            models, data.train, data.validation, likelihood=likelihood, config=settings, prior=config.prior,
            method=how.method, kernel=how.kernel, temperature=how.temperature, chunk=how.chunk, replicas=how.replicas,
            callbacks=callbacks, folder=opened, resume=resume, device=place, seed=seed, progress=False,
        )  # fmt: skip
        trained = fitted.model if fitted.posterior is None else fitted.posterior.gathered()
        if (state := whole_state(fitted.model)) is not None and opened is not None:
            trained = tensorized(built(config.run.model), config.tensorize).to(place)
            trained.load_state_dict(state)
        if opened is None:
            return {}
        result = {
            "name": config.run.name, "seed": seed,
            "dense_parameters": dense_parameters(fitted.model), "parameters": count_parameters(fitted.model),
            "start_ranks": fitted.history[0]["ranks"], "ranks": ranks(fitted.model),
            "layers": _layers(fitted.model, fitted.history[0]["ranks"]),
            **evaluate(config, data, trained, fitted.likelihood, place, opened),
            "seconds": fitted.seconds, "peak_memory_bytes": peak_memory_bytes(place),
            **{key: environment[key] for key in ("device", "command", "commit", "dirty")},
            "from_run": note, "status": "finished",
        }  # fmt: skip
        about: dict[str, Any] = {"model": config.run.model, "data": config.run.data, "name": config.run.name}
        figures = result["metrics"] or {}  # for the model card
        about["metrics"] = {key: v for key, v in figures.items() if isinstance(v, float) and math.isfinite(v)}
        if fitted.posterior is None:
            about["likelihood_state"] = {name: v.tolist() for name, v in fitted.likelihood.state_dict().items()}
        else:
            diagnostics, left, warnings = fitted.history[-1]["diagnostics"], fitted.history[-1]["particles"], []
            if (lost := how.particles - left) > 0:
                warnings += [f"{lost} of {how.particles} particles were not finite and dropped. Try a smaller fit.lr."]
            if (different := diagnostics["effective_particles"]) < COLLAPSED * left:
                remedy = "Start them without run.from_run, or with a larger posterior.jitter."
                warnings += [f"The particles have collapsed: only about {different:.1f} of {left} differ. {remedy}"]
            result["posterior"] |= {"diagnostics": diagnostics, "warnings": warnings}
        save(trained.cpu() if isinstance(trained, nn.Module) else trained, path, about)
        opened.write("result.json", result)
        return configs.plain(result)  # type: ignore[no-any-return]


def evaluate_run(folder: Path | str, *, device: torch.device | str = "cpu", command: str = "") -> dict[str, Any]:
    """Evaluate a finished run again: predictions, temperature and metrics. Nothing is trained."""
    path, place = Path(folder), torch.device(device)
    before, config = read_json(path / "result.json", "metrics", "parameters"), configs.load(path / "config.toml")
    with RunFolder(path, resume=True) as opened:
        found = evaluate(config, load_data(config.run.data), *_saved(path, config, place), place, opened)
        if found["posterior"] is not None:
            found["posterior"] = {**(before["posterior"] or {}), **found["posterior"]}  # what only training knew, too
        result = {**before, **found, "evaluated_again": {"command": command, **describe_environment(place)}}
        opened.write("result.json", result)
        return result


def load_run(folder: Path | str, *, device: torch.device | str = "cpu") -> ParticleModel:
    """A run's posterior, or its network as one particle; calls what the config names, so load only runs you trust."""
    model, likelihood = _saved(Path(folder), configs.load(Path(folder) / "config.toml"), torch.device(device))
    if isinstance(model, ParticleModel):
        return model
    joint = Joint(model, likelihood)
    return ParticleModel(joint, *stack_joints([joint]))


def _saved(folder: Path, config: RunConfig, device: torch.device) -> tuple[Any, Likelihood]:
    likelihood = _likelihood(config.run.likelihood)
    model = load(folder, into=built(config.run.model), likelihood=likelihood if ":" in config.run.likelihood else None)
    if isinstance(model, ParticleModel):
        return model.to(device), model.likelihood
    state = read_json(folder / "model.json").get("likelihood_state", {})
    with reading(folder / "model.json", "Restore it, or train the run again."):
        likelihood.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.to(device), likelihood.to(device)


def resolve(name: str) -> Any:
    """What ``"package.module:name"`` or ``"file.py:name"`` stands for; modules may be in the current folder."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f'{name!r} must be "package.module:name" or "file.py:name".')
    path, is_file = Path(place), place.endswith(".py")
    folder, module = (str(path.parent.resolve()), path.stem) if is_file else (str(Path.cwd()), place)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module of the user's lacks something else
        where = f"in {folder} or among those installed"
        raise ConfigError(f'There is no module {place!r} {where}. For a file, write "path/to/file.py:name".') from None
    if not hasattr(found, attribute):
        raise ConfigError(f"{place} has no {attribute!r}.{configs.nearest(attribute, dir(found))}")
    return getattr(found, attribute)


def made(name: str) -> Any:
    """What a name stands for, or what that returns if it is a function or class."""
    found = resolve(name)
    return found() if callable(found) and not isinstance(found, nn.Module) else found


def load_data(name: str) -> SimpleNamespace:
    """The data that a name stands for: train, validation and test, and what else is known of them."""
    found = made(name)
    if isinstance(found, tuple | list) and 2 <= len(found) <= 3:
        found = SimpleNamespace(**dict(zip(DATA, found, strict=False)))
    if getattr(found, "train", None) is None:
        wanted = "(train, validation), (train, validation, test), or an object with these attributes"
        raise ConfigError(f"{name} must return {wanted}, got a {type(found).__name__}.")
    return SimpleNamespace(**{name: getattr(found, name, None) for name in DATA})


def _likelihood(name: str) -> Likelihood:
    found = resolve(name) if ":" in name else name
    return as_likelihood(found() if isinstance(found, type) else found)


def built(name: str) -> nn.Module:
    if not isinstance(model := made(name), nn.Module):
        raise ConfigError(f"{name} must build a torch.nn.Module, got a {type(model).__name__}.")
    return model


def tensorized(model: nn.Module, settings: TensorizeSettings) -> nn.Module:
    """Factorise the layers that the settings do not keep dense."""
    dense = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    kept = {name for pattern in settings.keep_dense for name in fnmatch.filter([*dense, *settings.modes], pattern)}
    if not settings.enabled or (kept.issuperset(dense) and factorized_weights(model)):
        return model  # perhaps the function that built it has done so
    modes = {name: chosen for name, chosen in settings.modes.items() if name not in kept}
    chosen = TensorizeConfig(settings.max_rank, settings.format, settings.layout, settings.init, settings.tol, modes)
    tensorize_(model, chosen, lambda *_: True, exclude=settings.keep_dense)
    return model


def _finished_run(config: RunConfig) -> tuple[nn.Module, dict[str, Any]]:
    """The network of the finished run that this one starts from, and a note of what that was."""
    run = Path(config.run.from_run)
    result, before = read_json(run / "result.json", "commit"), configs.load(run / "config.toml")
    if before.posterior.particles > 1:
        raise ConfigError(f"{run} holds a posterior; run.from_run needs a run of one network.")
    if before.run.model != config.run.model:
        raise ConfigError(f"The network of {run} is {before.run.model}, not {config.run.model}. Name the same model.")
    earlier = result.get("from_run") or {"epochs": 0, "commits": []}
    epochs = before.fit.epochs + before.fit.finetune_epochs + earlier["epochs"]
    commits = sorted({result["commit"], *earlier["commits"]} - {None})
    return _saved(run, before, torch.device("cpu"))[0], {"run": str(run), "epochs": epochs, "commits": commits}


def _layers(model: nn.Module, start_ranks: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """The parameters of every layer, bias included: as a dense layer, at the start, and now."""
    weights, found = factorized_weights(model), {}
    for name, module in model.named_modules():
        dense = start = now = sum(parameter.numel() for parameter in module.parameters())
        if weight := weights.get(name):
            kind = {"format": weight.format.name, "layout": weight.layout.name, "shape": weight.shape}
            dense += weight.dense_numel - weight.numel
            start += weight.equation.entries(weight.layout.sizes, start_ranks[name]) - weight.numel
        elif isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            kind = {"format": "", "layout": "", "shape": tuple(module.weight.shape)}
        else:
            continue
        found[name] = {**kind, "dense": dense, "start": start, "now": now}
    return found


def evaluate(
    config: RunConfig, data: SimpleNamespace, model: nn.Module | ParticleModel, likelihood: Likelihood,
    device: torch.device, folder: RunFolder,
) -> dict[str, Any]:  # fmt: skip
    """The metrics on the test data, also at the temperature fitted to the validation data; writes the predictions."""
    parts = {
        name: Batches(part, max(config.fit.batch_size, 256), shuffle=False, device=device, name=name)
        for name in DATA[:4] if (part := getattr(data, name)) is not None
    }  # fmt: skip
    example = next(iter(parts["train"]))[0]
    known, judged = isinstance(example, Tensor), "test" if "test" in parts else "validation"
    about: dict[str, Any] | None = None
    if isinstance(model, ParticleModel):
        about = {"method": config.posterior.method, "particles": len(model), "ood": None}
    found: dict[str, Any] = {
        "task": "other", "metrics": {}, "calibrated": None, "validation": None, "posterior": about,
        "evaluated_on": judged, "input_shape": list(example.shape[1:]) if known else None,
        "input_dtype": str(example.dtype).removeprefix("torch.") if known else None,
        **{key: None if (own := getattr(data, key)) is None else list(own) for key in DATA[4:]},
    }  # fmt: skip
    if judged not in parts or not likelihood.predicts:
        return found
    seen = {name: predict(model, likelihood, parts[name]) for name in parts if name != "train"}
    fitted = None
    if "validation" in seen and isinstance(likelihood, Classification):
        fitted = fit_temperature(seen["validation"][0].particle_probabilities, seen["validation"][1])
        if about is not None and config.posterior.calibrate:
            likelihood.temperature = fitted
            seen = {name: (replace(prediction, temperature=fitted), y) for name, (prediction, y) in seen.items()}
    prediction, targets = seen[judged]
    found["metrics"] = _metrics(prediction, targets)
    found["validation"] = _metrics(*seen["validation"]) if "validation" in seen else None
    if fitted is not None:
        found["calibrated"] = {"temperature": fitted, **_metrics(replace(prediction, temperature=fitted), targets)}
    if about is not None:
        about["mean_log_likelihood"] = prediction.mean_log_likelihood(targets)
        if isinstance(prediction, ClassPrediction):
            about["temperature"] = prediction.temperature
            about["uncalibrated"] = _metrics(replace(prediction, temperature=1.0), targets)
        if "outside" in seen:
            outside, name = seen["outside"][0], getattr(data.outside, "name", "outside")
            apart = auroc(prediction.total, outside.total), auroc(prediction.epistemic, outside.epistemic)
            about["ood"] = {"name": name, "auroc": apart[0], "auroc_epistemic": apart[1]}
    if isinstance(prediction, ClassPrediction | RegressionPrediction):
        found["task"] = "classification" if isinstance(prediction, ClassPrediction) else "regression"
        _write_predictions(folder, prediction, targets)
    return found


def _metrics(prediction: Any, targets: Tensor) -> dict[str, float]:
    return {key: value for key, value in prediction.metrics(targets).items() if key != "mean_log_likelihood"}


def _write_predictions(folder: RunFolder, prediction: Any, targets: Tensor) -> None:
    kept = {name: getattr(prediction, name) for name in ("total", "aleatoric", "epistemic")}
    if isinstance(prediction, RegressionPrediction):
        kept |= {"mean": prediction.mean, "std": prediction.std, "targets": targets}
    else:
        kept |= {"probabilities": prediction.mean, "labels": targets}
    stored = {name: t.float() if t.is_floating_point() else t for name, t in kept.items()}
    folder.write("predictions.safetensors", serialised({name: t.cpu().contiguous() for name, t in stored.items()}))
