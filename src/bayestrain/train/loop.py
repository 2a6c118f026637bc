"""`fit`: MAP training with the rank prior, cutting ranks on the way, rounding and fine-tuning at the end.

A user with a loop of their own needs none of this; see the README.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain import tt
from bayestrain.compact import compact_
from bayestrain.data import Images
from bayestrain.errors import Interrupted, TrainingError
from bayestrain.prior import RankPrior
from bayestrain.sizes import count_parameters, ranks, tt_layers
from bayestrain.train.checkpoint import BEST, LAST, History, load_checkpoint, save_checkpoint
from bayestrain.train.config import FitConfig, PriorConfig
from bayestrain.train.progress import Progress, Silent
from bayestrain.train.schedule import finetune_rate, learning_rate
from bayestrain.train.tensorboard import EpochLog

LOOK_EVERY = 50
"""Steps between looks at the loss: a look waits for the device."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
Evaluate = Callable[[nn.Module], dict[str, float]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FitResult:
    """The epochs, one dict each, and the spectra just before the final rounding."""

    history: list[dict[str, Any]]
    spectra: dict[str, Any]
    seconds: float


def fit(
    model: nn.Module,
    train: Images,
    evaluate: Evaluate | None,
    config: FitConfig,
    *,
    prior: PriorConfig | None = None,
    augment: Augment | None = None,
    loss: Loss = F.cross_entropy,
    device: torch.device | str = "cpu",
    seed: int = 0,
    folder: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> FitResult:
    """Train a tensorised model in place until it is small and good.

    Args:
        model: a model with TT layers.
        train: training images; each batch goes through `augment`, as floats in [0, 1], on `device`.
        evaluate: called after each epoch with the model, returns validation metrics; never give it the test set.
        config, prior: the settings of the loop and of the prior.
        augment: ``augment(images, generator)``: normalisation and augmentation of one batch.
        loss: mean loss of a batch; its outputs' largest entry counts as the predicted class in the progress.
        folder: where checkpoints and ``history.jsonl`` go; none are written without it.
        resume: go on from the last checkpoint in `folder`. On a CPU the result is the same, bit for bit.
        progress: who watches.
    """
    run = _Fit(model, train, evaluate, config, prior or PriorConfig(), augment, loss, torch.device(device), seed)
    run.progress = progress or Silent()
    run.folder = folder
    if resume and folder is not None:
        run.restore(load_checkpoint(folder))
    return run.run()


class _Fit:
    """One training run: what it holds, how it starts, how it steps, how it is saved."""

    progress: Progress
    folder: Path | None

    def __init__(
        self, model: nn.Module, train: Images, evaluate: Evaluate | None, config: FitConfig, prior: PriorConfig,
        augment: Augment | None, loss: Loss, device: torch.device, seed: int,
    ) -> None:  # fmt: skip
        self.model = model.to(device)
        self.train = train.to(device)
        self.evaluate = evaluate
        self.config = config
        self.augment = augment
        self.loss = loss
        self.device = device
        self.order = torch.Generator().manual_seed(seed)
        self.noise = torch.Generator(device).manual_seed(seed + 1)
        self.steps_per_epoch = math.ceil(len(train) / config.batch_size)
        self.prior: RankPrior | None = RankPrior(
            model, len(train), a=prior.a, b=prior.b, weight=prior.weight, update=prior.update, floor=prior.floor,
            warmup_steps=round(prior.warmup_epochs * self.steps_per_epoch), other_variance=prior.other_variance,
            align_every=prior.align_every,
        )  # fmt: skip
        self.optimizer = self._new_optimizer(config.lr)
        self.epoch = 0
        self.seconds = 0.0
        self.best = -math.inf
        self.resumed = False
        self.spectra: dict[str, Any] = {}
        self.cut_earlier: dict[str, list[list[float]]] = {}
        """Per layer and bond, the singular values that the search has cut, relative to the largest of that moment."""

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr, momentum=self.config.momentum, weight_decay=self.config.weight_decay)
        kind = torch.optim.AdamW if self.config.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr, weight_decay=self.config.weight_decay)

    @property
    def total_epochs(self) -> int:
        return self.config.epochs + self.config.finetune_epochs

    def run(self) -> FitResult:
        """All epochs that are left, then the final rounding if it has not been."""
        history = History(self.folder, until_epoch=self.epoch if self.resumed else -1)
        log = EpochLog(self.folder if self.config.tensorboard else None)
        try:
            if not history.lines:
                self._record(history, log, {"train_loss": None, "prior_loss": None, "train_accuracy": None})
            while self.epoch < self.total_epochs:
                if self.epoch == self.config.epochs:
                    self._round()
                started = time.perf_counter()
                means = self._run_epoch(self.epoch + 1)
                self.epoch += 1
                self._compact_now_and_then()
                self.seconds += time.perf_counter() - started
                self._record(history, log, means)
            if self.prior is not None:
                self._round()
        except KeyboardInterrupt:
            if self.folder is None or not (self.folder / LAST).exists():
                raise
            raise Interrupted(str(self.folder), int(load_checkpoint(self.folder)["epoch"])) from None
        finally:
            log.close()
        return FitResult(history.lines, self.spectra, self.seconds)

    def _run_epoch(self, epoch: int) -> dict[str, Any]:
        """One pass over the training images; the mean losses and accuracy."""
        self.model.train()
        augment = None if self.augment is None else lambda x: self.augment(x, self.noise)  # type: ignore[misc]
        batches = self.train.batches(
            self.config.batch_size, shuffle=True, generator=self.order, device=self.device, augment=augment
        )
        sums = torch.zeros(3, device=self.device)  # data loss, prior loss, right answers, each times the batch size
        seen = 0
        for step, (x, y) in enumerate(batches, start=1):
            rate = self._set_rate(epoch - 1 + (step - 1) / self.steps_per_epoch)
            sums += self._step(x, y)
            seen += len(y)
            if step % LOOK_EVERY == 0 or step == self.steps_per_epoch:
                data, prior, right = (sums / seen).tolist()
                if not math.isfinite(data + prior):
                    raise self._diverged(epoch, step, data, prior, rate)
                self.progress.step(epoch, step, data, right, rate)
        return {"train_loss": data, "prior_loss": prior, "train_accuracy": right}

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of the optimiser, then of lambda."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            outputs = self.model(x)
        data = self.loss(outputs.float(), y)
        prior = self.prior.loss() if self.prior is not None else torch.zeros_like(data)
        (data + prior).backward()
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.prior is not None:
            self.prior.step()
        with torch.no_grad():
            right = (outputs.argmax(1) == y).float().mean() if outputs.ndim == 2 else torch.zeros_like(data)
            return torch.stack([data, prior, right]) * len(y)

    def _set_rate(self, epoch: float) -> float:
        if epoch < self.config.epochs:
            rate = learning_rate(self.config, epoch)
        else:
            rate = finetune_rate(self.config, epoch - self.config.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _compact_now_and_then(self) -> None:
        """Cut ranks during the search: training gets cheaper as they fall."""
        config, every = self.config, self.config.compact_every
        if self.prior is None or not every or self.epoch < config.compact_from or self.epoch % every:
            return
        bonds = self._bond_spectra()
        for row in compact_(self.model, config.compact_tol, "contribution", self.optimizer).layers:
            earlier = self.cut_earlier.setdefault(row.name, [[] for _ in bonds[row.name]])
            for known, values, rank in zip(earlier, bonds[row.name], row.ranks[1:-1], strict=True):
                known[:0] = [value / max(values[0], 1e-300) for value in values[rank:]]

    def _bond_spectra(self) -> dict[str, list[list[float]]]:
        return {
            name: [s.tolist() for s in tt.bond_spectra([core.detach().double() for core in layer.cores])]
            for name, layer in tt_layers(self.model).items()
        }

    def _round(self) -> None:
        """End of the search: the smallest ranks for the tolerance, no prior from here on, a fresh optimiser."""
        assert self.prior is not None
        bonds = self._bond_spectra()
        report = compact_(self.model, self.config.round_tol)
        self.spectra = {
            "tol": self.config.round_tol,
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
        self._end_search()

    def _end_search(self) -> None:
        assert self.prior is not None
        self.prior.remove_()
        self.prior = None
        self.optimizer = self._new_optimizer(self.config.finetune_lr)

    def _record(self, history: History, log: EpochLog, means: dict[str, Any]) -> None:
        """Write the epoch down, then the checkpoint that stands for it; never one that is broken."""
        if not all(bool(torch.isfinite(value).all()) for value in self.model.state_dict().values()):
            raise self._diverged(
                self.epoch, self.steps_per_epoch, math.nan, math.nan, self.optimizer.param_groups[0]["lr"]
            )
        validation = self.evaluate(self.model) if self.evaluate is not None else None
        lambdas = self.prior.lambdas() if self.prior is not None else {}
        line = {
            "epoch": self.epoch,
            "phase": "search" if self.prior is not None else "finetune",
            "seconds": round(self.seconds, 3),
            "lr": self.optimizer.param_groups[0]["lr"],
            "prior_weight": self.prior.current_weight if self.prior is not None else 0.0,
            **means,
            "validation": validation,
            "params": count_parameters(self.model),
            "ranks": {name: list(chain) for name, chain in ranks(self.model).items()},
            "lambdas": {name: [u.tolist() for u in bonds] for name, bonds in lambdas.items()},
        }
        history.append(line)
        log.write(line)
        if self.folder is not None:
            train_loss = math.inf if means["train_loss"] is None else float(means["train_loss"])
            score = validation["log_likelihood"] if validation else -train_loss
            better = score > self.best
            self.best = max(self.best, score)
            if better:
                save_checkpoint(self.folder, self.state(), BEST)
            if self.epoch % self.config.checkpoint_every == 0 or self.epoch in (self.config.epochs, self.total_epochs):
                save_checkpoint(self.folder, self.state())
        self.progress.epoch(line)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "format": 1,
            "epoch": self.epoch,
            "searching": self.prior is not None,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "prior": self.prior.state_dict() if self.prior is not None else None,
            "order": self.order.get_state(),
            "noise": self.noise.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "seconds": self.seconds,
            "best": self.best,
            "spectra": self.spectra,
            "cut_earlier": self.cut_earlier,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the moment `state` was made."""
        self.resumed = True
        if not state["searching"]:
            self._end_search()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.prior is not None:
            self.prior.load_state_dict(state["prior"])
        self.order.set_state(state["order"])
        self.noise.set_state(state["noise"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.epoch, self.seconds, self.best = state["epoch"], state["seconds"], state["best"]
        self.spectra, self.cut_earlier = state["spectra"], state["cut_earlier"]

    def _diverged(self, epoch: int, step: int, data: float, prior: float, rate: float) -> TrainingError:
        what = "the prior" if math.isfinite(data) else "the data loss or a weight"
        largest = max(tt_layers(self.model).items(), key=lambda item: _size(item[1]), default=("", None))
        where = f" The last good checkpoint is in {self.folder}." if self.folder is not None else ""
        return TrainingError(
            f"The loss is not finite at epoch {epoch}, step {step}: {what} is {prior if math.isfinite(data) else data} "
            f"at learning rate {rate:.3g}; the layer with the largest or broken cores is {largest[0]!r}.{where} "
            "Try a smaller fit.lr, fit.clip_norm=1, or a longer prior.warmup_epochs."
        )


def _size(layer: nn.Module) -> float:
    size = max(float(p.detach().abs().max()) for p in layer.parameters())
    return size if math.isfinite(size) else math.inf
