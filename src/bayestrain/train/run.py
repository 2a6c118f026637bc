"""What `bayestrain train` does: from names to a folder with a network, its predictions, and their metrics."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save as serialised
from torch import Tensor, nn

from bayestrain.errors import ConfigError
from bayestrain.io import load, save
from bayestrain.nn import TensorizeConfig, count_parameters, dense_parameters, factorized_weights, ranks, tensorize_
from bayestrain.nn.fast import fast
from bayestrain.posterior import (
    Classification,
    ClassPrediction,
    FunctionLikelihood,
    Joint,
    Likelihood,
    ParticleModel,
    RegressionPrediction,
    around,
    as_likelihood,
    auroc,
    fit_temperature,
    independent,
)  # fmt: skip
from bayestrain.posterior.joint import stack_joints
from bayestrain.train import config as configs
from bayestrain.train.batches import Batches
from bayestrain.train.config import RunConfig, TensorizeSettings
from bayestrain.train.environment import describe_environment, peak_memory_bytes, record_environment
from bayestrain.train.fit import fit
from bayestrain.train.folder import RunFolder, read_json
from bayestrain.train.search import check_target
from bayestrain.train.subject import predict

HARDEST = 24
"""How many of the most uncertain test inputs a run keeps."""

COLLAPSED = 0.5
"""Fewer different particles than this share of all deserve a warning."""


def train_run(
    config: RunConfig, folder: Path | str, *, resume: bool = False, overwrite: bool = False,
    device: torch.device | str = "cpu", callbacks: Sequence[Any] = (), command: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Train what the config names, fill the folder, and return its ``result.json``.

    Args:
        config: what to train, and how.
        folder: of the run; see `RunFolder`.
        resume: continue a run that was stopped; the result of one that is finished is returned as it is.
        overwrite: replace the run in the folder.
        device: where to train.
        callbacks: as for `fit`.
        command: what was typed, for the record.
    """
    path, place, how = Path(folder), torch.device(device), config.posterior
    if resume and (path / "config.toml").is_file():
        before = configs.flat(*vars(configs.load(path / "config.toml")).values())
        if changed := configs.differences(before, configs.flat(*vars(config).values())):
            raise ConfigError(
                f"The run in {path} has other settings ({'; '.join(changed)}). Resume it with the same, or start a new "
                "run in another folder."
            )
    data, likelihood = load_data(config.run.data), _likelihood(config.run.likelihood)
    start, note = _finished_run(config) if config.run.from_run else (None, None)
    if start is None:
        models = independent(lambda: tensorized(_built(config), config.tensorize), how.particles, config.run.seed)
    else:
        surrounding = how.start == "around"
        models = around(start, how.particles, how.jitter, config.run.seed) if surrounding else [start]
    settings = dataclasses.replace(config.fit, search=False) if how.start == "around" else config.fit
    if not resume:
        check_target(settings, models[0])  # before a run is overwritten
    with RunFolder(path, resume=resume, overwrite=overwrite) as opened:
        if resume and opened.finished:
            return read_json(path / "result.json")
        opened.write("config.toml", configs.dumps(config))
        environment = record_environment(opened, place, command, resume=resume)
        if (perf := fast()) is not None:
            perf.memory.retain_freed_memory()
        fitted = fit(
            models[0] if how.particles == 1 else models, data.train, data.validation, likelihood=likelihood,
            config=settings, prior=config.prior, method=how.method, kernel=how.kernel, temperature=how.temperature,
            chunk=how.chunk, callbacks=callbacks, folder=opened, resume=resume, device=place, seed=config.run.seed,
            progress=False,
        )  # fmt: skip
        trained = fitted.posterior or fitted.model
        result = {
            "name": config.run.name, "seed": config.run.seed,
            "dense_parameters": dense_parameters(fitted.model), "parameters": count_parameters(fitted.model),
            "start_ranks": {name: list(row) for name, row in fitted.start_ranks.items()},
            "ranks": {name: list(row) for name, row in ranks(fitted.model).items()},
            "layers": _layers(fitted.model, fitted.start_ranks),
            **evaluate(config, data, trained, fitted.likelihood, place, opened),
            "seconds": fitted.seconds, "peak_memory_bytes": peak_memory_bytes(place),
            **{key: environment[key] for key in ("device", "command", "commit", "dirty")},
            "from_run": note, "status": "finished",
        }  # fmt: skip
        if fitted.posterior is not None:
            result["posterior"]["diagnostics"] = diagnostics = fitted.history[-1]["diagnostics"]
            result["posterior"]["warnings"] = _warnings(how.particles, diagnostics, trained)
        about: dict[str, Any] = {"model": config.run.model, "data": config.run.data, "name": config.run.name}
        if fitted.posterior is None:
            about["likelihood_state"] = {name: v.tolist() for name, v in fitted.likelihood.state_dict().items()}
        save(fitted.posterior or fitted.model.cpu(), path, about)
        opened.finish(result)
        return result


def evaluate_run(folder: Path | str, *, device: torch.device | str = "cpu", command: str = "") -> dict[str, Any]:
    """Evaluate a finished run again: predictions, temperature and metrics. Nothing is trained."""
    path, place = Path(folder), torch.device(device)
    before, config = read_json(path / "result.json", "metrics", "parameters"), configs.load(path / "config.toml")
    with RunFolder(path, resume=True) as opened:
        model, likelihood = _saved(path, config, place)
        found = evaluate(config, load_data(config.run.data), model, likelihood, place, opened)
        if found["posterior"] is not None:
            found["posterior"] = {**(before["posterior"] or {}), **found["posterior"]}  # what only training knew, too
        result = {**before, **found, "evaluated_again": {"command": command, **describe_environment(place)}}
        opened.finish(result)
        return result


def load_run(folder: Path | str, *, device: torch.device | str = "cpu") -> ParticleModel:
    """The trained network of a run, as a posterior of one particle, or its posterior, ready to predict.

    It calls the function that the run's config names, so load only runs that you trust.
    """
    model, likelihood = _saved(Path(folder), configs.load(Path(folder) / "config.toml"), torch.device(device))
    if isinstance(model, ParticleModel):
        return model
    joint = Joint(model, likelihood)
    return ParticleModel(joint, *stack_joints([joint]))


def _saved(folder: Path, config: RunConfig, device: torch.device) -> tuple[nn.Module | ParticleModel, Likelihood]:
    likelihood = _likelihood(config.run.likelihood)
    model = load(folder, into=_built(config), likelihood=likelihood if ":" in config.run.likelihood else None)
    if isinstance(model, ParticleModel):
        return model.to(device), model.likelihood
    state = read_json(folder / "model.json").get("likelihood_state", {})
    likelihood.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.to(device), likelihood.to(device)


# --- names ------------------------------------------------------------------------------------------------------------


def resolve(name: str) -> Any:
    """What ``"package.module:name"`` or ``"file.py:name"`` stands for; modules may be in the current folder."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f'{name!r} must be "package.module:name" or "file.py:name".')
    file = Path(place) if place.endswith(".py") else None
    folder = str((Path() if file is None else file.parent).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = place if file is None else file.stem
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module of the user's lacks something else
        raise ConfigError(
            f"There is no module {place!r}, from {name!r}, in {folder} or among those installed. "
            'For a file, write "path/to/file.py:name".'
        ) from None
    if not hasattr(found, attribute):
        near = difflib.get_close_matches(attribute, dir(found), n=1)
        raise ConfigError(f"{place} has no {attribute!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    return getattr(found, attribute)


def load_data(name: str) -> SimpleNamespace:
    """The data that a name stands for: train, validation and test, and what else is known of them."""
    found = resolve(name)
    found = found() if callable(found) else found
    if isinstance(found, tuple | list) and 2 <= len(found) <= 3:
        found = SimpleNamespace(**dict(zip(("train", "validation", "test"), found, strict=False)))
    if getattr(found, "train", None) is None:
        raise ConfigError(
            f"{name} must return (train, validation), (train, validation, test), or an object with these attributes, "
            f"got a {type(found).__name__}."
        )
    names = ("train", "validation", "test", "outside", "classes", "mean", "std")
    return SimpleNamespace(**{name: getattr(found, name, None) for name in names})


def _likelihood(name: str) -> Likelihood:
    found = resolve(name) if ":" in name else name
    return as_likelihood(found() if isinstance(found, type) else found)


# --- networks ---------------------------------------------------------------------------------------------------------


def _built(config: RunConfig) -> nn.Module:
    model = resolve(config.run.model)()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{config.run.model} must return an nn.Module, got a {type(model).__name__}.")
    return model


def tensorized(model: nn.Module, settings: TensorizeSettings) -> nn.Module:
    """Factorise the layers that the settings do not keep dense."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    dense: set[str] = set()
    for pattern in settings.keep_dense:
        if not (matching := fnmatch.filter(names, pattern)):
            raise ConfigError(f"tensorize.keep_dense has {pattern!r}, which matches none of {sorted(names)}.")
        dense.update(matching)
    if not settings.enabled or (dense.issuperset(names) and factorized_weights(model)):
        return model  # perhaps the function that built it has done so
    modes = {name: chosen for name, chosen in settings.modes.items() if name not in dense}
    chosen = TensorizeConfig(settings.max_rank, settings.format, settings.layout, settings.init, settings.tol, modes)
    tensorize_(model, chosen, lambda _, name: name not in dense)
    return model


def _finished_run(config: RunConfig) -> tuple[nn.Module, dict[str, Any]]:
    """The network of the finished run that this one starts from, and a note of what that was."""
    run = Path(config.run.from_run)
    result = read_json(run / "result.json", "parameters", "seconds", "metrics", "commit")
    before = configs.load(run / "config.toml")
    if before.posterior.particles > 1:
        raise ConfigError(f"{run} holds a posterior; run.from_run needs a run of one network.")
    if before.run.model != config.run.model:
        raise ConfigError(f"The network of {run} is {before.run.model}, not {config.run.model}. Name the same model.")
    model, _ = _saved(run, before, torch.device("cpu"))
    assert isinstance(model, nn.Module)
    earlier = result.get("from_run") or {}
    note = {
        "run": str(run),
        "epochs": before.fit.epochs + before.fit.finetune_epochs + earlier.get("epochs", 0),
        **{key: result[key] for key in ("parameters", "metrics")},
        "seconds": result["seconds"] + earlier.get("seconds", 0.0),
        "commits": sorted({commit for commit in (result["commit"], *earlier.get("commits", ())) if commit}),
    }
    return model, note


def _layers(model: nn.Module, start_ranks: dict[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """The parameters of every layer, bias included: as a dense layer, at the start, and now."""
    weights, found = factorized_weights(model), {}
    for name, module in model.named_modules():
        now = sum(parameter.numel() for parameter in module.parameters())
        weight = weights.get(name)
        if weight is not None:
            start = sum(map(math.prod, weight.equation.shapes(weight.layout.sizes, start_ranks[name])))
            kind = {"format": weight.format.name, "layout": weight.layout.name, "shape": list(weight.shape)}
            bias = now - weight.numel
            found[name] = {**kind, "dense": bias + weight.dense_numel, "start": bias + start, "now": now}
        elif isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            kind = {"format": "", "layout": "", "shape": list(module.weight.shape)}
            found[name] = {**kind, "dense": now, "start": now, "now": now}
    return found


# --- what it is worth -------------------------------------------------------------------------------------------------


def evaluate(
    config: RunConfig, data: SimpleNamespace, model: nn.Module | ParticleModel, likelihood: Likelihood,
    device: torch.device, folder: RunFolder,
) -> dict[str, Any]:  # fmt: skip
    """The metrics on the test data, also at the temperature fitted to the validation data; writes the predictions.

    A posterior takes that temperature, if ``posterior.calibrate``. Without test data the validation data stand in.
    """
    size, how, about = max(config.fit.batch_size, 256), config.posterior, None
    given = {
        name: part for name in ("train", "validation", "test", "outside") if (part := getattr(data, name)) is not None
    }
    parts = {name: Batches(part, size, shuffle=False, device=device, name=name) for name, part in given.items()}
    example = next(iter(parts["train"]))[0]
    if isinstance(model, ParticleModel):
        about = {"method": how.method, "particles": len(model), "start": how.start, "ood": None}
    judged = "test" if "test" in parts else "validation"
    found: dict[str, Any] = {
        "task": "other", "metrics": {}, "calibrated": None, "validation": None, "posterior": about,
        "evaluated_on": judged,
        "input_shape": list(example.shape[1:]) if isinstance(example, Tensor) else None,
        "input_dtype": str(example.dtype).removeprefix("torch.") if isinstance(example, Tensor) else None,
        **{key: None if (own := getattr(data, key)) is None else list(own) for key in ("classes", "mean", "std")},
    }  # fmt: skip
    if judged not in parts or isinstance(likelihood, FunctionLikelihood):
        return found
    seen = {name: predict(model, likelihood, parts[name]) for name in parts if name != "train"}
    temperature = None
    if "validation" in seen and isinstance(likelihood, Classification):
        watched, targets = seen["validation"]
        temperature = fit_temperature(watched.particle_probabilities, targets)
        if about is not None and how.calibrate:
            likelihood.temperature = temperature
            seen = {name: (at(prediction, temperature), targets) for name, (prediction, targets) in seen.items()}
    found["validation"] = _metrics(*seen["validation"]) if "validation" in seen else None
    prediction, targets = seen[judged]
    found["metrics"] = _metrics(prediction, targets)
    if temperature is not None:
        found["calibrated"] = {"temperature": temperature, **_metrics(at(prediction, temperature), targets)}
    if about is not None:
        about["mean_log_likelihood"] = prediction.mean_log_likelihood(targets)
        if isinstance(prediction, ClassPrediction):
            about |= {"temperature": prediction.temperature, "uncalibrated": _metrics(at(prediction, 1.0), targets)}
        if "outside" in seen:
            pairs = [(getattr(prediction, key), getattr(seen["outside"][0], key)) for key in ("total", "epistemic")]
            scores = dict(zip(("auroc", "auroc_epistemic"), (auroc(*pair) for pair in pairs), strict=True))
            about["ood"] = {"name": getattr(data.outside, "name", "outside"), **scores}
    if isinstance(prediction, ClassPrediction | RegressionPrediction):
        found["task"] = "classification" if isinstance(prediction, ClassPrediction) else "regression"
        _write_predictions(folder, prediction, targets, parts[judged])
    return found


def at(prediction: Any, temperature: float) -> Any:
    """The same prediction at another temperature."""
    return dataclasses.replace(prediction, temperature=temperature)


def _warnings(started: int, diagnostics: dict[str, float], posterior: Any) -> list[str]:
    left, different, found = len(posterior), diagnostics["effective_particles"], []
    if left < started:
        found.append(f"{started - left} of {started} particles were not finite and dropped. Try a smaller fit.lr.")
    if different < COLLAPSED * left:
        found.append(
            f"The particles have collapsed: only about {different:.1f} of {left} differ. Start them independently "
            '(posterior.start = "independent"), or with a larger posterior.jitter.'
        )
    return found


def _metrics(prediction: Any, targets: Tensor) -> dict[str, float]:
    return {key: value for key, value in prediction.metrics(targets).items() if key != "mean_log_likelihood"}


def _write_predictions(folder: RunFolder, prediction: Any, targets: Tensor, data: Batches) -> None:
    kept = {name: getattr(prediction, name) for name in ("total", "aleatoric", "epistemic")}
    if isinstance(prediction, RegressionPrediction):
        kept |= {"mean": prediction.mean, "std": prediction.std, "targets": targets}
    else:
        hardest = prediction.total.argsort(descending=True)[:HARDEST].cpu()
        kept |= {"probabilities": prediction.mean, "labels": targets, "hardest": hardest}
        kept["hardest_particle_probabilities"] = prediction.particle_probabilities[:, hardest]
        inputs: dict[int, Tensor] = {}
        seen = 0
        for x, y in data:
            if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3):
                inputs |= {i: x[i - seen] for i in hardest.tolist() if seen <= i < seen + len(y)}
            seen += len(y)
        if inputs:
            kept["hardest_inputs"] = torch.stack([inputs[i] for i in hardest.tolist()])
    stored = {name: t.float() if t.is_floating_point() else t for name, t in kept.items()}
    folder.write("predictions.safetensors", serialised({name: t.cpu().contiguous() for name, t in stored.items()}))
