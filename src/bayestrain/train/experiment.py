"""A named experiment, from its config to a run folder with everything that came out of it."""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bayestrain import models
from bayestrain.convert import TensorizeConfig, tensorize_
from bayestrain.errors import ConfigError, TrainingError
from bayestrain.files import write_atomically
from bayestrain.infer import imq
from bayestrain.layers import TTLayer
from bayestrain.posterior import Posterior, around, independent, retain_freed_memory
from bayestrain.saved import load_model
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.train import toml
from bayestrain.train.config import FitConfig, RunConfig, TensorizeSettings, differences
from bayestrain.train.environment import note_environment, peak_memory_bytes
from bayestrain.train.evaluation import evaluate_network, posterior_scores, scores
from bayestrain.train.fitting import fit, fit_posterior
from bayestrain.train.from_run import begin, check_from_run, noted
from bayestrain.train.loop import FitResult
from bayestrain.train.map_point import check_point, take_over
from bayestrain.train.material import Material, augmentation, load_material
from bayestrain.train.metrics import evaluator
from bayestrain.train.outcome import Result, training_facts, write_evaluation, write_result
from bayestrain.train.particles import check_room
from bayestrain.train.places import LAST, MAP, START, TAKING, has_work
from bayestrain.train.point import Point
from bayestrain.train.progress import Progress, Unfinished
from bayestrain.train.records import read_result
from bayestrain.train.tensorboard import summary_writer

JITTER_RATE = 0.1
"""Rate around a MAP point, in units of the highest one, where the fine-tuning has none of its own."""


def run_experiment(
    config: RunConfig,
    out: Path,
    *,
    device: str,
    resume: bool,
    progress: Progress,
    command: str,
    point: Path | None = None,
) -> Result:
    """Train as `config` says and fill the folder `out`; `point` is a finished run, a posterior's MAP point."""
    if point is not None:
        check_point(config, point, out)
    if config.experiment.from_run and not resume:
        check_from_run(config)
    prepare_folder(config, out, resume)
    environment = note_environment(out, torch.device(device), command)
    retain_freed_memory()
    if point is not None and not (out / MAP / "result.json").exists():
        progress.message(f"the MAP point is that of {point}")
        take_over(config, point, out, device, command)
    if config.posterior.particles and (config.posterior.compare_map or config.posterior.start == "jitter"):
        _run_map(config, out / MAP, device, progress, command)
    begun = (out / LAST).exists()  # a run that was stopped while its MAP point trained has nothing of its own yet
    return _run(config, out, device, resume and begun, progress, environment, outside=config.posterior.particles > 0)


def _run_map(config: RunConfig, out: Path, device: str, progress: Progress, command: str) -> None:
    """The MAP point of the same settings, unless it is there."""
    point = config.replace("posterior", particles=0)
    if (out / "result.json").exists():
        if changed := differences(toml.load(out / "config.toml"), point):
            raise ConfigError(f"The MAP point in {out} has another config ({'; '.join(changed)}). Remove it.")
        read_result(out)  # what is damaged is found before hours of training
        return
    progress.message("first the MAP point of the same settings, to compare with")
    resume = (out / LAST).exists()
    prepare_folder(point, out, resume)
    environment = note_environment(out, torch.device(device), command)
    _run(point, out, device, resume, Unfinished(progress), environment, outside=True)
    progress.message(f"now the posterior of {config.posterior.particles} particles")


def _run(
    config: RunConfig, out: Path, device: str, resume: bool, progress: Progress, environment: dict[str, Any], *,
    outside: bool,
) -> Result:  # fmt: skip
    place = torch.device(device)
    material = load_material(config, with_outside=outside)
    splits = material.splits

    torch.manual_seed(config.experiment.seed)
    model = models.BUILDERS[config.experiment.model](num_classes=len(splits.classes))
    dense_params = count_parameters(model)
    dense_layers = {name: _own_parameters(module) for name, module in model.named_modules() if _is_layer(module)}
    _as_kind(model, config)
    max_ranks = ranks(model)
    start_layers = {name: layer.parameters_left for name, layer in tt_layers(model).items()}
    if config.experiment.from_run and not resume:  # a checkpoint has the weights, and layers take the ranks they find
        progress.message(f"the network is that of {config.experiment.from_run}")
        model = begin(config, out)
    earlier = noted(out) if config.experiment.from_run else None

    network, fitted = _train(config, material, model, out, place, resume, progress, dense_params)

    evaluation = evaluate_network(config, material, network, place)
    posterior = posterior_scores(config, evaluation, out / MAP)
    if isinstance(network, Posterior):
        assert posterior is not None
        disagreement = float(evaluation.prediction.disagreement.mean())
        posterior |= training_facts(config, network, fitted, material, disagreement)
    small = network.template if isinstance(network, Posterior) else network
    now = {name: layer.parameters_left for name, layer in tt_layers(small).items()}
    summary = {
        "experiment": config.experiment.name,
        "preset": config.experiment.preset,
        "kind": config.experiment.kind,
        "seed": config.experiment.seed,
        "dense_params": dense_params,
        "params": count_parameters(small),
        "ratio": dense_params / count_parameters(small),
        "ranks": {name: list(chain) for name, chain in ranks(small).items()},
        "max_ranks": {name: list(chain) for name, chain in max_ranks.items()},
        "layer_params": {
            name: {"dense": dense, "start": start_layers.get(name, dense), "now": now.get(name, dense)}
            for name, dense in dense_layers.items()
        },
        **scores(evaluation),
        "posterior": posterior,
        "from_run": earlier,
        "seconds": fitted.seconds,
        "peak_memory_bytes": peak_memory_bytes(place),
        "device": environment["gpu"] or "cpu",
        "command": environment["command"],
        "versions": {key: environment[key] for key in ("bayestrain", "python", "torch")},
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "status": "finished",
    }
    write_evaluation(out, config, evaluation, dense_params)
    write_result(out, fitted.spectra, summary)
    progress.finish(summary)
    return Result(out, summary)


def _train(
    config: RunConfig, material: Material, model: nn.Module, out: Path, place: torch.device, resume: bool,
    progress: Progress, dense_params: int,
) -> tuple[nn.Module | Posterior, FitResult]:  # fmt: skip
    """Train the model itself, or a posterior of networks like it."""
    settings, jittered = fit_settings(config), _jittered(config)
    seed, splits = config.experiment.seed, material.splits
    progress.start(
        settings.epochs + settings.finetune_epochs, -(-len(material.train) // settings.batch_size), config, dense_params
    )
    evaluate = None
    if material.validation is not None:
        evaluate = evaluator(material.validation.to(place), splits.normalize, place)
    options: dict[str, Any] = {
        "prior": config.prior, "augment": augmentation(config.data, splits), "device": place, "seed": seed,
        "folder": out, "resume": resume, "progress": progress,
        "search": config.experiment.kind == "low-rank" and not jittered,
    }  # fmt: skip
    if not config.posterior.particles:
        return model, fit(model, material.train, evaluate, settings, **options)

    number, first = config.posterior.particles, load_model(out / MAP) if jittered else model
    check_room(first, settings, config.posterior, place)
    starts = (
        around(first, number, config.posterior.jitter, seed)
        if jittered
        else independent(lambda: _build(config, len(splits.classes)), number, seed)
    )
    how = config.posterior
    return fit_posterior(
        starts, material.train, evaluate, settings, method=how.method, kernel=imq if how.kernel == "imq" else None,
        temperature=how.temperature if how.method == "sgld" else None, chunk=how.chunk or None, **options,
    )  # fmt: skip


def _jittered(config: RunConfig) -> bool:
    return config.posterior.particles > 0 and config.posterior.start == "jitter"


def fit_settings(config: RunConfig) -> FitConfig:
    """The settings of the loop: where no ranks are sought it has one phase, for all networks of the same length."""
    fit = config.fit
    if _jittered(config):
        return dataclasses.replace(
            fit, epochs=config.posterior.jitter_epochs, lr=fit.finetune_lr or JITTER_RATE * fit.lr, schedule="cosine",
            lr_warmup_epochs=0.0, finetune_epochs=0, target_ratio=0.0,
        )  # fmt: skip
    if config.experiment.kind != "low-rank":
        return dataclasses.replace(fit, epochs=fit.epochs + fit.finetune_epochs, finetune_epochs=0)
    return fit


def rehearse(config: RunConfig, device: str, point: Path | None = None) -> None:
    """Go through all that can fail before the first step, and leave no trace."""
    if point is not None:
        check_point(config, point)
    if config.experiment.from_run:
        check_from_run(config)
    material = load_material(config, with_outside=config.posterior.particles > 0)
    classes = len(material.splits.classes)
    if config.posterior.particles:
        check_room(_smallest(config, classes, point), fit_settings(config), config.posterior, torch.device(device),
                   least=point is None and _jittered(config))  # fmt: skip
    model = load_model(config.experiment.from_run) if config.experiment.from_run else _build(config, classes)
    settings, search = fit_settings(config.replace("posterior", particles=0)), config.experiment.kind == "low-rank"
    subject = Point(model, settings, config.prior, F.cross_entropy, len(material.train), torch.device("cpu"), search)
    if settings.target_ratio:
        subject.check_target(settings)
    if config.fit.tensorboard:
        summary_writer()


def _smallest(config: RunConfig, classes: int, point: Path | None) -> nn.Module:
    """A network like the particles; around a MAP point that is not there yet, the smallest that it can become."""
    if _jittered(config) and point is not None:
        return load_model(point)
    unknown = _jittered(config) and config.experiment.kind == "low-rank"
    return _build(config.replace("tensorize", max_rank=1) if unknown else config, classes)


def prepare_folder(config: RunConfig, out: Path, resume: bool) -> None:
    """Make the run folder, or check that the one there can be resumed with this very config."""
    file = out / "config.toml"
    shutil.rmtree(out / TAKING, ignore_errors=True)
    if resume:
        if not has_work(out):
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
    except OSError as error:
        raise ConfigError(f"Cannot write to {out}: {error.strerror}. Choose another folder with --out.") from error
    for name in ("environment.json", START):
        (out / name).unlink(missing_ok=True)
    write_atomically(file, toml.dumps(config))


def _build(config: RunConfig, classes: int) -> nn.Module:
    model = models.BUILDERS[config.experiment.model](num_classes=classes)
    _as_kind(model, config)
    return model


def _as_kind(model: nn.Module, config: RunConfig) -> None:
    if config.experiment.kind != "dense":
        tensorize(model, config.tensorize)


def tensorize(model: nn.Module, settings: TensorizeSettings) -> None:
    """Convert the layers that the settings do not keep dense; the modes of those, perhaps of a base, do not matter."""
    names = {name for name, module in model.named_modules() if _is_layer(module)}
    for pattern in settings.keep_dense:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"tensorize.keep_dense has {pattern!r}, which matches none of {sorted(names)}.")
    dense = {name for name in names for pattern in settings.keep_dense if fnmatch.fnmatchcase(name, pattern)}
    modes = {name: chosen for name, chosen in settings.modes.items() if name not in dense}
    tensorize_(model, TensorizeConfig(settings.max_rank, settings.init, modes=modes), lambda _, name: name not in dense)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d | TTLayer)


def _own_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
