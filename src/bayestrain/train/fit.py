"""`fit`: the training loop for one network or a posterior, in one call.

A loop of your own needs none of this; see the README. `fit` does the same in the same order: likelihood plus prior,
backward, the optimiser's step, the prior's step, and cuts of the ranks now and then.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.compact import ranks_for
from bayestrain.errors import ConfigError, Interrupted, ParticleWarning, TrainingError
from bayestrain.nn import TensorConv2d, count_parameters, dense_parameters, factorized_weights, ranks
from bayestrain.posterior import Likelihood, Posterior, as_likelihood, independent
from bayestrain.posterior.likelihoods import LogProb
from bayestrain.train.batches import Batches
from bayestrain.train.callbacks import Plan, Progress, ProgressPrinter
from bayestrain.train.config import (
    IMMATERIAL,
    FitConfig,
    PosteriorConfig,
    PriorConfig,
    plain,
    shown,
    unknown_setting,
)  # fmt: skip
from bayestrain.train.folder import RunFolder
from bayestrain.train.schedule import learning_rate, wanted_parameters
from bayestrain.train.subject import MakeOptimizer, Network, Particles

LOOK_EVERY = 50
"""Steps between progress reports, and between checks of the losses on a GPU, where a look waits for the device."""

EMPTY = 1e-7
"""Parts of a weight that are relatively smaller are rounding errors; larger ones can grow again."""

SHRINK, PATIENCE = 0.8, 3
"""With a target accuracy: the size after a cut, and the cuts skipped before training returns to the last good size."""

SMALL = 1_000_000
"""Parameters of all particles as dense networks without convolutions, up to which one thread is fastest."""

SETTLING = 2**14
"""Training inputs with which batch norm's statistics of particles are estimated at the end."""


@dataclass(frozen=True)
class FitResult:
    """What came out of `fit`.

    Attributes:
        model: the network, trained in place; of a posterior, the network that its particles are of.
        posterior: the posterior, with several particles.
        likelihood: with its trained parameters, if it has any.
        history: a record per epoch, from epoch 0, the network before training.
        validation: the metrics of the final network on the validation data.
        spectra: what the bonds held just before the final cut.
        own_ranks: of a posterior, per layer and bond, the rank that each particle alone would have been cut to.
        start_ranks, start_parameters: of the network before training.
        seconds: of training.
    """

    model: nn.Module
    posterior: Posterior | None
    likelihood: Likelihood
    history: list[dict[str, Any]]
    validation: dict[str, float] | None
    spectra: dict[str, Any]
    own_ranks: dict[str, list[list[int]]]
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
        raise unknown_setting(min(unknown), "fit")
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
        batches.count(num_data)
        prior = prior if prior is False or isinstance(prior, PriorConfig) else PriorConfig()
        known = {f"{s.title}.{key}": plain(value) for s in (config, how, prior) if s for key, value in vars(s).items()}
        known |= {"seed": int(seed), "num_data": batches.num_data, "batches": batches.steps}
        if callable(optimizer):
            known["fit.optimizer"] = getattr(optimizer, "__qualname__", type(optimizer).__name__)
        opened = folder if isinstance(folder, RunFolder) or folder is None else RunFolder(folder, resume=resume)
        with nullcontext() if opened is None or opened is folder else opened:
            saved, note = opened.load_checkpoint() if opened is not None and resume else (None, "")
            if saved is None:
                check_target(config, models[0])
            else:
                _check_same(saved["settings"], known)
            models = [model.to(place) for model in models]
            likelihood = as_likelihood(likelihood).to(place, first.dtype)
            steps = math.ceil((batches.steps or 1) / config.accumulate)
            make: Any = optimizer if callable(optimizer) else None
            shared: dict[str, Any] = {
                "likelihood": likelihood, "config": config, "prior": prior, "num_data": batches.num_data,
                "steps": steps, "make": make, "search": search,
            }  # fmt: skip
            subject = (
                Network(models[0], **shared) if how.particles == 1 else Particles(models, how=how, seed=seed, **shared)
            )
            listeners = [*callbacks, *([ProgressPrinter()] if progress else [])]
            loop = Loop(subject, batches, held_out, config, opened, listeners, known, search)
            if saved is None:
                _seed(seed)
            else:
                loop.restore(saved)
                set_random_state(saved["random"], place)
            return loop.run(note)


@dataclass
class Loop:
    """One training run: what it holds, how it steps, how it is saved."""

    subject: Network | Particles
    data: Batches
    validation: Batches | None
    config: FitConfig
    folder: RunFolder | None
    callbacks: Sequence[Any]
    settings: dict[str, Any]
    """What a run must have in common with the one that it resumes."""
    searching: bool
    epoch: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    search_ended: int | None = None
    """The epoch of the final cut."""
    change: float = 0.0
    """The largest relative change of a weight that a cut to the target has made."""
    spectra: dict[str, Any] = field(default_factory=dict)
    own_ranks: dict[str, list[list[int]]] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    """With a target accuracy: the smallest network so far that reached it."""
    missed: int = 0
    """Cuts in a row that were skipped because the accuracy was too low."""
    saved: int | None = None
    """The epoch of the last checkpoint."""
    history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = math.ceil((self.data.steps or 1) / self.config.accumulate)
        self.epochs = self.config.epochs + self.config.finetune_epochs
        self.rates = [float(group["lr"]) / self.config.lr for group in self.subject.optimizer.param_groups]
        self.dense = dense_parameters(self.subject.template)
        self.target = _target(self.config, self.dense) if self.searching else None
        self.start = self.parameters, ranks(self.subject.template)
        self.rule = None if self.config.rule == "auto" else self.config.rule

    @property
    def parameters(self) -> int:
        """Of one network, now."""
        return count_parameters(self.subject.template)

    def tell(self, what: str, argument: Any) -> None:
        """Call this method of all callbacks that have it."""
        for callback in self.callbacks:
            if (method := getattr(callback, f"on_{what}", None)) is not None:
                method(argument)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, note: str = "") -> FitResult:
        """All epochs that are left, and the final cut."""
        if self.folder is not None:
            self.history = self.folder.start_history(-1 if self.saved is None else self.saved)
        number, particles = self.data.num_data or 0, self.subject.number
        self.tell("start", Plan(self.epochs, self.epoch, self.steps, number, particles, self.parameters, self.dense))
        if note:
            self.tell("message", note)
        try:
            if not self.history:
                self._record(dict.fromkeys(("train_loss", "prior_loss", "train_accuracy")))
            while self.epoch < self.epochs:
                started = time.perf_counter()
                self._cut()
                means = self._train_epoch()
                self.epoch += 1
                self.seconds += time.perf_counter() - started
                self._record(means)
            validation = self.history[-1]["validation"]
            if self.searching:
                self._final_cut()
                validation = self._measure()
            self.subject.finish(islice((x for x, _ in self.data), max(1, SETTLING // self.data.batch_size)))
        except KeyboardInterrupt:
            if self.folder is None or self.saved is None:
                raise
            raise Interrupted(str(self.folder.path), self.saved) from None
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise self._diverged(f"epoch {self.epoch + 1}", "a decomposition of the weights failed") from error
        posterior = self.subject.posterior if isinstance(self.subject, Particles) else None
        result = FitResult(
            self.subject.template, posterior, self.subject.likelihood, self.history, validation, self.spectra,
            self.own_ranks, self.start[1], self.start[0], self.seconds,
        )  # fmt: skip
        self.tell("end", result)
        return result

    def _train_epoch(self) -> dict[str, Any]:
        """One pass over the data; the mean losses and accuracy."""
        every = LOOK_EVERY if self.data.device.type == "cuda" else 1
        seen, sums = 0, torch.zeros(3, device=self.data.device, dtype=torch.float64)
        recent: list[Tensor] = []
        batches = iter(self.data)
        for step, group in enumerate(iter(lambda: list(islice(batches, self.config.accumulate)), []), start=1):
            self._set_rate(self.epoch + min((step - 1) / self.steps, 1.0))
            recent.append(self.subject.step(group).clone())
            number = sum(len(y) for _, y in group)
            sums, seen = sums + recent[-1] * number, seen + number
            if step % every == 0 or step >= self.steps:
                for place, (data, prior, _) in enumerate(torch.stack(recent).tolist(), start=step - len(recent) + 1):
                    if not math.isfinite(data + prior):
                        what = f"the likelihood loss is {data}" if not math.isfinite(data) else f"the prior is {prior}"
                        raise self._diverged(f"epoch {self.epoch + 1}, step {place}", what)
                recent = []
            if step % LOOK_EVERY == 0:
                self.tell("step", Progress(self.epoch + 1, step, **_means(sums / seen), lr=self.rate))
        return _means(sums / seen)

    def _set_rate(self, epoch: float) -> None:
        self.rate = learning_rate(self.config, epoch, self.search_ended)
        for group, ratio in zip(self.subject.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.rate * ratio)  # where a captured step reads it
            else:
                group["lr"] = self.rate * ratio

    def _record(self, means: dict[str, Any]) -> None:
        """Write the epoch down, then a checkpoint; never one of broken weights."""
        self._repair()
        prior, lambdas = self.subject.prior, self.subject.lambdas()
        record = {
            "epoch": self.epoch,
            "phase": "search" if self.searching else "finetune" if self.search_ended is not None else "train",
            "seconds": round(self.seconds, 3),
            "lr": self.rate,
            **means,
            "validation": self._measure(),
            "prior_weight": 0.0 if prior is None else prior.current_weight,
            "parameters": self.parameters,
            "ranks": {name: list(found) for name, found in ranks(self.subject.template).items()},
            "lambdas": {n: [[float(f"{x:.5g}") for x in u.tolist()] for u in bonds] for n, bonds in lambdas.items()},
            **self.subject.describe(),
        }
        self.history.append(record)
        if self.folder is not None:
            self.folder.append_history(record)
            if self.epoch in (self.config.epochs, self.epochs) or not self.epoch % self.config.checkpoint_every:
                self.folder.save_checkpoint(self.state())
                self.saved = self.epoch
        self.tell("epoch", record)

    def _measure(self) -> dict[str, float] | None:
        return None if self.validation is None else self.subject.measure(self.validation)

    def _repair(self) -> None:
        try:
            for message in self.subject.repair():
                self.tell("message", message)
        except TrainingError as error:
            raise self._diverged(f"epoch {self.epoch}", str(error)) from None

    def _diverged(self, where: str, what: str) -> TrainingError:
        saved = "" if self.folder is None or self.saved is None else (
            f" The checkpoint of epoch {self.saved} is in {self.folder.path}."
        )  # fmt: skip
        return TrainingError(
            f"Training diverged at {where}: {what}, at learning rate {self.rate:.3g}. The largest or broken weights "
            f"are those of {self.subject.largest()!r}.{saved} Try a smaller lr, clip_norm=1, or a longer warmup_epochs "
            "of the prior."
        )

    # --- cuts ---------------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Before an epoch of the search: cut the ranks if it is time, and end the search when it is over."""
        every = self.config.compact_every
        if self.searching and self.epoch == self.config.epochs:
            self._final_cut()
        elif self.searching and every and self.epoch and self.epoch >= self.config.first_cut and not self.epoch % every:
            if self.config.target_accuracy:
                self._cut_while_accurate()
            else:
                self._cut_towards_target()

    def _cut_towards_target(self) -> None:
        target = self.target
        before = None if target is None else copy.deepcopy(self.subject.state())
        report = self.subject.compact_(self.config.compact_tol, rule="contribution")
        if target is not None:
            if before is not None and self.parameters < target:  # empty ranks stay where the target has room for them
                self.subject.restore(before)
                self._final_cut()
                return
            wanted = wanted_parameters(self.config, self.epoch, self.start[0], target)
            if self.parameters > wanted:
                report = report.then(self.subject.compact_(rule=self.rule, parameters=wanted))
                self.change = max(self.change, report.change)
        self.tell("cut", report)
        if target is not None and self.parameters <= target:
            self._final_cut()

    def _cut_while_accurate(self) -> None:
        """Cut while the validation accuracy holds; if it does not recover, return to the smallest that did."""
        self.missed += 1
        if self._is_accurate(self.history[-1]["validation"]):
            size, self.missed = self.parameters, 0
            self.best = {"parameters": size, "subject": copy.deepcopy(self.subject.state())}
            if size == (fewest := fewest_parameters(self.subject.template)):
                self._final_cut()
                return
            report = self.subject.compact_(self.config.compact_tol, rule="contribution")
            goal = max(int(SHRINK * size), fewest)
            if self.parameters > goal:
                report = report.then(self.subject.compact_(rule=self.rule, parameters=goal))
            self.tell("cut", report)
        elif self.best is not None and self.missed >= PATIENCE:
            self._final_cut()

    def _final_cut(self) -> None:
        """End of the search: the smallest ranks for the tolerance; with a target, those that lose least for it."""
        self._repair()
        tol, left, messages, first = self.config.round_tol, self.epochs - self.epoch, [], None
        if self.config.target_accuracy:
            messages, good = self._back_to_accuracy(), copy.deepcopy(self.subject.state())
        elif self.target is not None:
            tol = min(EMPTY, tol) if left else tol  # what is nearly empty may be of use, if it is trained
            self.own_ranks = self.subject.rank_spread(None, self.target, self.rule)
            first = self.subject.compact_(rule=self.rule, parameters=self.target)
        else:
            self.own_ranks = self.subject.rank_spread(tol, None, self.rule)
        report = self.subject.compact_(tol, rule=self.rule)
        report = report if first is None else first.then(report)
        if self.config.target_accuracy and self.best is not None and not self._is_accurate(self._measure()):
            self.subject.restore(good)
            report = self.subject.compact_(EMPTY, rule=self.rule)
        self.change = max(self.change, report.change)
        kept = {row.name: (row.spectra, row.ranks) for row in report.layers if row.spectra}
        layers = {name: {"bonds": plain(bonds), "kept": list(now)} for name, (bonds, now) in kept.items()}
        self.spectra = {"tol": tol, "layers": layers}
        if self.folder is not None:
            self.folder.write_json("spectra.json", self.spectra)
        self.subject.end_search()
        self.searching, self.search_ended, self.best = False, self.epoch, None
        if self.epoch < self.config.epochs:
            messages.append(f"the search ended after {self.epoch} epochs; the other {left} are fine-tuning")
        if self.target is not None and self.change > self.config.round_tol:
            size = f"{self.dense / self.parameters:.4g}x smaller than dense"
            messages.append(f"cut to {size}; no cut changed a weight by more than {100 * self.change:.2g} %")
        self.tell("cut", report)
        for text in (*messages, *report.notes):
            self.tell("message", text)

    def _back_to_accuracy(self) -> list[str]:
        """If the network is not accurate enough, return to the smallest one that was; what there is to say about it."""
        floor = f"{100 * self.config.target_accuracy:.4g} %"
        if self._is_accurate(self.history[-1]["validation"]):
            self.best = {"parameters": self.parameters}
        elif self.best is None:
            most = max(record["validation"]["accuracy"] for record in self.history)
            return [
                f"no network whose ranks could be cut had fit.target_accuracy {floor} on the validation data (at best "
                f"{100 * most:.4g} %): only empty ranks were cut"
            ]
        else:
            self.subject.restore(self.best["subject"])
        return [f"the smallest network with validation accuracy {floor} has {self.best['parameters']:,} parameters"]

    def _is_accurate(self, metrics: Mapping[str, float] | None) -> bool:
        return metrics is not None and metrics["accuracy"] >= self.config.target_accuracy

    # --- saving -------------------------------------------------------------------------------------------------------

    KEPT = (
        "epoch", "seconds", "rate", "start", "search_ended", "change", "spectra", "own_ranks", "best", "missed",
    )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "settings": self.settings,
            "subject": self.subject.state(),
            "random": random_state(self.data.device),
            "generators": {name: found.get_state() for name, found in self.data.generators().items()},
            "loop": {name: getattr(self, name) for name in self.KEPT},
            "epoch": self.epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Return to the epoch of a checkpoint."""
        for name, value in state["loop"].items():
            setattr(self, name, value)
        if self.search_ended is not None and self.searching:
            self.subject.end_search()
            self.searching = False
        self.subject.restore(state["subject"])
        for name, generator in self.data.generators().items():
            generator.set_state(state["generators"][name])
        self.saved = self.epoch


def _means(means: Tensor) -> dict[str, Any]:
    data, prior, right = means.tolist()
    return {"train_loss": data, "prior_loss": prior, "train_accuracy": None if math.isnan(right) else right}


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


def check_target(config: FitConfig, model: nn.Module) -> None:
    """Refuse a target size that asks for nothing or cannot be reached."""
    dense, size = dense_parameters(model), count_parameters(model)
    if (target := _target(config, dense)) is None:
        return
    asked = f"fit.{config.targets[0]} {getattr(config, config.targets[0]):g}"
    if size <= target:
        raise ConfigError(
            f"{asked} asks for nothing: the network has {size:,} parameters to start with, {dense / size:.3g}x fewer "
            "than dense. Ask for a smaller network, or start with a larger max_rank."
        )
    try:
        ranks_for(model, target)
    except ConfigError as error:
        raise ConfigError(f"{asked} is out of reach. {error}") from None


def fewest_parameters(model: nn.Module) -> int:
    """Those of the network with every rank at 1."""
    weights, size = factorized_weights(model).values(), count_parameters(model)
    shapes = [shape for w in weights for shape in w.equation.shapes(w.layout.sizes, [1] * len(w.ranks))]
    return size - sum(w.numel for w in weights) + sum(map(math.prod, shapes))


def _target(config: FitConfig, dense: int) -> int | None:
    """The parameters that are asked for, if a size is."""
    return int(dense / config.target_ratio) if config.target_ratio else config.target_parameters or None


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = [key for key in {**before, **now} if key not in IMMATERIAL and before.get(key) != now.get(key)]
    if changed:
        listed = "; ".join(f"{key} was {shown(before.get(key))}, now {shown(now.get(key))}" for key in changed)
        raise ConfigError(f"The run cannot be resumed with other settings: {listed}. Use the same, or another folder.")


# --- surroundings -----------------------------------------------------------------------------------------------------


@contextmanager
def _threads(threads: int, models: Sequence[nn.Module]) -> Iterator[None]:
    """So many threads for a while: small products gain nothing from a second one, and lose where others compute."""
    convolves = any(isinstance(module, nn.Conv2d | TensorConv2d) for module in models[0].modules())
    small = len(models) * dense_parameters(models[0]) <= SMALL and not convolves
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


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch, Python and, where it is loaded, NumPy, as plain values and tensors."""
    numpy = None
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        numpy = (str(kind), keys.tolist(), *rest)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, "cuda": cuda}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Return to a `random_state`; of another kind of device, to what it has in common with this one."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["numpy"] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
