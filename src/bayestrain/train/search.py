"""The search for ranks: when they are cut, how far, and when the search is over."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bayestrain.errors import ConfigError
from bayestrain.nn import count_parameters, dense_parameters, factorized_weights
from bayestrain.train.config import FitConfig
from bayestrain.train.subject import Network

EMPTY = 1e-7  # parts of a weight that are relatively smaller are rounding errors; larger ones can grow again
ARRIVED = 0.8  # fraction of the search after which a network with a target size should have that size
SHRINK, PATIENCE = 0.8, 3
"""With a target accuracy: the size after a cut, and the cuts skipped before training returns to the last good size."""


class Search:
    """Cuts the ranks of what `fit` trains between epochs: to a tolerance, towards a size, or while it is accurate."""

    KEPT = ("ended", "start", "best", "missed")

    def __init__(self, subject: Network, config: FitConfig, notify: Callable[[str, Any], None]) -> None:
        self.subject, self.config, self.notify = subject, config, notify
        self.target, self.start = target_size(config, subject.template), self.parameters
        self.rule = None if config.rule == "auto" else config.rule
        self.ended: int | None = None  # the epoch of the final cut
        self.best: dict[str, Any] | None = None  # the state of the smallest network that had the target accuracy
        self.missed = 0  # cuts in a row that were skipped because the accuracy was too low

    @property
    def parameters(self) -> int:
        return count_parameters(self.subject.template)

    @property
    def running(self) -> bool:
        return self.config.search and self.ended is None

    def cut(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Before an epoch: cut the ranks if it is time, and end the search when it is over."""
        config, target, size = self.config, self.target, self.parameters
        every, last, floor = config.compact_every, epoch == config.epochs, config.target_accuracy
        if floor and "accuracy" not in metrics:
            raise ConfigError("fit.target_accuracy needs an accuracy among the metrics, as those of classification.")
        if not last and not (every and epoch >= max(config.first_cut, 1) and not epoch % every):
            return
        fewest, accurate = fewest_parameters(self.subject.template), not floor or metrics["accuracy"] >= floor
        before = copy.deepcopy(self.subject.state()) if config.targets and accurate else None
        self.missed = 0 if accurate else self.missed + 1
        if floor and accurate:
            self.best = before
        if last or (floor and accurate and size == fewest) or (self.best is not None and self.missed >= PATIENCE):
            self._end(epoch)
        elif accurate:
            report = self.subject.compact_(config.compact_tol, rule="contribution")
            if before is not None and self.parameters < target:
                self.subject.restore(before)  # empty ranks stay where the target has room for them
                return self._end(epoch)
            if config.targets:
                goal = wanted_parameters(config, epoch, self.start, target) if target else int(SHRINK * size)
                report = report.then(self.subject.compact_(rule=self.rule, parameters=max(goal, fewest)))
            self.notify("cut", report)
            if self.parameters <= target:
                self._end(epoch)

    def _end(self, epoch: int) -> None:
        """The final cut: the smallest ranks for the tolerance; with a target, those that lose least for it."""
        config, floor = self.config, f"validation accuracy {100 * self.config.target_accuracy:.4g} %"
        if self.best is not None:
            self.subject.restore(self.best)
            self.notify("message", f"the smallest network with {floor} has {self.parameters:,} parameters")
        elif config.target_accuracy:
            self.notify("message", f"no network had {floor}: only empty ranks were cut")
        tol = EMPTY if config.targets else config.round_tol
        first = self.subject.compact_(rule=self.rule, parameters=self.target) if self.target else None
        report = self.subject.compact_(tol, rule=self.rule)
        report = first.then(report) if first else report
        self.subject.end_search()
        self.ended, self.best = epoch, None
        self.notify("cut", report)
        if left := config.epochs - epoch:
            left += config.finetune_epochs
            self.notify("message", f"the search ended after {epoch} epochs; the other {left} are fine-tuning")
        for note in report.notes:
            self.notify("message", note)


def wanted_parameters(config: FitConfig, epoch: float, start: int, target: int) -> int:
    """The size after `epoch` epochs on the way to `target`: from the first cut on it shrinks by one factor an epoch."""
    length = max(ARRIVED * config.epochs - config.first_cut, 1.0)
    done = min(max((epoch - config.first_cut) / length, 0.0), 1.0)
    return target if done == 1 else math.floor(start * (target / start) ** done)


def target_size(config: FitConfig, model: nn.Module) -> int:
    """The number of parameters that the settings request; 0 if they request none."""
    ratio = config.target_ratio
    return max(int(dense_parameters(model) / ratio), 1) if ratio else config.target_parameters


def fewest_parameters(model: nn.Module) -> int:
    """Those of the network with every rank at 1."""
    weights = factorized_weights(model).values()
    saved = (w.numel - w.equation.entries(w.layout.sizes, [1] * len(w.ranks)) for w in weights)
    return count_parameters(model) - sum(saved)


def check_target(config: FitConfig, model: nn.Module) -> None:
    """Refuse a target size that the network has already, or that it cannot reach."""
    if not (target := target_size(config, model)):
        return
    asked = f"fit.{config.targets[0]} {getattr(config, config.targets[0]):g}"
    size, dense = count_parameters(model), dense_parameters(model)
    if size <= target:
        start = f"the network starts with {size:,} parameters, {dense / size:.3g}x fewer than dense"
        raise ConfigError(f"{asked} is reached already: {start}. Ask for less, or start with a larger max_rank.")
    if target < (fewest := fewest_parameters(model)):
        raise ConfigError(f"{asked} is out of reach: with every rank at 1 there are {fewest:,} parameters.")
