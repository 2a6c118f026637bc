"""The search for ranks: when they are cut, how far, and when the search is over."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bayestrain.errors import ConfigError
from bayestrain.nn import count_parameters, dense_parameters, factorized_weights
from bayestrain.train.config import FitConfig, plain
from bayestrain.train.subject import Network

EMPTY = 1e-7
"""Parts of a weight that are relatively smaller are rounding errors; larger ones can grow again."""

SHRINK, PATIENCE = 0.8, 3
"""With a target accuracy: the size after a cut, and the cuts skipped before training returns to the last good size."""

ARRIVED = 0.8
"""Fraction of the search after which a network with a target size should have that size."""


class Search:
    """Cuts the ranks of what `fit` trains between epochs: to a tolerance, towards a size, or while it is accurate.

    Attributes:
        ended: the epoch of the final cut.
        spectra: what the bonds held just before the final cut.
    """

    KEPT = ("ended", "spectra", "start", "best", "missed")

    def __init__(self, subject: Network, config: FitConfig, notify: Callable[[str, Any], None]) -> None:
        self.subject, self.config, self.notify = subject, config, notify
        self.target = target_size(config, subject.template)
        self.rule = None if config.rule == "auto" else config.rule
        self.start = self.parameters
        self.ended: int | None = None
        self.spectra: dict[str, Any] = {}
        self.best: dict[str, Any] | None = None
        """With a target accuracy: the state of the smallest network so far that reached it."""
        self.missed = 0
        """Cuts in a row that were skipped because the accuracy was too low."""

    @property
    def parameters(self) -> int:
        """Of one network, now."""
        return count_parameters(self.subject.template)

    def cut(self, epoch: int, metrics: Mapping[str, float] | None) -> None:
        """Before an epoch: cut the ranks if it is time, and end the search when it is over."""
        config, target, size = self.config, self.target, self.parameters
        every, last, floor = config.compact_every, epoch == config.epochs, config.target_accuracy
        if floor and (metrics is None or "accuracy" not in metrics):
            raise ConfigError("fit.target_accuracy needs an accuracy among the metrics, as those of classification.")
        if not last and not (every and epoch and epoch >= config.first_cut and not epoch % every):
            return
        fewest = fewest_parameters(self.subject.template)
        accurate = not floor or (metrics or {})["accuracy"] >= floor
        before = copy.deepcopy(self.subject.state()) if config.targets and accurate else None
        self.missed = 0 if accurate else self.missed + 1
        if floor and accurate:
            self.best = before
        if last or (floor and accurate and size == fewest) or (self.best is not None and self.missed >= PATIENCE):
            self._end(epoch)
        elif accurate:
            report = self.subject.compact_(config.compact_tol, rule="contribution")
            if target is not None and before is not None and self.parameters < target:
                self.subject.restore(before)  # empty ranks stay where the target has room for them
                self._end(epoch)
                return
            if config.targets:
                goal = max(int(SHRINK * size), fewest)
                goal = goal if target is None else wanted_parameters(config, epoch, self.start, target)
                report = report.then(self.subject.compact_(rule=self.rule, parameters=goal))
            self.notify("cut", report)
            if target is not None and self.parameters <= target:
                self._end(epoch)

    def _end(self, epoch: int) -> None:
        """The final cut: the smallest ranks for the tolerance; with a target, those that lose least for it."""
        config, target, messages, first = self.config, self.target, [], None
        if config.target_accuracy:
            floor = f"validation accuracy {100 * config.target_accuracy:.4g} %"
            if self.best is None:
                messages.append(f"no network had {floor}: only empty ranks were cut")
            else:
                self.subject.restore(self.best)
                messages.append(f"the smallest network with {floor} has {self.parameters:,} parameters")
        tol = EMPTY if config.targets else config.round_tol
        if target is not None:
            first = self.subject.compact_(rule=self.rule, parameters=target)
        report = self.subject.compact_(tol, rule=self.rule)
        report = report if first is None else first.then(report)
        kept = {row.name: {"bonds": plain(row.spectra), "kept": list(row.ranks)} for row in report.layers}
        self.spectra = {"tol": tol, "layers": {name: about for name, about in kept.items() if about["bonds"]}}
        self.subject.end_search()
        self.ended, self.best = epoch, None
        if epoch < config.epochs:
            left = config.epochs + config.finetune_epochs - epoch
            messages.append(f"the search ended after {epoch} epochs; the other {left} are fine-tuning")
        self.notify("cut", report)
        for text in (*messages, *report.notes):
            self.notify("message", text)


def wanted_parameters(config: FitConfig, epoch: float, start: int, target: int) -> int:
    """The parameters that a network on its way to `target` should have after `epoch` epochs.

    From the `start` at the first cut they shrink by the same factor each epoch and reach the target when most of the
    search is over.
    """
    last = ARRIVED * config.epochs
    done = min(max((epoch - config.first_cut) / max(last - config.first_cut, 1.0), 0.0), 1.0)
    return target if done == 1 else math.floor(start * (target / start) ** done)


def target_size(config: FitConfig, model: nn.Module) -> int | None:
    """The number of parameters that the settings request, if they request a size."""
    return (
        int(dense_parameters(model) / config.target_ratio) if config.target_ratio else config.target_parameters or None
    )


def fewest_parameters(model: nn.Module) -> int:
    """Those of the network with every rank at 1."""
    weights, size = factorized_weights(model).values(), count_parameters(model)
    shapes = [shape for w in weights for shape in w.equation.shapes(w.layout.sizes, [1] * len(w.ranks))]
    return size - sum(w.numel for w in weights) + sum(map(math.prod, shapes))


def check_target(config: FitConfig, model: nn.Module) -> None:
    """Refuse a target size that the network has already, or that it cannot reach."""
    if (target := target_size(config, model)) is None:
        return
    dense, size = dense_parameters(model), count_parameters(model)
    asked = f"fit.{config.targets[0]} {getattr(config, config.targets[0]):g}"
    if size <= target:
        raise ConfigError(
            f"{asked} is reached already: the network has {size:,} parameters to start with, {dense / size:.3g}x fewer "
            "than dense. Ask for a smaller network, or start with a larger max_rank."
        )
    if target < (fewest := fewest_parameters(model)):
        raise ConfigError(f"{asked} is out of reach: with every rank at 1 there are {fewest:,} parameters.")
