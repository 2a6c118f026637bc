"""What `fit` trains: one network, or all particles of a posterior. The loop treats both alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.compact import CompactReport, compact_
from bayestrain.errors import TrainingError
from bayestrain.infer import diagnose, imq
from bayestrain.infer.method import load_optimizer
from bayestrain.nn.evaluation import evaluating
from bayestrain.nn.fast import fast
from bayestrain.posterior import Likelihood, ParticleModel, Posterior
from bayestrain.posterior.likelihoods import one_tensor
from bayestrain.prior import NormalPrior, RankPrior, check_weight_decay
from bayestrain.train.batches import Batches, apply
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig
from bayestrain.train.muon import Muon, muon_groups

Batch = tuple[Any, Tensor]
Named = Sequence[tuple[str, Tensor]]

MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
"""Takes (name, parameter) pairs, as every torch optimiser does."""

MakePrior = Callable[[nn.Module], NormalPrior | None]


class Network:
    """One network with its likelihood, prior and optimiser: a step, cuts, checks, metrics and a state.

    What the loop reads is stacked, with one entry per particle, so that `Particles` changes little. Fine-tuning has no
    prior where ranks were pruned.
    """

    posterior: Posterior | None = None
    fewest = 1
    """Particles that must be left."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, config: FitConfig, make_prior: MakePrior,
        make: MakeOptimizer | None = None,
    ) -> None:  # fmt: skip
        self.template, self.likelihood, self.make = model, likelihood, make
        self._watch(config, next((p.device for p in model.parameters()), torch.device("cpu")))
        self.prior = make_prior(model)
        self.optimizer = self._new_optimizer()
        if isinstance(self.prior, RankPrior) and not config.decay_cores:
            check_weight_decay(self.optimizer, model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        perf = fast() if self.device.type == "cuda" and not self.scaler.is_enabled() else None
        self.capture = None if perf is None else perf.Capture()
        self._weight = torch.zeros((), device=self.device)
        """The prior's weight, where a captured step reads it."""

    def _watch(self, config: FitConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.alive = torch.zeros(self.number, dtype=torch.bool, device=device)
        """The particles whose density and gradient were finite in any step since the last `repair`."""

    @property
    def number(self) -> int:
        """Particles."""
        return 1

    def parameters(self) -> dict[str, Tensor]:
        """By name, stacked: ``(n, ...)``."""
        return {name: p.detach()[None] for name, p in self.template.named_parameters()}

    def _named(self) -> list[tuple[str, Tensor]]:
        likelihood = [(f"likelihood.{name}", p) for name, p in self.likelihood.named_parameters()]
        return [(name, p) for name, p in (*self.template.named_parameters(), *likelihood) if p.requires_grad]

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.config, self._named(), self.template, self.device, self.make)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One step: likelihood loss, prior loss and accuracy (NaN without classes); the next one may overwrite them."""
        (x, y), prior = batches[0], self.prior
        if self.capture is None or len(batches) > 1 or not isinstance(x, Tensor):
            return self._advance(batches, None)
        weight = None if prior is None else self._weight.fill_(prior.current_weight)
        found = self.capture.step(lambda x, y: (self._advance([(x, y)], weight),), x, y, prior, self.optimizer)
        return found[0]  # type: ignore[no-any-return]

    def _advance(self, batches: Sequence[Batch], weight: Tensor | None) -> Tensor:
        """A step of the README's loop. Nothing here depends on values on the device, so a CUDA graph can replay it."""
        self.template.train()
        total, seen, prior_loss = sum(len(y) for _, y in batches), [], torch.zeros((), device=self.device)
        with products(self.config.precision, self.device):
            for i, (x, y) in enumerate(batches, start=1):
                with lowered(self.config.precision, self.device):
                    outputs = one_tensor(self.template(arranged(x)))
                share = len(y) / total
                loss = data = -self.likelihood.log_prob(outputs, y).mean() * share
                if i == len(batches) and self.prior is not None:
                    prior_loss = self.prior.loss(weight)
                    loss = data + prior_loss
                self.scaler.scale(loss).backward()
                seen.append(torch.stack([data.detach(), accuracy(outputs.detach(), y).to(data) * share]))
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([p for _, p in self._named()], self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.prior is not None:
            self.prior.step()
        data, right = torch.stack(seen).sum(0)
        return torch.stack([data, prior_loss.detach().to(data), right])

    def compact_(self, tol: float | None = None, **options: Any) -> CompactReport:
        """Cut ranks, as `bayestrain.compact_` does."""
        report = compact_(self.template, tol, optimizer=self.optimizer, **options)
        self._forget()
        return report

    def end_search(self) -> None:
        """Keep the ranks from now on: lambda is removed, and the optimiser starts without moments."""
        if self.prior is not None:
            self.prior.remove_()
        self.prior, self.optimizer = None, self._new_optimizer()
        self._forget()

    def _forget(self) -> None:
        if self.capture is not None:
            self.capture.forget()

    def finish(self, inputs: Iterable[Any]) -> None:
        """After the last step, with some training inputs."""

    def repair(self) -> list[str]:
        """Drop particles that are not finite, and say so; raise if too few are left."""
        exact = {name: p.to(torch.promote_types(p.dtype, torch.float32)) for name, p in self.parameters().items()}
        sums = {name: p.square().unsqueeze(-1).flatten(1).sum(1) for name, p in exact.items()}  # as the prior has them
        sane = torch.stack(list(sums.values())).isfinite().all(0) & (self.alive | ~self.alive.any())
        broken = (~sane).nonzero().flatten().tolist()
        self.alive.zero_()
        if not broken:
            return []
        if self.number - len(broken) < self.fewest:
            where = f" in {len(broken)} of {self.number} particles" if self.number > 1 else ""
            raise TrainingError(f"weights have values that are not finite{where}")
        self.drop(broken)
        return [f"particles {broken} have values that are not finite and were dropped; {self.number} are left"]

    def drop(self, particles: list[int]) -> None:
        """Continue without some particles."""

    def largest(self) -> str:
        """The name of the parameter with the largest or broken values."""
        sizes = {name: float(p.abs().max()) for name, p in self.parameters().items() if p.numel()}
        return max(sizes, key=lambda name: sizes[name] if math.isfinite(sizes[name]) else math.inf, default="")

    def measure(self, batches: Batches) -> dict[str, float]:
        """The metrics of the predictions; for a likelihood that is a function, the log likelihood of the data."""
        model = self.posterior or self.template
        if can_predict(self.likelihood):
            prediction, targets = predict(model, self.likelihood, batches, self.config.precision)
            found: dict[str, float] = prediction.metrics(targets)
            return {key: value for key, value in found.items() if self.posterior or key != "mean_log_likelihood"}
        parts = []
        with evaluating(self.template), torch.no_grad():
            for x, y in batches:
                outputs = self.posterior.outputs(x) if self.posterior else self.template(arranged(x))[None]
                each = torch.stack([self.likelihood.log_prob(one, y).double() for one in outputs])
                parts.append(each.logsumexp(0) - math.log(self.number))
        return {"log_likelihood": float(torch.cat(parts).mean())}

    def describe(self) -> dict[str, Any]:
        """Further entries for the history."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        parts = ("template", "likelihood", "optimizer", "scaler", "prior")
        return {name: getattr(self, name).state_dict() for name in parts if getattr(self, name) is not None}

    def restore(self, state: dict[str, Any]) -> None:
        """Return to a state."""
        self.template.load_state_dict(state["template"])
        self.likelihood.load_state_dict(state["likelihood"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.prior is not None:
            self.prior.load_state_dict(state["prior"])
        self._forget()


class Particles(Network):
    """All particles of a posterior. Fine-tuning has fixed ranks and a Normal prior."""

    posterior: Posterior

    def __init__(
        self, models: Sequence[nn.Module], likelihood: Likelihood, config: FitConfig, make_prior: Any,
        make: MakeOptimizer | None, num_data: int, settings: PriorConfig, how: PosteriorConfig, seed: int,
    ) -> None:  # fmt: skip
        device = next(p.device for p in models[0].parameters())
        options: dict[str, Any] = {"clip": config.clip_norm or None, "chunk": how.chunk or None}
        if how.method == "sgld":
            options |= {"lr": config.lr, "memory": 0.99, "seed": seed}
        else:
            options["optimizer"] = lambda named: make_optimizer(config, named, models[0], device, make)
        if how.temperature != 1.0:
            options["temperature"] = how.temperature
        if how.kernel == "imq":
            options["kernel"] = imq
        self.posterior = Posterior(
            models, num_data, likelihood=likelihood, method=how.method, prior=make_prior, **options
        )
        self.template, self.likelihood, self.settings = self.posterior.template, self.posterior.likelihood, settings
        self.fewest = self.posterior.method.fewest
        self._watch(config, device)

    @property
    def number(self) -> int:
        return len(self.posterior)

    @property
    def prior(self) -> NormalPrior:  # type: ignore[override]
        return self.posterior.prior

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return self.posterior.method.optimizer

    def parameters(self) -> dict[str, Tensor]:
        return {name.removeprefix("model."): p.detach() for name, p in self.posterior.particles.items()}

    def step(self, batches: Sequence[Batch]) -> Tensor:
        ((x, y),) = batches
        with products(self.config.precision, self.device), lowered(self.config.precision, self.device):
            seen = self.posterior.step(x, y)
        prior = self.prior.current_weight * seen.log_prior / self.posterior.num_data
        right = torch.stack([accuracy(outputs, y) for outputs in seen.outputs]).to(prior)
        self.alive |= seen.alive
        rows = torch.stack([-seen.log_likelihood, -prior, right])  # (3, n)
        return torch.where(seen.alive, rows, 0.0).sum(1) / seen.alive.sum()

    def compact_(self, tol: float | None = None, **options: Any) -> CompactReport:
        return self.posterior.compact_(tol, **options)

    def end_search(self) -> None:
        self.posterior.fix_ranks_(self.settings.other_variance, self.settings.weight)

    def finish(self, inputs: Iterable[Any]) -> None:
        """Estimate batch norm's statistics for the weights that the particles ended with."""
        self.posterior.refresh_statistics(inputs)

    def drop(self, particles: list[int]) -> None:
        self.posterior.drop_(particles)
        self.alive = self.alive.new_zeros(self.number)

    def describe(self) -> dict[str, Any]:
        return {"particles": self.number, "diagnostics": vars(diagnose(self.posterior.particles))}

    def state(self) -> dict[str, Any]:
        return {"posterior": self.posterior.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        saved = len(state["posterior"]["method"]["broken"])
        if saved < self.number:  # some were dropped
            self.drop(list(range(saved, self.number)))
        self.posterior.load_state_dict(state["posterior"])


# --- what subjects are made of ----------------------------------------------------------------------------------------


def make_optimizer(
    config: FitConfig, named: Named, model: nn.Module, device: torch.device, make: MakeOptimizer | None
) -> torch.optim.Optimizer:
    """The optimiser that the config names, or one of the user's, for parameters of `model` or of particles of it.

    On a GPU the steps of a named one can be captured in a CUDA graph.
    """
    if make is not None:
        return make(named)
    captured, groups = device.type == "cuda", muon_groups(named, model, decay_cores=config.decay_cores)
    options: dict[str, Any] = {"lr": torch.tensor(config.lr, device=device) if captured else config.lr}
    options |= {"weight_decay": config.weight_decay, "fused": captured or None}
    if config.optimizer == "muon":
        return Muon(groups, capturable=captured, **options)
    groups = [{key: group[key] for key in group if key not in ("orthogonal", "stacked")} for group in groups]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, **options)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, capturable=captured, **options)


def make_prior(
    settings: PriorConfig | None, config: FitConfig, num_data: int, steps: int, search: bool, model: nn.Module
) -> NormalPrior | None:
    """The prior that the settings describe; without a search for ranks it is the same Normal for all parameters."""
    if settings is None:
        return None
    if not search:
        return NormalPrior(model, num_data, variance=settings.other_variance, weight=settings.weight)
    warmup = config.epochs / 4 if settings.warmup_epochs < 0 else settings.warmup_epochs
    return RankPrior(
        model, num_data, a=settings.a, b=settings.b, weight=settings.weight, warmup_steps=round(warmup * steps),
        update=settings.update, floor=settings.floor, other_variance=settings.other_variance,
        hold_scale="auto" if settings.hold_scale else (), align_every=settings.align_every,
    )  # fmt: skip


def predict(
    model: nn.Module | ParticleModel, likelihood: Likelihood, batches: Batches, precision: str = "float32"
) -> tuple[Any, Tensor]:
    """The prediction for all batches, on the CPU, and their targets."""
    parts: list[Any] = []
    targets = []
    with nullcontext() if isinstance(model, ParticleModel) else evaluating(model), torch.no_grad():
        for x, y in batches:
            targets.append(y.cpu())
            if isinstance(model, ParticleModel):
                parts.append(model.predict(x))
                continue
            with lowered(precision, batches.device):
                outputs = one_tensor(model(arranged(x)))
            described = {name: found.cpu()[None] for name, found in likelihood.describe(outputs).items()}
            parts.append(likelihood.prediction(described))
    return type(parts[0]).cat(parts), torch.cat(targets)


def can_predict(likelihood: Likelihood) -> bool:
    """Whether the likelihood says what to predict; a plain function does not."""
    return type(likelihood).prediction is not Likelihood.prediction


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """The share of correct classes, or NaN if the targets are not classes."""
    if outputs.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
        return (outputs.argmax(1) == y).float().mean()
    return torch.full((), torch.nan, device=outputs.device)


def lowered(precision: str, device: torch.device) -> torch.autocast:
    """Autocast for bf16 and fp16; without its cache on a GPU, where a captured step would use stale weights."""
    dtype, on = torch.float16 if precision == "fp16" else torch.bfloat16, precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype, enabled=on, cache_enabled=device.type != "cuda")


@contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Compute float32 matrix products in TF32, if requested."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if precision == "tf32" and device.type == "cuda":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def arranged(x: Any) -> Any:
    """Images channels last in memory on a GPU, where convolutions are faster on them."""
    last = torch.channels_last
    return apply(x, lambda t: t.contiguous(memory_format=last) if t.is_cuda and t.ndim == 4 else t)
