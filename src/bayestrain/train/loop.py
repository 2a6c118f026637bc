"""The training loop: epochs, cutting ranks on the way, rounding and fine-tuning at the end, exact resuming."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.data import Images
from bayestrain.errors import ConfigError, Interrupted, TrainingError
from bayestrain.layers.evaluation import evaluating
from bayestrain.train.checkpoint import FORMAT, History, load_checkpoint, save_checkpoint
from bayestrain.train.config import FitConfig
from bayestrain.train.particles import ParticleSubject
from bayestrain.train.progress import Progress
from bayestrain.train.schedule import learning_rate, leaves_one, steps_per_epoch, wanted_ratio
from bayestrain.train.subject import Subject
from bayestrain.train.tensorboard import EpochLog

LOOK_EVERY = 50
"""Steps between looks at the loss: a look waits for the device."""

EMPTY = 1e-7
"""Parts of a weight that are relatively smaller than this are lost in rounding errors; larger ones can grow again."""

LAST_INPUTS = 2**14
"""Training inputs that particles' batch norm is settled with at the end: far more than a mean and a variance need."""

LAST_BATCH = 2**11
"""So many of them at once: without gradients large batches fit, and few of them are quicker than many."""

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


class Loop:
    """One training run: what it holds, how it starts, how it steps, how it is saved."""

    def __init__(
        self, subject: Subject, train: Images, evaluate: Evaluate | None, config: FitConfig, augment: Augment | None,
        device: torch.device, seed: int, folder: Path | str | None, progress: Progress, settings: dict[str, Any],
    ) -> None:  # fmt: skip
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
        self.settings = settings
        """What a run must have in common with the one that it goes on from."""
        if config.precision == "tf32" and device.type != "cuda":
            progress.message("fit.precision tf32 is for a GPU; here products are those of float32")
        self.order = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator(device).manual_seed(seed + 1)
        self.steps_per_epoch = steps_per_epoch(len(train), config.batch_size)
        self.total_epochs = config.epochs + config.finetune_epochs
        self.start_ratio = subject.ratio
        self.rate = config.lr
        self.epoch = 0
        self.seconds = 0.0
        self.saved: int | None = None
        """The epoch of the last checkpoint."""
        self.arrived = False
        """Whether the network is at its target, or a cut away that changes little: then the search is over."""
        self.search_ended: int | None = None
        self.change = 0.0
        """The largest relative change of a weight that a cut for the target has made."""
        self.spectra: dict[str, Any] = {}
        self.cut_earlier: dict[str, list[list[float]]] = {}
        """Per layer and bond, the singular values that the search has cut, relative to the largest of that moment."""

    def run(self, resume: bool) -> FitResult:
        """All epochs that are left, then the final rounding if it has not been."""
        if resume and self.folder is not None:
            self.restore(load_checkpoint(self.folder))
        elif self.config.target_ratio:
            self.subject.check_target(self.config)
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
            size, shuffle=True, generator=order, device=self.device, augment=augment,
            drop_last=leaves_one(len(self.train), size),
        )  # fmt: skip

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
            self.arrived = self.subject.change_for(config.target_ratio) <= config.compact_tol
            if self.arrived:
                return
        bonds = self.subject.spectra()
        report = self.subject.cut(config.compact_tol)
        if config.target_ratio:
            wanted = wanted_ratio(config, self.epoch, self.start_ratio)
            if self.subject.ratio < wanted:  # more than what is empty has to go, little by little
                report = self.subject.cut_to(wanted)
                self.change = max(self.change, report.change)
            self.arrived = self.subject.ratio >= config.target_ratio
        for row in report.layers:
            earlier = self.cut_earlier.setdefault(row.name, [[] for _ in bonds[row.name]])
            for known, values, rank in zip(earlier, bonds[row.name], row.ranks[1:-1], strict=True):
                known[:0] = [value / max(values[0], 1e-300) for value in values[rank:]]

    def _round(self) -> None:
        """End of the search: the smallest ranks for the tolerance; with a target, those that lose least for it."""
        config, bonds, tol = self.config, self.subject.spectra(), self.config.round_tol
        if config.target_ratio and self.epoch < self.total_epochs:
            tol = min(EMPTY, tol)  # what is nearly empty can be of use again, if it is trained
        report = self.subject.round(tol, config.target_ratio)
        self.search_ended = self.epoch
        if self.epoch < config.epochs:
            self.progress.message(f"the target was reached after {self.epoch} epochs: the rest is fine-tuning")
        if config.target_ratio:
            self.change = max(self.change, report.change)
            if self.change > config.round_tol:
                changed = f"no cut for that changed a weight by more than {100 * self.change:.2g} %"
                whose = ", the root mean square over particles" if isinstance(self.subject, ParticleSubject) else ""
                self.progress.message(f"cut to be {self.subject.ratio:.4g}x smaller: {changed}{whose}")
        self.spectra = {
            "tol": tol,
            "change": self.change if config.target_ratio else None,
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
        validation = None if self.evaluate is None else self._validation(self.evaluate)
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

    def _validation(self, evaluate: Evaluate) -> dict[str, float]:
        subject = self.subject.evaluated()
        with evaluating(subject) if isinstance(subject, nn.Module) else nullcontext():
            found = evaluate(subject)
        if not isinstance(found, Mapping):
            raise ConfigError(f"evaluate must return a dict of numbers, such as {{'accuracy': 0.9}}, got {found!r}.")
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"evaluate must return numbers, got {found!r}: {error}.") from error

    def _phase(self) -> str:
        if self.subject.searching:
            return "search"
        return "finetune" if self.search_ended is not None or self.epoch > self.config.epochs else "train"

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "format": FORMAT,
            "settings": self.settings,
            "epoch": self.epoch,
            "subject": self.subject.state(),
            "order": self.order.get_state(),
            "noise": self.noise.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "seconds": self.seconds,
            "rate": self.rate,
            "start_ratio": self.start_ratio,
            "arrived": self.arrived,
            "search_ended": self.search_ended,
            "change": self.change,
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
        self.start_ratio = state["start_ratio"]
        self.arrived, self.search_ended, self.change = state["arrived"], state["search_ended"], state["change"]
        self.spectra, self.cut_earlier = state["spectra"], state["cut_earlier"]

    def _diverged(self, epoch: int, step: int, what: str, rate: float) -> TrainingError:
        where = f" The last good checkpoint is in {self.folder}." if self.folder is not None else ""
        return TrainingError(
            f"The loss is not finite at epoch {epoch}, step {step}: {what} at learning rate {rate:.3g}; the layer with "
            f"the largest or broken cores is {self.subject.largest_layer()!r}.{where} "
            "Try a smaller fit.lr, fit.clip_norm=1, or a longer prior.warmup_epochs."
        )
