"""The search for ranks in other people's loops: what the callbacks for Lightning and for `transformers` share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bayestrain.compact import CompactReport, restart_average_
from bayestrain.errors import ConfigError
from bayestrain.nn import factorized_weights, ranks
from bayestrain.prior import NormalPrior, check_weight_decay
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig, nearest
from bayestrain.train.distributed import World
from bayestrain.train.search import Search
from bayestrain.train.subject import Network, Setup

# The settings of `FitConfig` that concern the search:
SETTINGS = ("compact_every", "compact_from", "compact_tol", "rule", "round_tol", "target_ratio", "target_parameters")


class Guest(Network):
    """A network in a loop that is not ours, with the optimiser of that loop."""

    kept = ("template", "optimizer", "prior")

    def __init__(self, model: nn.Module, optimizer: Any, prior: NormalPrior | None, world: World) -> None:
        self.template, self.optimizer, self.prior, self.capture, self.world = model, optimizer, prior, None, world

    def _forget(self) -> None:
        pass  # the loop's wrapper is the callback's to renew


class RankSearch:
    """The prior's loss and step, the cuts and the final cut, for a loop that says where it is.

    Lambda is in the network's ``state_dict``, so any checkpoint resumes; one without it is from after the search.
    """

    def __init__(
        self, num_data: int, *, epochs: int, prior: PriorConfig | None = None, averages: Sequence[nn.Module] = (),
        notify: Callable[[CompactReport], None] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        if unknown := [name for name in settings if name not in SETTINGS]:
            hint = nearest(unknown[0], SETTINGS)
            raise ConfigError(f"The search has no setting {unknown[0]!r}.{hint} It has {', '.join(SETTINGS)}.")
        self.num_data, self.config, self.prior = num_data, FitConfig(epochs=epochs, **settings), prior or PriorConfig()
        self.averages, self.told = list(averages), lambda what, report: what == "cut" and notify and notify(report)
        self.search: Search | None = None

    def start(self, model: nn.Module, optimizers: Sequence[Any], steps: int, steps_per_epoch: float) -> None:
        """Before the first step of a run, of which `steps` were taken before it was interrupted."""
        self.model, weights = model, factorized_weights(model).values()
        if steps and all(weight.rank_state is None for weight in weights):
            return
        if not math.isfinite(steps_per_epoch):
            raise ConfigError("The length of an epoch must be known. Use data with a length, or limit the batches.")
        cores = {core for weight in weights for core in weight.cores}
        plain = [getattr(each, "optimizer", each) for each in optimizers]  # without Accelerate's wrapper
        held = [each for each in plain if cores & {p for group in each.param_groups for p in group["params"]}]
        if len(held) != 1:
            raise ConfigError(f"One optimiser must hold the cores of all factorised weights, {len(held)} do.")
        world = World(next(iter(cores)).device, alone=True)  # the loop's own processes all do the same
        setup = Setup(self.config, self.prior, PosteriorConfig(), self.num_data, round(steps_per_epoch), world)
        prior = setup.make_prior(model)
        check_weight_decay(held[0], model)
        self.search = Search(Guest(model, held[0], prior, world), self.config, self.told)
        if prior is not None:
            prior.steps = steps
        for weight in weights:  # a target is approached from the size of the start
            start = weight.equation.entries(weight.layout.sizes, weight.attach_rank_state().start)
            self.search.start += start - weight.numel

    @property
    def running(self) -> NormalPrior | None:
        """The prior, until the final cut."""
        return self.search.subject.prior if self.search is not None else None

    def epoch(self, epoch: int) -> bool:
        """Before each epoch: cut if it is time; whether ranks fell."""
        before = ranks(self.model)
        if self.search is not None and self.search.running:
            self.search.cut(epoch, {})
            self._restart_averages()
        return before != ranks(self.model)

    def finish(self) -> None:
        """After training: the final cut, if it is still to come."""
        self.epoch(self.config.epochs)
        for weight in factorized_weights(self.model).values():
            weight.rank_state = None  # perhaps loaded with the best checkpoint

    def before_step(self) -> None:
        """After the last backward pass: add the gradient of the prior's loss, which is thus there once per step."""
        if self.running is not None:
            own = [p for p in self.model.parameters() if p.requires_grad]
            found = torch.autograd.grad(self.running.loss(), own, allow_unused=True)
            for p, gradient in zip(own, found, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def after_step(self) -> None:
        if (prior := self.running) is not None:
            aligned = prior.aligns_next
            prior.step()
            if aligned:
                self._restart_averages()

    def _restart_averages(self) -> None:
        for averaged in self.averages:
            restart_average_(averaged, self.model)
