"""All particles of a posterior in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain import tt
from bayestrain.compact import CompactReport
from bayestrain.errors import ConfigError, TrainingError
from bayestrain.infer import diagnose
from bayestrain.posterior import Posterior, stacked_cores, stacked_log_lambdas
from bayestrain.posterior.compaction import sized_particles
from bayestrain.posterior.memory import Activations, held_bytes, optimizer_states, plan
from bayestrain.posterior.ranks import unstack
from bayestrain.prior import RankPrior
from bayestrain.sizes import tt_layers
from bayestrain.target import dense_parameters
from bayestrain.train.arithmetic import channels_last, lowered, products, wants_channels_last
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig
from bayestrain.train.subject import Spectra, Subject, few_digits, make_optimizer


def check_room(
    model: nn.Module, config: FitConfig, posterior: PosteriorConfig, device: torch.device, *, least: bool = False
) -> None:
    """Refuse more particles like `model` than the memory holds, before the first one is made.

    `least`: they may become larger than the model, so how many would fit cannot be said.
    """

    def optimizer(named: Sequence[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return make_optimizer(config, named, config.lr, model=model, capturable=device.type == "cuda")

    named = [(f"model.{name}", p) for name, p in model.named_parameters() if p.requires_grad]
    states = 1.0 if posterior.method == "sgld" else optimizer_states(optimizer, named, device)
    held = held_bytes([parameter for _, parameter in named], posterior.particles, states)
    try:
        plan(posterior.particles, held, 0, Activations(0, 0), device, posterior.chunk or None)
    except ConfigError:
        if not least:
            raise
        raise ConfigError(
            f"{posterior.particles} particles cannot fit into memory, whatever their ranks. Use fewer."
        ) from None


class ParticleSubject(Subject):
    """A posterior; ranks are sought as long as its prior is a `RankPrior`."""

    def __init__(self, posterior: Posterior, config: FitConfig, prior: PriorConfig, probe: Tensor) -> None:
        """`probe` is a batch of inputs, to see whether the particles' outputs are finite."""
        self.posterior, self.config, self.prior_config, self.probe = posterior, config, prior, probe
        self.channels_last = wants_channels_last(posterior.template, posterior.device)
        self.own_ranks: dict[str, list[list[int]]] = {}
        """What each particle alone would have been rounded to, just before all were."""
        self._infinite = {name for name, t in posterior.carried.items() if not bool(torch.isfinite(t).all())}
        """Buffers that are so by intention, as masks are."""

    @property
    def searching(self) -> bool:  # type: ignore[override]
        return isinstance(self.posterior.prior, RankPrior)

    def arrange(self, x: Tensor) -> Tensor:
        return channels_last(x) if self.channels_last and self.posterior.joint.alone else x  # vmap wants none

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        posterior = self.posterior
        precision = "float32" if posterior.prior.aligns_next else self.config.precision  # aligned cores are kept
        with products(precision, posterior.device), lowered(self.config.precision, posterior.device):
            seen = posterior.step(x, y)
        prior = posterior.prior.current_weight * seen.log_prior / posterior.num_data
        right = torch.zeros_like(prior)
        if seen.outputs.ndim == 3:
            right = (seen.outputs.argmax(2) == y).float().mean(1)
        rows = torch.stack([-seen.log_likelihood, -prior, right])  # (3, n)
        return torch.where(seen.alive, rows, 0.0).sum(1) / seen.alive.sum()

    def set_rate(self, lr: float) -> None:
        self.posterior.method.set_lr(lr)

    def cut(self, tol: float) -> CompactReport:
        return self.posterior.compact_(tol, "contribution")

    def cut_to(self, ratio: float) -> CompactReport:
        return self.posterior.compact_(parameters=self._parameters(ratio))

    def round(self, tol: float, ratio: float) -> CompactReport:
        if self.ratio < ratio:  # else all have been cut to one size on the way, and have no ranks of their own
            self.own_ranks = self.posterior.rank_spread(parameters=self._parameters(ratio))
        elif self.config.rule == "rounding" and not ratio:
            self.own_ranks = self.posterior.rank_spread(tol)
        first = self.cut_to(ratio) if ratio else None
        report = self.posterior.compact_(tol, self.config.rule)
        if first is not None:
            report = first.then(report)
        self.posterior.fix_ranks_(self.prior_config.other_variance, self.prior_config.weight)
        return report

    @property
    def ratio(self) -> float:
        return dense_parameters(self.posterior.template) / self.posterior.parameters_each

    def change_for(self, ratio: float) -> float:
        return sized_particles(self.posterior, self._parameters(ratio)).change

    def _parameters(self, ratio: float) -> int:
        return int(dense_parameters(self.posterior.template) / ratio)

    def spectra(self) -> Spectra:
        """The particles' mean of every singular value, each particle's relative to its largest one."""
        found: Spectra = {}
        for name, layer in tt_layers(self.posterior.template).items():
            each = [tt.bond_spectra(cores) for cores in unstack(stacked_cores(self.posterior, name, layer))]
            bonds = [torch.stack(bond) for bond in zip(*each, strict=True)]
            found[name] = [(bond / bond[:, :1].clamp_min(1e-300)).mean(0).tolist() for bond in bonds]
        return found

    def describe(self) -> dict[str, Any]:
        posterior = self.posterior
        lambdas: dict[str, list[list[float]]] = {}
        for name, layer in tt_layers(posterior.template).items() if self.searching else ():
            bonds = stacked_log_lambdas(posterior, name, layer)
            lambdas[name] = [few_digits(u.exp().sort(dim=1, descending=True).values.mean(0)) for u in bonds]
        return {
            "prior_weight": posterior.prior.current_weight,
            "params": posterior.parameters_each,
            "ranks": {name: list(chain) for name, chain in posterior.ranks.items()},
            "lambdas": lambdas,
            "particles": len(posterior),
            "diagnostics": asdict(diagnose(posterior.particles)),
        }

    def evaluated(self) -> Posterior:
        return self.posterior

    def mend(self) -> list[str]:
        posterior = self.posterior
        buffers = (tensor for name, tensor in posterior.carried.items() if name not in self._infinite)
        tensors = (*posterior.particles.values(), *buffers, posterior.outputs(self.probe))
        sane = torch.stack([tensor.detach().flatten(1).isfinite().all(1) for tensor in tensors if tensor.ndim > 1])
        broken = (~sane.all(0)).nonzero().flatten().tolist()
        if not broken:
            return []
        if len(posterior) - len(broken) < posterior.method.fewest:
            raise TrainingError(f"{len(broken)} of {len(posterior)} particles")
        posterior.drop_(broken)
        return [
            f"particles {broken} have weights or outputs that are not finite and were dropped; "
            f"{len(posterior)} are left"
        ]

    def finish(self, inputs: Iterable[Tensor]) -> None:
        """Batch norm's statistics anew, for the weights that the particles ended with."""
        self.posterior.refresh_statistics(inputs)

    def largest_layer(self) -> str:
        sizes = {name: float(t.detach().abs().max()) for name, t in self.posterior.particles.items()}
        return max(sizes, key=lambda name: sizes[name] if sizes[name] == sizes[name] else float("inf"))

    def state(self) -> dict[str, Any]:
        return {"searching": self.searching, "posterior": self.posterior.state_dict(), "own_ranks": self.own_ranks}

    def restore(self, state: dict[str, Any]) -> None:
        saved = len(next(iter(state["posterior"]["method"]["particles"].values())))
        if saved < len(self.posterior):  # some were dropped
            self.posterior.drop_(range(saved, len(self.posterior)))
        self.posterior.load_state_dict(state["posterior"])
        self.own_ranks = state["own_ranks"]
