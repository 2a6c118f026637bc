"""`fit` and `fit_posterior`: epochs, cutting ranks on the way, rounding and fine-tuning at the end, exact resuming.

A user with a loop of their own needs none of this; see the README.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.data import Images
from bayestrain.errors import ConfigError, Interrupted, ParticleWarning, TrainingError
from bayestrain.infer import Kernel
from bayestrain.posterior import Posterior
from bayestrain.prior import Prior
from bayestrain.sizes import tt_layers
from bayestrain.speed import plan_report
from bayestrain.train.arithmetic import lowered, products
from bayestrain.train.checkpoint import History, load_checkpoint, save_checkpoint
from bayestrain.train.config import FitConfig, PriorConfig
from bayestrain.train.metrics import check_labels
from bayestrain.train.particles import ParticleSubject
from bayestrain.train.point import Loss, Point
from bayestrain.train.progress import Progress, Silent
from bayestrain.train.schedule import learning_rate, wanted_ratio
from bayestrain.train.subject import Subject, make_optimizer, make_prior
from bayestrain.train.tensorboard import EpochLog

LOOK_EVERY = 50
"""Steps between looks at the loss: a look waits for the device."""

EMPTY = 1e-7
"""Parts of a weight that are relatively smaller than this are lost in rounding errors; larger ones can grow again."""

BOLDEST = 0.3
"""The largest tolerance of a cut on the way to a target: what is cut then must be learned again."""

LAST_INPUTS = 2**14
"""Training inputs that particles' batch norm is settled with at the end: far more than a mean and a variance need."""

LAST_BATCH = 2**11
"""So many of them at once: without gradients large batches fit, and few of them are quicker than many."""

PROBE = 64
"""Inputs on which a posterior's outputs are looked at after each epoch."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
Evaluate = Callable[[Any], dict[str, float]]


@dataclass(frozen=True)
class FitResult:
    """The epochs, one dict each, and the spectra just before the final rounding."""

    history: list[dict[str, Any]]
    spectra: dict[str, Any]
    seconds: float
    own_ranks: dict[str, list[list[int]]]
    """Of a posterior: per layer and bond, the rank that each particle alone would have been rounded to."""


def fit(
    model: nn.Module,
    train: Images,
    evaluate: Evaluate | None,
    config: FitConfig,
    *,
    prior: PriorConfig | None = None,
    search: bool = True,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
    device: torch.device | str = "cpu",
    seed: int = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> FitResult:
    """Train a tensorised model in place until it is small and good.

    Args:
        model: a model with TT layers; any model without a `search`.
        train: training images; they go through `augment` as floats in [0, 1], on `device`.
        evaluate: called after each epoch with the model, returns validation metrics; never give it the test set.
        config, prior: the settings of the loop and of the prior.
        search: whether ranks are sought. If not, every weight has the prior Normal(0, ``prior.other_variance``) and
            nothing is cut.
        augment: ``augment(images, generator)``: normalisation and augmentation of one batch; on a GPU of many batches
            at once (`Images.batches`).
        loss: mean loss of a batch; its outputs' largest entry counts as the predicted class in the progress.
        folder: where checkpoints and ``history.jsonl`` go; none are written without it.
        resume: go on from the last checkpoint in `folder`. On a CPU the result is the same, bit for bit.
        progress: who watches.
    """
    place = torch.device(device)
    x, _ = _first_batch(train, config, augment, place, seed)
    if loss is F.cross_entropy:  # what labels another loss takes, it knows itself
        check_labels(model.to(place), x, train.labels)
    subject = Point(model, config, prior or PriorConfig(), loss, len(train), place, search)
    watcher = progress or Silent()
    run = _Fit(subject, train, evaluate, config, augment, place, seed, folder, resume, watcher)
    with products(config.precision, place), lowered(config.precision, place):
        if tt_layers(model):
            watcher.message(plan_report(model, subject.arrange(x), training=True).verdict())
    return run.run(resume)


def fit_posterior(
    models: Sequence[nn.Module],
    train: Images,
    evaluate: Evaluate | None,
    config: FitConfig,
    *,
    method: str = "svgd",
    kernel: Kernel | None = None,
    temperature: float | None = None,
    chunk: int | None = None,
    prior: PriorConfig | None = None,
    search: bool = True,
    augment: Augment | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[Posterior, FitResult]:
    """Train a posterior of classifiers that start at `models`; what is not told of here is as for `fit`.

    Args:
        evaluate: is called with the `Posterior`.
        method, kernel, chunk: as for `Posterior`.
        temperature: for "sgld", which is its own optimiser: 1 (default) samples the posterior, less a sharper one.
    """
    place, settings = torch.device(device), prior or PriorConfig()
    steps = math.ceil(len(train) / config.batch_size)
    x, y = _first_batch(train, config, augment, place, seed)
    for model in models[:1]:
        check_labels(model.to(place), x, train.labels)

    def one_prior(model: nn.Module) -> Prior:
        return make_prior(settings, model, len(train), steps, search=search)

    def optimizer(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return make_optimizer(config, named, config.lr, model=models[0], capturable=place.type == "cuda")

    options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    if method == "sgld":
        options |= {"lr": config.lr, "memory": 0.99, "seed": seed}
    particles = Posterior(
        [model.to(place) for model in models], len(train), method=method, prior=one_prior, kernel=kernel, chunk=chunk,
        optimizer=None if method == "sgld" else optimizer, clip=config.clip_norm or None, **options,
    )  # fmt: skip
    watcher = progress or Silent()
    watcher.message(f"{particles.estimate_memory(x, y)}")
    subject = ParticleSubject(particles, config, settings, probe=x[:PROBE])
    run = _Fit(subject, train, evaluate, config, augment, place, seed, folder, resume, watcher)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ParticleWarning)  # the run tells of broken particles in its own way
        return particles, run.run(resume)


def _first_batch(
    train: Images, config: FitConfig, augment: Augment | None, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    if len(train) == 0:
        raise ConfigError("There are no training images.")
    x, y = next(train.batches(config.batch_size, shuffle=False, device=device))
    return x if augment is None else augment(x, torch.Generator(device).manual_seed(seed)), y


class _Fit:
    """One training run: what it holds, how it starts, how it steps, how it is saved."""

    def __init__(
        self, subject: Subject, train: Images, evaluate: Evaluate | None, config: FitConfig, augment: Augment | None,
        device: torch.device, seed: int, folder: Path | str | None, resume: bool, progress: Progress,
    ) -> None:  # fmt: skip
        if folder is None and (resume or config.tensorboard):
            raise ConfigError("resume and fit.tensorboard need the folder of a run. Give folder=.")
        self.subject = subject
        self.train = train.to(device)
        self.evaluate = evaluate
        self.config = config
        self.augment = augment
        self.device = device
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.progress = progress
        if config.precision == "tf32" and device.type != "cuda":
            progress.message("fit.precision tf32 is for a GPU; here products are those of float32")
        self.order = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator(device).manual_seed(seed + 1)
        self.steps_per_epoch = math.ceil(len(train) / config.batch_size) - self._leaves_one(config.batch_size)
        self.total_epochs = config.epochs + config.finetune_epochs
        self.start_ratio = subject.ratio
        if config.target_ratio:
            subject.check_target(config)
        self.rate = config.lr
        self.epoch = 0
        self.seconds = 0.0
        self.saved: int | None = None
        """The epoch of the last checkpoint."""
        self.arrived = False
        """Whether the next cut would bring the network to its target: then the search is over."""
        self.search_ended: int | None = None
        self.spectra: dict[str, Any] = {}
        self.cut_earlier: dict[str, list[list[float]]] = {}
        """Per layer and bond, the singular values that the search has cut, relative to the largest of that moment."""

    def run(self, resume: bool) -> FitResult:
        """All epochs that are left, then the final rounding if it has not been."""
        if resume and self.folder is not None:
            self.restore(load_checkpoint(self.folder))
        history = History(self.folder, until_epoch=-1 if self.saved is None else self.saved)
        log = EpochLog(self.folder if self.config.tensorboard else None)
        try:
            if not history.lines:
                self._record(history, log, {"train_loss": None, "prior_loss": None, "train_accuracy": None})
            while self.epoch < self.total_epochs:
                if self.subject.searching and (self.epoch == self.config.epochs or self.arrived):
                    self._round()
                started = time.perf_counter()
                means = self._run_epoch(self.epoch + 1)
                self.epoch += 1
                self._compact_now_and_then()
                self.seconds += time.perf_counter() - started
                self._record(history, log, means)
            if self.subject.searching:
                self._round()
            size = min(max(LAST_BATCH, self.config.batch_size), len(self.train))
            batches = self._batches(torch.Generator().manual_seed(0), size)
            number = min(max(1, LAST_INPUTS // size), len(self.train) // size)  # a small last batch is left out
            self.subject.finish(x for x, _ in islice(batches, number))
        except KeyboardInterrupt:
            if self.saved is None:
                raise
            raise Interrupted(str(self.folder), self.saved) from None
        finally:
            log.close()
        own_ranks = self.subject.own_ranks if isinstance(self.subject, ParticleSubject) else {}
        return FitResult(history.lines, self.spectra, self.seconds, own_ranks)

    def _batches(self, order: torch.Generator, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        def augment(x: Tensor) -> Tensor:
            return self.subject.arrange(x if self.augment is None else self.augment(x, self.noise))

        return self.train.batches(
            size, shuffle=True, generator=order, device=self.device, augment=augment, drop_last=self._leaves_one(size)
        )

    def _leaves_one(self, size: int) -> bool:
        """Whether the last batch would be a single image, of which batch norm learns nothing: it is left out then."""
        return len(self.train) % size == 1 and len(self.train) > size > 1

    def _run_epoch(self, epoch: int) -> dict[str, Any]:
        """One pass over the training images; the mean losses and accuracy."""
        sums = torch.zeros(3, device=self.device)  # data loss, prior loss, right answers, each times the batch size
        seen = 0
        for step, (x, y) in enumerate(self._batches(self.order, self.config.batch_size), start=1):
            rate = self._set_rate(epoch - 1 + (step - 1) / self.steps_per_epoch)
            sums += self.subject.step(x, y) * len(y)
            seen += len(y)
            if step % LOOK_EVERY == 0 or step == self.steps_per_epoch:
                data, prior, right = (sums / seen).tolist()
                if not math.isfinite(data + prior):
                    what = "the prior" if math.isfinite(data) else "the data loss"
                    raise self._diverged(epoch, step, f"{what} is {prior if math.isfinite(data) else data}", rate)
                self.progress.step(epoch, step, data, right, rate)
        return {"train_loss": data, "prior_loss": prior, "train_accuracy": right}

    def _set_rate(self, epoch: float) -> float:
        self.rate = learning_rate(self.config, epoch, self.search_ended)
        self.subject.set_rate(self.rate)
        return self.rate

    def _compact_now_and_then(self) -> None:
        """Cut ranks during the search: training gets cheaper as they fall."""
        config, every = self.config, self.config.compact_every
        if not self.subject.searching or not every or self.epoch < config.compact_from or self.epoch % every:
            return
        if config.target_ratio:
            self.arrived = self.subject.tolerance_for(config.target_ratio, 0.0) <= config.compact_tol
            if self.arrived:
                return
        bonds = self.subject.spectra()
        for row in self.subject.cut(self._cut_tolerance()).layers:
            earlier = self.cut_earlier.setdefault(row.name, [[] for _ in bonds[row.name]])
            for known, values, rank in zip(earlier, bonds[row.name], row.ranks[1:-1], strict=True):
                known[:0] = [value / max(values[0], 1e-300) for value in values[rank:]]

    def _cut_tolerance(self) -> float:
        """What a cut may change; with a target, as much as it takes to come nearer to it little by little."""
        tol = self.config.compact_tol
        if not self.config.target_ratio:
            return tol
        wanted = self.subject.tolerance_for(wanted_ratio(self.config, self.epoch, self.start_ratio), tol)
        return max(tol, min(wanted, BOLDEST))

    def _round(self) -> None:
        """End of the search: the smallest ranks for the tolerance; with a target, the largest that it allows."""
        bonds, tol = self.subject.spectra(), self.config.round_tol
        if self.config.target_ratio:
            # What is nearly empty can be of use again, if it is trained.
            least = min(EMPTY, tol) if self.epoch < self.total_epochs else tol
            tol = self.subject.tolerance_for(self.config.target_ratio, least)
        report = self.subject.round(tol)
        self.search_ended = self.epoch
        if self.epoch < self.config.epochs:
            self.progress.message(f"the target was reached after {self.epoch} epochs: the rest is fine-tuning")
        elif tol > self.config.round_tol:
            self.progress.message(f"rounded with a tolerance of {tol:.2g}, to be {self.subject.ratio:.4g}x smaller")
        if self.subject.ratio < self.config.target_ratio:
            self.progress.message(
                f"the target of {self.config.target_ratio:g}x was missed: at the largest tolerance there is, nothing "
                "more of these weights can go. Train longer, or with a larger prior.weight."
            )
        self.spectra = {
            "tol": tol,
            "layers": {
                row.name: {
                    "bonds": bonds[row.name],
                    "cut": list(row.ranks[1:-1]),
                    "earlier": self.cut_earlier.get(row.name, [[] for _ in bonds[row.name]]),
                }
                for row in report.layers
            },
        }
        for note in report.notes:
            self.progress.message(note)

    def _record(self, history: History, log: EpochLog, means: dict[str, Any]) -> None:
        """Write the epoch down, then the checkpoint that stands for it; never one that is broken."""
        try:
            for message in self.subject.mend():
                self.progress.message(message)
        except TrainingError as error:
            raise self._diverged(self.epoch, self.steps_per_epoch, f"{error} is not finite", self.rate) from None
        found = self.evaluate(self.subject.evaluated()) if self.evaluate is not None else None
        validation = None if found is None else {name: float(value) for name, value in found.items()}
        line = {
            "epoch": self.epoch,
            "phase": self._phase(),
            "seconds": round(self.seconds, 3),
            "lr": self.rate,
            **means,
            "validation": validation,
            **self.subject.describe(),
        }
        history.append(line)
        log.write(line)
        last = self.epoch in (self.config.epochs, self.total_epochs)
        if self.folder is not None and (last or self.epoch % self.config.checkpoint_every == 0):
            save_checkpoint(self.folder, self.state())
            self.saved = self.epoch
        self.progress.epoch(line)

    def _phase(self) -> str:
        if self.subject.searching:
            return "search"
        return "finetune" if self.search_ended is not None or self.epoch > self.config.epochs else "train"

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "format": 3,
            "epoch": self.epoch,
            "subject": self.subject.state(),
            "order": self.order.get_state(),
            "noise": self.noise.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "seconds": self.seconds,
            "rate": self.rate,
            "arrived": self.arrived,
            "search_ended": self.search_ended,
            "spectra": self.spectra,
            "cut_earlier": self.cut_earlier,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the moment `state` was made."""
        self.subject.restore(state["subject"])
        self.order.set_state(state["order"])
        if len(state["noise"]) == len(self.noise.get_state()):
            self.noise.set_state(state["noise"])
        else:  # no generator of this device can go on where another's was
            self.noise.manual_seed(self.noise.initial_seed() + int(state["epoch"]))
            self.progress.message("resumed on another kind of device: the run goes on, with other random numbers")
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.epoch = self.saved = state["epoch"]
        self.seconds, self.rate = state["seconds"], state["rate"]
        self.arrived, self.search_ended = state["arrived"], state["search_ended"]
        self.spectra, self.cut_earlier = state["spectra"], state["cut_earlier"]

    def _diverged(self, epoch: int, step: int, what: str, rate: float) -> TrainingError:
        where = f" The last good checkpoint is in {self.folder}." if self.folder is not None else ""
        return TrainingError(
            f"The loss is not finite at epoch {epoch}, step {step}: {what} at learning rate {rate:.3g}; the layer with "
            f"the largest or broken cores is {self.subject.largest_layer()!r}.{where} "
            "Try a smaller fit.lr, fit.clip_norm=1, or a longer prior.warmup_epochs."
        )
