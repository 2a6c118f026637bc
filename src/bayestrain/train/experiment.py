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
from bayestrain.saved import save_model
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.train import toml
from bayestrain.train.checkpoint import LAST
from bayestrain.train.config import DataConfig, RunConfig, TensorizeSettings, differences
from bayestrain.train.environment import describe_environment, peak_memory_bytes
from bayestrain.train.loop import FitResult, fit
from bayestrain.train.metrics import classification_metrics, evaluator, probabilities
from bayestrain.train.progress import Progress
from bayestrain.train.tensorboard import summary_writer

HARDEST = 24
"""How many of the most uncertain test images a run keeps."""


@dataclass(frozen=True)
class Result:
    """Where a run is and what its ``result.json`` says."""

    folder: Path
    summary: dict[str, Any]


def run_experiment(
    config: RunConfig, out: Path, *, device: str, resume: bool, progress: Progress, command: str
) -> Result:
    """Train as `config` says and fill the folder `out`."""
    place = torch.device(device)
    prepare_folder(config, out, resume)
    splits = data.load(config.data.name, config.data.folder or None)
    train, validation = splits.train, None
    if config.data.validation_fraction:
        train, validation = splits.train.split(config.data.validation_fraction, seed=config.experiment.seed)

    if not config.data.normalize:
        splits = dataclasses.replace(splits, mean=(0.0,) * len(splits.mean), std=(1.0,) * len(splits.std))

    torch.manual_seed(config.experiment.seed)
    model = models.BUILDERS[config.experiment.model](num_classes=len(splits.classes))
    dense_params = count_parameters(model)
    dense_layers = {name: _own_parameters(module) for name, module in model.named_modules() if _is_layer(module)}
    tensorize(model, config.tensorize)
    max_ranks = ranks(model)
    start_layers = {name: layer.parameters_left for name, layer in tt_layers(model).items()}

    environment = _environment(out, place, command, resume)
    write_json(out / "environment.json", environment)
    total = config.fit.epochs + config.fit.finetune_epochs
    progress.start(total, -(-len(train) // config.fit.batch_size), config, dense_params)
    evaluate = None if validation is None else evaluator(validation.to(place), splits.normalize, place)
    outcome = fit(
        model, train, evaluate, config.fit, prior=config.prior, augment=augmentation(config.data, splits), device=place,
        seed=config.experiment.seed, folder=out, resume=resume, progress=progress,
    )  # fmt: skip

    probs = probabilities(model, splits.test.to(place), splits.normalize, place)
    metrics = classification_metrics(probs, splits.test.labels)
    now = {name: layer.parameters_left for name, layer in tt_layers(model).items()}
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
            name: {"dense": dense, "start": start_layers.get(name, dense), "now": now.get(name, dense)}
            for name, dense in dense_layers.items()
        },
        **metrics,
        "validation": None if evaluate is None else evaluate(model),
        "seconds": outcome.seconds,
        "peak_memory_bytes": peak_memory_bytes(place),
        "device": environment["gpu"] or "cpu",
        "command": environment["command"],
        "versions": {key: environment[key] for key in ("bayestrain", "python", "torch")},
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "status": "finished",
    }
    _write_outcome(out, config, splits, model, outcome, probs, summary)
    progress.finish(summary)
    return Result(out, summary)


def rehearse(config: RunConfig) -> None:
    """Go through all that can fail before the first step, and leave no trace."""
    splits = data.load(config.data.name, config.data.folder or None)
    if config.data.validation_fraction:
        splits.train.split(config.data.validation_fraction, seed=config.experiment.seed)
    tensorize(models.BUILDERS[config.experiment.model](num_classes=len(splits.classes)), config.tensorize)
    if config.fit.tensorboard:
        summary_writer()


def prepare_folder(config: RunConfig, out: Path, resume: bool) -> None:
    """Make the run folder, or check that the one there can be resumed with this very config."""
    file = out / "config.toml"
    if resume:
        if not (out / LAST).exists():
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


def _write_outcome(
    out: Path, config: RunConfig, splits: data.Splits, model: nn.Module, outcome: FitResult, probs: Tensor,
    summary: dict[str, Any],
) -> None:  # fmt: skip
    from safetensors.torch import save

    about = {
        "model": config.experiment.model,
        "experiment": config.experiment.name,
        "data": splits.name,
        "classes": list(splits.classes),
        "input_shape": list(splits.test.images.shape[1:]),
        "mean": list(splits.mean),
        "std": list(splits.std),
        "dense_params": summary["dense_params"],
    }
    save_model(model.cpu(), out, about)
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(1)
    hardest = entropy.argsort(descending=True)[:HARDEST]
    tensors = {
        "probabilities": probs.float(),
        "labels": splits.test.labels,
        "hardest": hardest,
        "hardest_images": splits.test.images[hardest],
    }
    write_atomically(out / "evaluation.safetensors", save({name: t.contiguous() for name, t in tensors.items()}))
    write_json(out / "spectra.json", outcome.spectra)
    write_json(out / "result.json", summary)


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
