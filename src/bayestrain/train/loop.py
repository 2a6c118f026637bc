"""The loop of `fit`: epochs, records, checkpoints, and what ends a run early."""

import math
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayestrain.errors import CollapseWarning, Interrupted, TrainingError
from bayestrain.files import reading
from bayestrain.nn import count_parameters, dense_parameters
from bayestrain.train.batches import Batches, rows
from bayestrain.train.callbacks import Plan
from bayestrain.train.config import FitConfig, plain
from bayestrain.train.distributed import shared
from bayestrain.train.folder import RunFolder
from bayestrain.train.parts import put_together, write_parts
from bayestrain.train.search import Search
from bayestrain.train.subject import Network, Setup

LOOK_EVERY = 50  # steps between progress reports, and between checks of the losses on a GPU, which wait for the device
LEARNED, FORGOTTEN = 0.1, 0.6  # how far the likelihood loss falls if anything was learned; the share not to be lost
SETTLING = 2**14  # training inputs with which batch norm's statistics of particles are estimated at the end


class Loop:
    """One training run: how it steps, what it records, how it is saved."""

    KEPT = ("epoch", "seconds", "rate", "history")

    def __init__(
        self, subject: Network, setup: Setup, data: Batches, validation: Batches | None, folder: RunFolder | None,
        callbacks: Sequence[Any], settings: dict[str, Any],
    ) -> None:  # fmt: skip
        self.subject, self.data, self.validation, self.config = subject, data, validation, setup.config
        self.folder, self.callbacks, self.settings, self.steps = folder, callbacks, settings, setup.steps
        self.search = Search(subject, self.config, self.notify)
        self.epoch, self.seconds, self.rate = 0, 0.0, 0.0
        self.history: list[dict[str, Any]] = []
        self.forgotten = False  # whether the prior was reported to have undone the training
        self.saved: int | None = None  # the epoch of the last checkpoint
        self.place: Path | None = shared(None if folder is None else folder.path)  # also where another process writes
        self.epochs = self.config.epochs + self.config.finetune_epochs
        self.rates = [float(group["lr"]) / self.config.lr for group in subject.optimizer.param_groups]

    def notify(self, what: str, argument: Any) -> None:
        for callback in self.callbacks:
            if (method := getattr(callback, f"on_{what}", None)) is not None:
                method(argument)

    def run(self, note: str = "") -> dict[str, float] | None:
        """All epochs that are left, and the final cut; the metrics of the final network on the validation data."""
        if self.folder is not None:
            self.folder.write_history(self.history)
        sizes = count_parameters(self.subject.template), dense_parameters(self.subject.template)
        self.notify("start", Plan(self.epochs, self.epoch, self.steps, self.data.num_data, self.subject.number, *sizes))
        if note:
            self.notify("message", note)
        try:
            if not self.history:
                self._record(dict.fromkeys(("train_loss", "prior_loss", "train_accuracy")))
            while self.epoch < self.epochs:
                self._cut()
                started = time.perf_counter()
                means = self._train_epoch()
                self.epoch += 1
                self.seconds += time.perf_counter() - started
                self._record(means)
            validation = self.subject.measure(self.validation) if self._cut() else self.history[-1]["validation"]
            if self.subject.posterior is not None:
                settling = islice(self.data, max(1, SETTLING // self.data.batch_size))
                self.subject.posterior.refresh_statistics(x for x, _ in settling)
            return validation
        except KeyboardInterrupt:
            if self.place is None or self.saved is None:
                raise
            raise Interrupted(str(self.place), self.saved) from None
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise self._diverged(f"epoch {self.epoch + 1}", "a decomposition of the weights failed") from error

    def _train_epoch(self) -> dict[str, Any]:
        """One pass over the data; the mean losses and accuracy."""
        every = LOOK_EVERY if self.data.device.type == "cuda" else 1
        self.data.epoch, sums, recent, batches = self.epoch, [0.0] * 4, list[tuple[Tensor, int]](), iter(self.data)
        for step, group in enumerate(iter(lambda: list(islice(batches, self.config.accumulate)), []), start=1):
            self._set_rate(self.epoch + min((step - 1) / self.steps, 1.0))
            number = int(self.subject.world.sum_data(torch.tensor(sum(map(rows, group)))))
            recent.append((self.subject.step(group).clone(), number))
            if step % every == 0 or step >= self.steps:
                sums, recent = self._sums(sums, recent, step), []
            if step % LOOK_EVERY == 0:
                self.notify("step", {"epoch": self.epoch + 1, "step": step, "lr": self.rate, **_means(sums)})
        return _means(self._sums(sums, recent, step) if recent else sums)

    def _sums(self, sums: list[float], recent: Sequence[tuple[Tensor, int]], step: int) -> list[float]:
        """Sums over data of losses, accuracies and 1, those of the steps up to this one added; checks the losses."""
        terms = torch.stack([each for each, _ in recent]).tolist()
        for place, (own, (_, number)) in enumerate(zip(terms, recent, strict=True), start=step - len(recent) + 1):
            for what, value in zip(("likelihood loss", "prior"), own, strict=False):
                if not math.isfinite(value):
                    raise self._diverged(f"epoch {self.epoch + 1}, step {place}", f"the {what} is {value}")
            sums = [total + number * value for total, value in zip(sums, (*own, 1.0), strict=True)]
        return sums

    def _set_rate(self, epoch: float) -> None:
        self.rate = learning_rate(self.config, epoch, self.search.ended)
        for group, ratio in zip(self.subject.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.rate * ratio)  # where a captured step reads it
            else:
                group["lr"] = self.rate * ratio

    def _cut(self) -> bool:
        """Cut the ranks if it is time; whether this ended the search."""
        if not self.search.running:
            return False
        started = time.perf_counter()
        self.search.cut(self.epoch, self.history[-1]["validation"] or {})
        self.seconds += time.perf_counter() - started
        return not self.search.running

    def _record(self, means: dict[str, Any]) -> None:
        """Record the epoch and write a checkpoint, unless the weights are broken."""
        try:
            message = self.subject.repair()
        except TrainingError as error:
            raise self._diverged(f"epoch {self.epoch}", str(error)) from None
        if message:
            self.notify("message", message)
        phase = "search" if self.search.running else "finetune" if self.config.search else "train"
        record = {
            "epoch": self.epoch, "phase": phase, "seconds": round(self.seconds, 3), "lr": self.rate,
            **means, "validation": self.subject.measure(self.validation), **self.subject.describe(),
        }  # fmt: skip
        self.history.append(record)
        self._check_fit()
        if self.folder is not None:
            self.folder.write_history(self.history)
        due = self.epoch in (self.config.epochs, self.epochs) or not self.epoch % self.config.checkpoint_every
        if self.place is not None and due:
            state = write_parts(self.state(), self.subject, self.place, self.epoch)
            if self.folder is not None:
                self.folder.save_checkpoint(state)
            self.saved = self.epoch
        self.notify("epoch", record)

    def _check_fit(self) -> None:
        """Warn, once, if the prior took away what had been learned before: norms that are held do not show it."""
        prior, rows = self.subject.prior, [row for row in self.history if row["train_loss"] is not None]
        early = [row["train_loss"] for row in rows if prior and row["prior_weight"] < prior.weight / 2]
        if self.forgotten or not early or not self.search.running or self.config.targets:
            return
        first, best, now = rows[0]["train_loss"], min(early), rows[-1]["train_loss"]
        if first - best > LEARNED and now - best > FORGOTTEN * (first - best):
            self.forgotten = True
            warnings.warn(
                f"The prior undoes the training: at epoch {self.epoch} the likelihood loss is {now:.4g}, after "
                f"{best:.4g} before the prior took effect and {first:.4g} at first. The likelihood must sum over the "
                "outputs of a datum, not average. If it does, lower the prior's weight, or raise warmup_epochs.",
                CollapseWarning,
                stacklevel=2,
            )

    def _diverged(self, where: str, what: str) -> TrainingError:
        advice = "Try a smaller lr, clip_norm=1, or a longer warmup_epochs of the prior."
        if self.place is not None and self.saved is not None:
            advice = f"The checkpoint of epoch {self.saved} is in {self.place}. {advice}"
        return TrainingError(
            f"Training diverged at {where}: {what}, at learning rate {self.rate:.3g}. The largest or broken weights "
            f"are those of {self.subject.largest()!r}. {advice}"
        )

    def state(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "subject": self.subject.state(),
            "search": {name: getattr(self.search, name) for name in Search.KEPT},
            "random": random_state(self.data.device),
            "generators": [generator.get_state() for generator in self.data.generators()],
            **{name: getattr(self, name) for name in self.KEPT},
        }

    def restore(self, state: dict[str, Any]) -> None:
        assert self.place is not None
        file = self.place if self.folder is None else self.folder.checkpoint
        with reading(file, "Resume with the same network and data, or overwrite the run."):
            state = put_together(state, self.subject, self.place)
            vars(self).update({name: state[name] for name in self.KEPT})
            vars(self.search).update({name: state["search"][name] for name in Search.KEPT})
            plain(self.history)  # or else they could not be written later
            for record in self.history:
                _ = record["validation"], +record["parameters"], [tuple(bonds) for bonds in record["ranks"].values()]
            if self.epoch not in range(self.epochs + 1) or not math.isfinite(self.seconds):
                raise ValueError(f"its epoch is {self.epoch!r}, its time {self.seconds!r}")
            if self.search.ended is not None:
                self.subject.end_search()
            self.subject.restore(state["subject"])
            for generator, saved in zip(self.data.generators(), state["generators"], strict=True):
                generator.set_state(saved)
            set_random_state(state["random"], self.data.device)
        self.saved = self.epoch


def learning_rate(config: FitConfig, epoch: float, search_ended: int | None = None) -> float:
    """The rate after `epoch` epochs; fine-tuning has a cosine of its own, unless the schedule continues through it."""
    start = config.epochs if search_ended is None else search_ended
    tuned, length = epoch - start, config.epochs + config.finetune_epochs - start
    if config.finetune_lr and length and tuned >= 0:
        return config.finetune_lr * _cosine(tuned / length)
    length = config.epochs if config.finetune_lr else config.epochs + config.finetune_epochs
    warmup = min(1.0, epoch / config.lr_warmup_epochs) if config.lr_warmup_epochs else 1.0
    done = min(epoch / length, 1.0)
    steps = config.gamma ** sum(done >= milestone for milestone in config.milestones)
    return config.lr * warmup * {"cosine": _cosine(done), "step": steps, "constant": 1.0}[config.schedule]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _means(sums: Sequence[float]) -> dict[str, Any]:
    data, prior, right = (total / sums[-1] for total in sums[:-1])
    return {"train_loss": data, "prior_loss": prior, "train_accuracy": None if math.isnan(right) else right}


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch, Python and NumPy, as plain values and tensors."""
    numpy: Any = np.random.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = (numpy[0], numpy[1].tolist(), *numpy[2:])
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, "cuda": cuda}


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a `random_state`; one of another kind of device is restored as far as it applies here."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
