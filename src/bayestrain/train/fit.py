"""`fit`: the training loop for one network or a posterior, in one call.

A loop of your own needs none of this; see the README. `fit` does the same in the same order: likelihood plus prior,
backward, the optimiser's step, the prior's step, and periodic cuts of the ranks.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.nn import TensorConv2d, dense_parameters, factorized_weights
from bayestrain.posterior import Likelihood, Posterior, as_likelihood, independent
from bayestrain.posterior.likelihoods import LogProb
from bayestrain.train import config as configs
from bayestrain.train.batches import Batches
from bayestrain.train.callbacks import ProgressPrinter
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig
from bayestrain.train.folder import RunFolder
from bayestrain.train.loop import Loop, random_state, set_random_state
from bayestrain.train.search import check_target
from bayestrain.train.subject import MakeOptimizer, Network, Particles, make_prior

SMALL = 1_000_000
"""Parameters of a dense network without convolutions up to which one thread is used, for any number of particles."""


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
        model: the network, trained in place; of a posterior, the network that its particles are of.
        posterior: the posterior, with several particles.
        likelihood: with its trained parameters, if it has any.
        history: a record per epoch, from epoch 0, the network before training.
        validation: the metrics of the final network on the validation data.
        spectra: what the bonds held just before the final cut.
        start_ranks, start_parameters: of the network before training.
        seconds: of training.
    """

    model: nn.Module
    posterior: Posterior | None
    likelihood: Likelihood
    history: list[dict[str, Any]]
    validation: dict[str, float] | None
    spectra: dict[str, Any]
    start_ranks: dict[str, tuple[int, ...]]
    start_parameters: int
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
        config: the settings of the loop (`FitConfig`), of which `settings` may change single ones.
        prior: the settings of the prior; False trains without one.
        particles: with 2 or more, train a posterior of so many networks by `method`: "svgd", "ensemble" or "sgld".
        optimizer: a name of `FitConfig.optimizer`, or a function of a list of (name, parameter) pairs that returns an
            optimiser; its learning rates follow the schedule in proportion.
        num_data: number of training data, if `data` do not know it; otherwise one pass counts them.
        callbacks: objects with methods of `Callback`, called in order.
        folder: where checkpoints and ``history.jsonl`` go.
        resume: continue from the last checkpoint in `folder`, with the same settings. On a CPU the result is the same
            as without the interruption, bit for bit.
        device: where to train; by default where the model is.
        seed: of all random numbers while training; the generators return to their states from before.
        progress: print a line per epoch.
        settings: any field of `FitConfig`, and `kernel`, `temperature` and `chunk` of `PosteriorConfig`.

    >>> import torch, bayestrain as bt
    >>> model = torch.nn.Sequential(bt.TensorLinear(16, 8, max_rank=4), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> x, y = torch.randn(64, 16), torch.randint(3, (64,))
    >>> result = bt.fit(model, (x, y), epochs=2, finetune_epochs=1, lr=1e-2, progress=False)
    >>> [record["phase"] for record in result.history]
    ['search', 'search', 'search', 'finetune']
    """
    if isinstance(optimizer, str):
        settings["optimizer"] = optimizer
    own = {name: settings.pop(name) for name in ("kernel", "temperature", "chunk") if name in settings}
    if unknown := set(settings) - {each.name for each in dataclasses.fields(FitConfig)}:
        raise configs.unknown_setting(f"fit.{min(unknown)}")
    config = dataclasses.replace(config or FitConfig(), **settings)
    models = _models(model, PosteriorConfig(particles=particles).particles, seed)
    how = PosteriorConfig(particles=len(models), method=method, **own)
    search = config.search and bool(factorized_weights(models[0]))
    config = config if search else dataclasses.replace(config, finetune_epochs=0)
    _check(config, how, search=search, prior=prior, validation=validation)
    if resume and folder is None:
        raise ConfigError("resume=True needs folder=, the folder of the run to resume.")
    first = next(models[0].parameters(), torch.empty(0))
    place = torch.device(first.device if device is None else device)
    batches = Batches(data, config.batch_size, shuffle=True, device=place)
    held_out = None
    if validation is not None:
        held_out = Batches(validation, max(config.batch_size, 256), shuffle=False, device=place, name="validation")
    with _threads(config.threads, models), _own_random_numbers(place), warnings.catch_warnings():
        warnings.simplefilter("ignore", ParticleWarning)  # messages name broken particles
        number = batches.count(num_data)
        prior = prior if isinstance(prior, PriorConfig) or prior is False else PriorConfig()
        known = configs.flat(config, how, *([prior] if prior else []))
        known |= {"seed": int(seed), "num_data": number, "batches": batches.steps}
        if callable(optimizer):
            known["fit.optimizer"] = getattr(optimizer, "__qualname__", type(optimizer).__name__)
        opened = folder if isinstance(folder, RunFolder) or folder is None else RunFolder(folder, resume=resume)
        with nullcontext() if opened is None or opened is folder else opened:
            saved, note = opened.load_checkpoint() if opened is not None and resume else (None, "")
            if saved is None:
                check_target(config, models[0])
            elif changed := "; ".join(configs.differences(saved["settings"], known)):
                raise ConfigError(
                    f"The run cannot be resumed with other settings: {changed}. Use the same, or another folder."
                )
            models = [model.to(place) for model in models]
            likelihood = as_likelihood(likelihood).to(place, first.dtype)
            steps = math.ceil((batches.steps or 1) / config.accumulate)
            made = partial(make_prior, prior or None, config, number, steps, search)
            make: Any = optimizer if callable(optimizer) else None
            if how.particles == 1:
                subject = Network(models[0], likelihood, config, made, make)
            else:
                assert isinstance(prior, PriorConfig)  # _check has refused the rest
                subject = Particles(models, likelihood, config, made, make, number, prior, how, seed)
            listeners = [*callbacks, *([ProgressPrinter()] if progress else [])]
            loop = Loop(subject, batches, held_out, config, opened, listeners, known, search)
            if saved is None:
                _seed(seed)
            else:
                loop.restore(saved)
            final, before = loop.run(note), loop.history[0]
            result = FitResult(
                subject.template, subject.posterior, subject.likelihood, loop.history, final,
                {} if loop.search is None else loop.search.spectra,
                {name: tuple(bonds) for name, bonds in before["ranks"].items()}, before["parameters"], loop.seconds,
            )  # fmt: skip
            loop.notify("end", result)
            return result


# --- arguments --------------------------------------------------------------------------------------------------------


def _models(model: Any, number: int, seed: int) -> list[nn.Module]:
    """The networks to train: one for each particle."""
    if isinstance(model, nn.Module):
        if number > 1:
            raise ConfigError(
                f"{number} particles need as many networks: pass the function that builds one, or a list such as "
                "bayestrain.posterior.around(model, particles)."
            )
        return [model]
    models = list(model) if isinstance(model, Sequence) else independent(model, number, seed) if callable(model) else []
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise ConfigError(f"model must be a network, a function that builds one, or a list of them, got {model!r}.")
    if number not in (1, len(models)):
        raise ConfigError(f"There are {len(models)} networks for {number} particles. Leave particles out.")
    return models


def _check(config: FitConfig, how: PosteriorConfig, *, search: bool, prior: Any, validation: Any) -> None:
    """Refuse settings that do not go together, before anything is changed."""
    for name, refused, instead in (
        ("prior=False", prior is False, "Leave it out: a posterior has a prior."),
        ("fit.accumulate", config.accumulate > 1, "Use chunk= to save memory."),
        ('fit.precision "fp16"', config.precision == "fp16", 'Use "bf16".'),
    ):
        if refused and how.particles > 1:
            raise ConfigError(f"{name} is for one network, not for {how.particles} particles. {instead}")
    if config.targets and not search:
        raise ConfigError(
            f"fit.{config.targets[0]} needs factorised weights, and fit.search. Call tensorize_(model) first."
        )
    if config.target_accuracy and (validation is None or not config.compact_every):
        raise ConfigError("fit.target_accuracy needs validation data, and cuts during training (fit.compact_every).")


# --- surroundings -----------------------------------------------------------------------------------------------------


@contextmanager
def _threads(threads: int, models: Sequence[nn.Module]) -> Iterator[None]:
    """Use this many threads temporarily: small products gain little from a second one, and stall on a busy machine."""
    convolves = any(isinstance(module, nn.Conv2d | TensorConv2d) for module in models[0].modules())
    small = dense_parameters(models[0]) <= SMALL and not convolves
    before = torch.get_num_threads()
    torch.set_num_threads(threads or (1 if small else before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Return all random number generators to their states afterwards."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
