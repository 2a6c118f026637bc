"""`fit`: the README's own loop for one network or a posterior, in one call."""

import copy
import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.infer.method import MakeOptimizer
from bayestrain.nn import TensorConv2d, count_parameters, dense_parameters, factorized_weights
from bayestrain.posterior import Likelihood, Posterior, as_likelihood, independent
from bayestrain.posterior.likelihoods import LogProb
from bayestrain.train.batches import Batches
from bayestrain.train.callbacks import ProgressPrinter
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig, differences, flat, unknown_setting
from bayestrain.train.distributed import World, own_device, reporting, shared
from bayestrain.train.folder import RunFolder
from bayestrain.train.loop import Loop, random_state, set_random_state
from bayestrain.train.search import check_target
from bayestrain.train.subject import Network, Particles, Setup


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        model: the network, trained in place; of a posterior, the network that its particles are of.
        history: a record per epoch, from epoch 0, the network before training.
        validation: the metrics of the final network on the validation data.
    """

    model: nn.Module
    posterior: Posterior | None
    likelihood: Likelihood
    history: list[dict[str, Any]]
    validation: dict[str, float] | None
    seconds: float


def fit(
    model: nn.Module | Callable[[], nn.Module] | Sequence[nn.Module],
    data: Any,
    validation: Any = None,
    *,
    likelihood: Likelihood | LogProb | str = "classification",
    config: FitConfig | None = None,
    prior: PriorConfig | bool | None = None,
    particles: int = 1,
    method: str = "svgd",
    optimizer: str | MakeOptimizer | None = None,
    num_data: int | None = None,
    teacher: nn.Module | None = None,
    callbacks: Sequence[Any] = (),
    folder: RunFolder | Path | str | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> FitResult:
    """Train a network, or a posterior of networks, until it is small and good.

    Training has two phases: a search with the prior, during which ranks are cut every `compact_every` epochs and, when
    it ends, once more; and fine-tuning at fixed ranks. A model without factorised weights trains with a Normal prior.

    Args:
        model: the network, trained in place. For several particles a function that builds one, or a list of them.
        data: a DataLoader, a Dataset, tensors (x, y), `bayestrain.data` images, a list of (x, y) batches, or a function
            that returns an iterator of batches.
        validation: the same kinds of data. Its metrics are in the history; `target_accuracy` relies on them.
        likelihood: "classification", "regression", a `Likelihood`, or a function (outputs, targets) -> log probability
            of each datum.
        config: settings of the loop, of which `settings` may change single ones.
        prior: the settings of the prior; False trains without one.
        particles: 2 or more train a posterior by `method`: "svgd", "anchored", "ensemble" or "sgld".
        optimizer: a name of `FitConfig.optimizer`, or a function of a list of (name, parameter) pairs that returns an
            optimiser; its learning rates follow the schedule in proportion.
        num_data: number of training examples, if `data` do not know it; otherwise one pass counts them.
        teacher: a network, such as the one that `compress_` made smaller, whose predictions count as much as the
            targets (distillation). For one network; it is copied.
        callbacks: objects with methods of `Callback`.
        folder: where checkpoints and ``history.jsonl`` go.
        resume: continue from the last checkpoint in `folder`, with the same settings; on a CPU in the same bits.
        device: where to train; by default where the model is.
        seed: of all random numbers while training; the generators return to their states from before.
        progress: print a line per epoch.
        settings: any field of `FitConfig`, and `kernel`, `temperature`, `chunk` and `replicas` of `PosteriorConfig`.

    >>> import torch, bayestrain as bt
    >>> model = torch.nn.Sequential(bt.TensorLinear(16, 8, max_rank=4), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(64, 16), torch.randint(3, (64,))
    >>> result = bt.fit(model, (x, y), epochs=2, finetune_epochs=1, lr=1e-2, progress=False)
    >>> [record["phase"] for record in result.history]
    ['search', 'search', 'search', 'finetune']
    """
    if isinstance(optimizer, str):
        settings["optimizer"], optimizer = optimizer, None
    own = {name: settings.pop(name) for name in ("kernel", "temperature", "chunk", "replicas") if name in settings}
    if unknown := set(settings) - {each.name for each in fields(FitConfig)}:
        raise unknown_setting(f"fit.{min(unknown)}")
    config = replace(config or FitConfig(), **settings)
    how = PosteriorConfig(particles=particles, method=method, **own)
    models = _models(model, how.particles, seed)
    how = replace(how, particles=len(models))
    if not (config.search and factorized_weights(models[0])):
        config = replace(config, search=False, finetune_epochs=0)
    _check(config, how, prior, validation, teacher)
    if resume and folder is None:
        raise ConfigError("resume=True needs folder=, the folder of the run to resume.")
    first = next(models[0].parameters(), torch.empty(0))
    place = own_device(torch.device(first.device if device is None else device))
    with ExitStack() as stack:
        stack.enter_context(reporting())
        world = World(place, how.particles, how.replicas)
        chosen = None if prior is False else prior if isinstance(prior, PriorConfig) else PriorConfig()
        known = {**flat(config, how, *([chosen] if chosen else [])), "seed": int(seed)}
        world.agree(known)
        batches, held_out = Batches(data, config.batch_size, shuffle=True, device=place, world=world), None
        if validation is not None:
            held_out = Batches(validation, max(config.batch_size, 256), shuffle=False, device=place, name="validation")
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(set_random_state, random_state(place), place)
        stack.enter_context(warnings.catch_warnings(action="ignore", category=ParticleWarning))  # messages name them
        small = dense_parameters(models[0]) <= 1_000_000  # gains little from a second thread; stalls on busy machines
        convolves = any(isinstance(module, nn.Conv2d | TensorConv2d) for module in models[0].modules())
        torch.set_num_threads(config.threads or (1 if small and not convolves else torch.get_num_threads()))
        number = batches.count(num_data)
        known |= {"num_data": number, "batches": batches.steps}
        if optimizer is not None:
            known["fit.optimizer"] = getattr(optimizer, "__qualname__", type(optimizer).__name__)
        if teacher is not None:
            known["teacher"] = f"{type(teacher).__name__} of {count_parameters(teacher):,} parameters"
        if world.rank:
            callbacks, progress, folder = (), False, None
        elif folder is not None and not isinstance(folder, RunFolder):
            folder = stack.enter_context(RunFolder(folder, resume=resume))
        saved, note = shared(folder.load_checkpoint() if folder is not None and folder.resumed else (None, ""))
        if saved is None:
            check_target(config, models[0])
        elif changed := "; ".join(differences(saved["settings"], known)):
            raise ConfigError(f"It cannot be resumed with other settings: {changed}. Use the same, or another folder.")
        models = [model.to(place) for model in models[world.own]]
        likelihood = as_likelihood(likelihood).to(place, first.dtype)
        if config.sharded and world.size > 1:
            world.shard_(models[0], likelihood)
        steps = math.ceil(batches.steps / config.accumulate)
        if teacher is not None:
            teacher = copy.deepcopy(teacher).to(place).eval().requires_grad_(False)
        setup = Setup(config, chosen, how, number, steps, world, optimizer, teacher, seed)
        subject = Particles(models, likelihood, setup) if how.particles > 1 else Network(models[0], likelihood, setup)
        listeners = [*callbacks, *([ProgressPrinter()] if progress else [])]
        loop = Loop(subject, setup, batches, held_out, folder, listeners, known)
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        if saved is not None:
            loop.restore(saved)
        final, trained = loop.run(note), (subject.template, subject.posterior, subject.likelihood)
        result = FitResult(*trained, loop.history, final, loop.seconds)
        loop.notify("end", result)
        return result


def _models(model: Any, number: int, seed: int) -> list[nn.Module]:
    models = list(model) if isinstance(model, Sequence) and not isinstance(model, nn.Module) else [model]
    if callable(model) and not isinstance(model, nn.Module):
        models = independent(model, number, seed)
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise ConfigError(f"model must be a network, a function that builds one, or a list of them, got {model!r}.")
    if number not in (1, len(models)):
        remedy = "pass the function that builds one, or a list such as bayestrain.posterior.around(model, particles)"
        raise ConfigError(f"{number} particles need as many networks, got {len(models)}: {remedy}.")
    return models


def _check(config: FitConfig, how: PosteriorConfig, prior: Any, validation: Any, teacher: Any) -> None:
    """Refuse settings that do not go together, before anything is changed."""
    for name, refused, instead in (
        ("prior=False", prior is False, "Leave it out: a posterior has a prior."),
        ("teacher=", teacher is not None, "Train one network with it, then start particles around that."),
        ("fit.accumulate", config.accumulate > 1, "Use chunk= to save memory."),
        ("fit.sharded", config.sharded, "Processes have particles of their own."),
        ('fit.precision "fp16"', config.precision == "fp16", 'Use "bf16".'),
    ):
        if refused and how.particles > 1:
            raise ConfigError(f"{name} is for one network, not for {how.particles} particles. {instead}")
    if config.targets and not config.search:
        raise ConfigError(f"fit.{config.targets[0]} needs factorised weights (call tensorize_(model)), and fit.search.")
    if config.target_accuracy and (validation is None or not config.compact_every):
        raise ConfigError("fit.target_accuracy needs validation data, and cuts during training (fit.compact_every).")
