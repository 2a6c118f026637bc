"""What the loop trains, seen from the loop: one network, or all particles of a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.compact import CompactReport
from bayestrain.errors import ConfigError
from bayestrain.muon import Muon, muon_groups
from bayestrain.prior import NormalPrior, Prior, RankPrior
from bayestrain.train.config import FitConfig, PriorConfig

Spectra = dict[str, list[list[float]]]
"""Per layer and bond, singular values."""


def few_digits(values: Tensor) -> list[float]:
    """Five digits, enough for a plot, of numbers that are written every epoch, thousands for a deep network."""
    return [float(f"{value:.5g}") for value in values.tolist()]


class Subject(ABC):
    """Something that learns ranks while `searching`, then goes on with the ranks it found."""

    searching: bool

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; data loss, prior loss and the share of right answers, as a tensor of three.

        The tensor may be overwritten by the next step.
        """

    def arrange(self, x: Tensor) -> Tensor:
        """Inputs as `step` likes them best in memory."""
        return x

    @abstractmethod
    def set_rate(self, lr: float) -> None:
        """Set the learning rate."""

    @abstractmethod
    def cut(self, tol: float) -> CompactReport:
        """Cut ranks during training, keeping the optimiser's state."""

    @abstractmethod
    def cut_to(self, ratio: float) -> CompactReport:
        """Round during training, until the network is `ratio` times smaller than dense."""

    @abstractmethod
    def round(self, tol: float, ratio: float) -> CompactReport:
        """End of the search: the smallest ranks for the tolerance, no prior on ranks from then on.

        With a `ratio` other than 0, `cut_to` as well.
        """

    @property
    @abstractmethod
    def ratio(self) -> float:
        """How many times smaller than dense the network is."""

    @abstractmethod
    def change_for(self, ratio: float) -> float:
        """By how much, relatively, `cut_to` would change a weight, at most."""

    def check_target(self, config: FitConfig) -> None:
        """Refuse at the beginning a target that cannot be reached at the end."""
        if not self.searching or config.rule != "rounding":
            raise ConfigError(
                'fit.target_ratio needs a search for ranks and fit.rule "rounding": nothing else is rounded.'
            )
        if self.ratio >= config.target_ratio:
            raise ConfigError(
                f"fit.target_ratio {config.target_ratio:g} asks for nothing: the network is {self.ratio:.3g}x smaller "
                "than dense to begin with. Ask for more, or begin with a larger tensorize.max_rank; with --from, "
                "begin with a larger network."
            )
        try:
            self.change_for(config.target_ratio)
        except ConfigError as error:
            raise ConfigError(f"fit.target_ratio {config.target_ratio:g} is out of reach. {error}") from None

    @abstractmethod
    def spectra(self) -> Spectra:
        """Singular values of every bond, now."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Size, ranks, lambda and the prior's weight, for the history."""

    @abstractmethod
    def evaluated(self) -> Any:
        """What an `evaluate` function is called with."""

    @abstractmethod
    def mend(self) -> list[str]:
        """Called after each epoch: take out what is broken and say so; raise if nothing is left."""

    @abstractmethod
    def finish(self, inputs: Iterable[Tensor]) -> None:
        """After the last step, with batches of training inputs as they went in."""

    @abstractmethod
    def largest_layer(self) -> str:
        """The layer with the largest or broken cores, for an error message."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the moment `state` was made."""


def make_optimizer(
    config: FitConfig,
    named: Sequence[tuple[str, Tensor]],
    lr: float,
    *,
    model: nn.Module,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """The optimiser that the config names, for parameters of `model` or of particles of it.

    `capturable` is for one whose steps can be captured in a CUDA graph.
    Such a one is fused, for few kernels; of SGD's kinds it is the only one that reads the rate on the device.
    """
    rate: Tensor | float = lr
    fused = None
    if capturable:
        rate, fused = torch.tensor(lr, dtype=torch.float32, device=named[0][1].device), True
    if config.optimizer == "muon":
        return Muon(muon_groups(named, model), rate, weight_decay=config.weight_decay, capturable=capturable)
    if config.optimizer == "sgd":
        return torch.optim.SGD(named, rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(named, rate, weight_decay=config.weight_decay, capturable=capturable, fused=fused)


def make_prior(
    config: PriorConfig, model: nn.Module, num_data: int, steps_per_epoch: int, *, search: bool = True
) -> Prior:
    """The prior that the config describes; without a search for ranks it is the same Normal for every weight."""
    if not search:
        return NormalPrior(model, num_data, variance=config.other_variance, weight=config.weight)
    return RankPrior(
        model, num_data, a=config.a, b=config.b, weight=config.weight, update=config.update, floor=config.floor,
        warmup_steps=round(config.warmup_epochs * steps_per_epoch), other_variance=config.other_variance,
        align_every=config.align_every, hold_scale="auto" if config.hold_scale else (),
    )  # fmt: skip
