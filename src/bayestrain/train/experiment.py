"""A named experiment, from its config to a run folder with everything that came out of it."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain import data, models
from bayestrain.convert import TensorizeConfig, tensorize_
from bayestrain.errors import ConfigError, TrainingError
from bayestrain.files import write_atomically, write_json
from bayestrain.layers import TTLayer
from bayestrain.posterior import around, independent
from bayestrain.predict import fit_temperature
from bayestrain.saved import load_model
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.train import toml
from bayestrain.train.checkpoint import LAST
from bayestrain.train.config import DataConfig, FitConfig, RunConfig, TensorizeSettings, differences
from bayestrain.train.environment import describe_environment, peak_memory_bytes
from bayestrain.train.loop import fit, fit_posterior
from bayestrain.train.metrics import at_temperature, evaluator, measured, outputs, predict, temperature
from bayestrain.train.outcome import Outcome, posterior_summary, write_outcome
from bayestrain.train.outside import outside_images
from bayestrain.train.progress import Progress, Unfinished
from bayestrain.train.tensorboard import summary_writer

MAP = "map"
"""Sub-folder of a posterior's run: the MAP point to start around or to compare with, a whole run of its own."""


@dataclass(frozen=True)
class Result:
    """Where a run is and what its ``result.json`` says."""

    folder: Path
    summary: dict[str, Any]


def run_experiment(
    config: RunConfig, out: Path, *, device: str, resume: bool, progress: Progress, command: str
) -> Result:
    """Train as `config` says and fill the folder `out`."""
    prepare_folder(config, out, resume)
    if config.posterior.particles and (config.posterior.compare_map or config.posterior.start == "jitter"):
        _run_map(config, out / MAP, device, progress, command)
    begun = (out / LAST).exists()  # a run that was stopped while its MAP point trained has nothing of its own yet
    return _run(config, out, device, resume and begun, progress, command, outside=config.posterior.particles > 0)


def _run_map(config: RunConfig, out: Path, device: str, progress: Progress, command: str) -> None:
    """The MAP point of the same settings, unless it is there."""
    if (out / "result.json").exists():
        return
    progress.message("first the MAP point of the same settings, to compare with")
    point = config.replace("posterior", particles=0)
    resume = (out / LAST).exists()
    prepare_folder(point, out, resume)
    _run(point, out, device, resume, Unfinished(progress), command, outside=True)
    progress.message(f"now the posterior of {config.posterior.particles} particles")


def _run(
    config: RunConfig, out: Path, device: str, resume: bool, progress: Progress, command: str, *, outside: bool
) -> Result:
    place = torch.device(device)
    splits = data.load(config.data.name, config.data.folder or None)
    if not config.data.normalize:
        splits = dataclasses.replace(splits, mean=(0.0,) * len(splits.mean), std=(1.0,) * len(splits.std))
    train, validation = splits.train, None
    if config.data.validation_fraction:
        train, validation = splits.train.split(config.data.validation_fraction, seed=config.experiment.seed)
    strange = outside_images(config.posterior.outside, splits, config.experiment.seed) if outside else None

    def build() -> nn.Module:
        model = models.BUILDERS[config.experiment.model](num_classes=len(splits.classes))
        tensorize(model, config.tensorize)
        return model

    torch.manual_seed(config.experiment.seed)
    dense = models.BUILDERS[config.experiment.model](num_classes=len(splits.classes))
    dense_layers = {name: _own_parameters(module) for name, module in dense.named_modules() if _is_layer(module)}
    model = dense
    dense_params = count_parameters(dense)
    tensorize(model, config.tensorize)
    max_ranks = ranks(model)
    start_layers = {name: layer.parameters_left for name, layer in tt_layers(model).items()}

    environment = _environment(out, place, command, resume)
    write_json(out / "environment.json", environment)
    settings = fit_settings(config)
    jittered = config.posterior.particles > 0 and config.posterior.start == "jitter"
    total = settings.finetune_epochs + (0 if jittered else settings.epochs)
    progress.start(total, -(-len(train) // settings.batch_size), config, dense_params)
    evaluate = None if validation is None else evaluator(validation.to(place), splits.normalize, place)
    options: dict[str, Any] = {
        "prior": config.prior, "augment": augmentation(config.data, splits), "device": place,
        "seed": config.experiment.seed, "folder": out, "resume": resume, "progress": progress,
    }  # fmt: skip
    network: Any = model
    if config.posterior.particles:
        starts = (
            around(load_model(out / MAP), config.posterior.particles, config.posterior.jitter, config.experiment.seed)
            if jittered
            else independent(build, config.posterior.particles, config.experiment.seed)
        )
        network, fitted = fit_posterior(
            starts, train, evaluate, settings, config.posterior, fixed_ranks=jittered, **options
        )
        model = network.template
    else:
        fitted = fit(model, train, evaluate, settings, **options)

    suited = 1.0
    if validation is not None:
        suited = fit_temperature(outputs(network, validation, splits.normalize, place), validation.labels)
    if config.posterior.particles and config.posterior.calibrate:
        network.joint.likelihood.temperature = suited
    logits = outputs(network, splits.test.to(place), splits.normalize, place)
    prediction = at_temperature(logits, temperature(network))
    beyond = None if strange is None else predict(network, strange.to(place), splits.normalize, place)
    outcome = Outcome(splits, network, fitted, logits, prediction, suited, strange, beyond)
    now = {name: layer.parameters_left for name, layer in tt_layers(model).items()}
    metrics = measured(prediction, splits.test.labels)
    summary = {
        "experiment": config.experiment.name,
        "preset": config.experiment.preset,
        "kind": config.experiment.kind,
        "seed": config.experiment.seed,
        "dense_params": dense_params,
        "params": count_parameters(model),
        "ratio": dense_params / count_parameters(model),
        "ranks": {name: list(chain) for name, chain in ranks(model).items()},
        "max_ranks": {name: list(chain) for name, chain in max_ranks.items()},
        "layer_params": {
            name: {"dense": dense_size, "start": start_layers.get(name, dense_size), "now": now.get(name, dense_size)}
            for name, dense_size in dense_layers.items()
        },
        **{key: metrics[key] for key in ("accuracy", "log_likelihood", "ece", "brier")},
        "posterior": posterior_summary(config, outcome, train, out / MAP, augmentation(config.data, splits)),
        "validation": None if evaluate is None else evaluate(network),
        "seconds": fitted.seconds,
        "peak_memory_bytes": peak_memory_bytes(place),
        "device": environment["gpu"] or "cpu",
        "command": environment["command"],
        "versions": {key: environment[key] for key in ("bayestrain", "python", "torch")},
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "status": "finished",
    }
    write_outcome(out, config, outcome, summary)
    progress.finish(summary)
    return Result(out, summary)


def fit_settings(config: RunConfig) -> FitConfig:
    """The settings of the loop; a posterior around a MAP point has no search, only epochs with given ranks."""
    if config.posterior.particles and config.posterior.start == "jitter":
        return dataclasses.replace(config.fit, finetune_epochs=config.posterior.jitter_epochs)
    return config.fit


def rehearse(config: RunConfig) -> None:
    """Go through all that can fail before the first step, and leave no trace."""
    splits = data.load(config.data.name, config.data.folder or None)
    if config.data.validation_fraction:
        splits.train.split(config.data.validation_fraction, seed=config.experiment.seed)
    if config.posterior.particles:
        outside_images(config.posterior.outside, splits, config.experiment.seed)
    tensorize(models.BUILDERS[config.experiment.model](num_classes=len(splits.classes)), config.tensorize)
    if config.fit.tensorboard:
        summary_writer()


def prepare_folder(config: RunConfig, out: Path, resume: bool) -> None:
    """Make the run folder, or check that the one there can be resumed with this very config."""
    file = out / "config.toml"
    if resume:
        if not (out / LAST).exists() and not (out / MAP / LAST).exists():
            raise TrainingError(f"There is nothing to resume in {out}: it has no {LAST}. Start without --resume.")
        changed = differences(toml.load(file), config)
        if changed:
            raise ConfigError(
                f"The run in {out} was started with another config ({'; '.join(changed)}). "
                "Resume with the same one, or start anew in another folder."
            )
        return
    if (out / LAST).exists() or (out / "result.json").exists():
        raise ConfigError(f"{out} already holds a run. Go on with --resume, or choose another folder with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, toml.dumps(config))
    except OSError as error:
        raise ConfigError(f"Cannot write to {out}: {error.strerror}. Choose another folder with --out.") from error


def tensorize(model: nn.Module, settings: TensorizeSettings) -> None:
    """Convert the layers that the settings do not keep dense."""
    names = {name for name, module in model.named_modules() if _is_layer(module)}
    for pattern in settings.keep_dense:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"tensorize.keep_dense has {pattern!r}, which matches none of {sorted(names)}.")

    def wanted(_: nn.Module, name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.keep_dense)

    tensorize_(model, TensorizeConfig(settings.max_rank, settings.init, modes=settings.modes), wanted)


def augmentation(config: DataConfig, splits: data.Splits) -> Any:
    """What happens to a training batch on the device: crop, flip, shift, then normalisation."""

    def augment(images: Tensor, generator: torch.Generator) -> Tensor:
        if config.pad_crop:
            images = data.pad_crop(images, config.pad_crop, generator)
        if config.shift:
            images = data.shift(images, config.shift, generator)
        if config.flip:
            images = data.flip(images, generator)
        return splits.normalize(images)

    return augment


def _environment(out: Path, place: torch.device, command: str, resume: bool) -> dict[str, Any]:
    """What the run runs on now; a resumed run keeps the moment and the command of its beginning."""
    now = {**describe_environment(place), "command": command}
    file = out / "environment.json"
    if resume and file.exists():
        before = json.loads(file.read_text())
        now = {**now, "started": before["started"], "command": before["command"], "resumed": now["started"]}
    return now


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d | TTLayer)


def _own_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
