"""What `fit` trains: one network, or all particles of a posterior. The loop treats both alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.compact import CompactReport, compact_, rank_spread
from bayestrain.compact.subject import Subject as Stacked
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


class Network:
    """One network with its likelihood, prior and optimiser. Fine-tuning has no prior where ranks were pruned."""

    number = 1

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, config: FitConfig, prior: PriorConfig | bool, num_data: int,
        steps: int, make: MakeOptimizer | None, search: bool,
    ) -> None:  # fmt: skip
        self.template, self.likelihood, self.config, self.make = model, likelihood, config, make
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.prior = (
            make_prior(prior, config, model, num_data, steps, search) if isinstance(prior, PriorConfig) else None
        )
        self.optimizer = self._new_optimizer()
        if search and not config.decay_cores:
            check_weight_decay(self.optimizer, model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        perf = fast() if self.device.type == "cuda" and not self.scaler.is_enabled() else None
        self.capture = None if perf is None else perf.capture()
        self._weight = torch.zeros((), device=self.device)
        """The prior's weight, where a captured step reads it."""
        self._ignored = {name for name, buffer in model.named_buffers() if not _finite(buffer)}

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
        """The loop of the README. Nothing here depends on a value on the device, so a CUDA graph can replay it."""
        self.template.train()
        total, parts, prior_loss = sum(len(y) for _, y in batches), [], torch.zeros((), device=self.device)
        with products(self.config.precision, self.device):
            for i, (x, y) in enumerate(batches, start=1):
                with lowered(self.config.precision, self.device):
                    outputs = one_tensor(self.template(arranged(x)))
                data = -self.likelihood.log_prob(outputs, y).mean() * (len(y) / total)
                loss = data
                if i == len(batches) and self.prior is not None:
                    prior_loss = self.prior.loss(weight)
                    loss = data + prior_loss
                self.scaler.scale(loss).backward()
                parts.append(torch.stack([data.detach(), accuracy(outputs.detach(), y).to(data) * (len(y) / total)]))
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_([p for _, p in self._named()], self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.prior is not None:
            self.prior.step()
        data, right = torch.stack(parts).sum(0)
        return torch.stack([data, prior_loss.detach().to(data), right])

    def compact_(
        self, tol: float | None = None, *, rule: str | None = None, parameters: int | None = None
    ) -> CompactReport:
        """Cut ranks, as `bayestrain.compact_` does."""
        report = compact_(self.template, tol, rule=rule, parameters=parameters, optimizer=self.optimizer)
        self._forget()
        return report

    def end_search(self) -> None:
        """Keep the ranks from now on: no lambda any more, and a new optimiser."""
        if self.prior is not None:
            self.prior.remove_()
        self.prior, self.optimizer = None, self._new_optimizer()
        self._forget()

    def _forget(self) -> None:
        if self.capture is not None:
            self.capture.forget()

    def repair(self) -> list[str]:
        """Drop what is not finite and say so; raise if nothing is left."""
        exact = {
            n: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for n, p in self.template.named_parameters()
        }
        tensors = {name: p.square().sum() for name, p in exact.items()}  # the prior has squares, which may overflow
        tensors |= {name: b for name, b in self.template.named_buffers() if name not in self._ignored}
        if broken := [name for name, tensor in tensors.items() if not _finite(tensor)]:
            raise TrainingError(f"{broken[0]!r} has values that are not finite")
        return []

    def measure(self, batches: Batches) -> dict[str, float]:
        """The metrics of the predictions."""
        if can_predict(self.likelihood):
            prediction, targets = predict(self.template, self.likelihood, batches, self.config.precision)
            return {key: value for key, value in prediction.metrics(targets).items() if key != "mean_log_likelihood"}
        with evaluating(self.template), torch.no_grad():
            parts = [self.likelihood.log_prob(self.template(arranged(x)), y) for x, y in batches]
        return {"log_likelihood": float(torch.cat(parts).double().mean())}

    def lambdas(self) -> dict[str, list[Tensor]]:
        """Of every layer and bond."""
        return {} if self.prior is None else self.prior.lambdas()

    def rank_spread(self, *_: Any) -> dict[str, list[list[int]]]:
        """The ranks that each of several particles alone would be cut to."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What only a posterior has to say in the history."""
        return {}

    def largest(self) -> str:
        """The parameter with the largest or broken values."""
        return _largest(self.template.named_parameters())

    def finish(self, inputs: Iterable[Any]) -> None:
        """After the last step: running statistics of batch norm stay as training left them."""

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


class Particles:
    """All particles of a posterior; methods as in `Network`. Fine-tuning has fixed ranks and a Normal prior."""

    def __init__(
        self, models: Sequence[nn.Module], likelihood: Likelihood, config: FitConfig, prior: PriorConfig, num_data: int,
        steps: int, make: MakeOptimizer | None, search: bool, how: PosteriorConfig, seed: int,
    ) -> None:  # fmt: skip
        self.config, self.settings = config, prior
        options: dict[str, Any] = {"clip": config.clip_norm or None, "chunk": how.chunk or None}
        device = next(p.device for p in models[0].parameters())
        if how.method == "sgld":
            options |= {"lr": config.lr, "temperature": how.temperature, "memory": 0.99, "seed": seed}
        else:
            options["optimizer"] = lambda named: make_optimizer(config, named, models[0], device, make)
        if how.kernel == "imq":
            options["kernel"] = imq
        self.posterior = posterior = Posterior(
            models, num_data, likelihood=likelihood, method=how.method,
            prior=lambda model: make_prior(prior, config, model, num_data, steps, search), **options,
        )  # fmt: skip
        self.template, self.likelihood = posterior.template, posterior.likelihood
        self._ignored = {name for name, tensor in posterior.carried.items() if not _finite(tensor)}
        self._alive = torch.zeros(len(posterior), dtype=torch.bool, device=device)
        """Whose density and gradient were finite in any step since the last `repair`."""

    @property
    def number(self) -> int:
        return len(self.posterior)

    @property
    def prior(self) -> NormalPrior:
        return self.posterior.prior

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.posterior.method.optimizer

    def step(self, batches: Sequence[Batch]) -> Tensor:
        ((x, y),) = batches
        posterior, device = self.posterior, self.posterior.device
        with products(self.config.precision, device), lowered(self.config.precision, device):
            seen = posterior.step(x, y)
        prior = posterior.prior.current_weight * seen.log_prior / posterior.num_data
        right = torch.stack([accuracy(outputs, y) for outputs in seen.outputs]).to(prior)
        self._alive |= seen.alive
        rows = torch.stack([-seen.log_likelihood, -prior, right])  # (3, n)
        return torch.where(seen.alive, rows, 0.0).sum(1) / seen.alive.sum()

    def compact_(
        self, tol: float | None = None, *, rule: str | None = None, parameters: int | None = None
    ) -> CompactReport:
        return self.posterior.compact_(tol, rule=rule, parameters=parameters)

    def end_search(self) -> None:
        self.posterior.fix_ranks_(self.settings.other_variance, self.settings.weight)

    def repair(self) -> list[str]:
        posterior = self.posterior
        tensors = {**posterior.particles, **posterior.carried}
        checked = [t.detach() for name, t in tensors.items() if name not in self._ignored and t.ndim > 1]
        sane = torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in checked]).all(0)
        broken = (~(sane & (self._alive | ~self._alive.any()))).nonzero().flatten().tolist()
        self._alive.zero_()
        if not broken:
            return []
        if len(posterior) - len(broken) < posterior.method.fewest:
            raise TrainingError(f"{len(broken)} of {len(posterior)} particles have values that are not finite")
        self._drop(broken)
        return [f"particles {broken} have values that are not finite and were dropped; {len(posterior)} are left"]

    def _drop(self, particles: Iterable[int]) -> None:
        self.posterior.drop_(list(particles))
        self._alive = self._alive.new_zeros(len(self.posterior))

    def measure(self, batches: Batches) -> dict[str, float]:
        if not can_predict(self.likelihood):
            return {}
        prediction, targets = predict(self.posterior, self.likelihood, batches)
        return prediction.metrics(targets)  # type: ignore[no-any-return]

    def lambdas(self) -> dict[str, list[Tensor]]:
        """The mean over particles, sorted in each, because an index means something else in each."""
        if not isinstance(self.prior, RankPrior):
            return {}
        stacked = Stacked(self.posterior)
        return {
            name: [u.exp().sort(dim=1, descending=True).values.mean(0) for u in stacked.log_lambdas(name)]
            for name in stacked.weights
        }

    def rank_spread(self, tol: float | None, parameters: int | None, rule: str | None) -> dict[str, list[list[int]]]:
        return {} if rule == "lambda" else rank_spread(self.posterior, tol, parameters=parameters, rule=rule)

    def describe(self) -> dict[str, Any]:
        return {"particles": len(self.posterior), "diagnostics": vars(diagnose(self.posterior.particles))}

    def largest(self) -> str:
        return _largest((name.removeprefix("model."), p) for name, p in self.posterior.particles.items())

    def finish(self, inputs: Iterable[Any]) -> None:
        """After the last step: estimate batch norm's statistics for the weights that the particles ended with."""
        self.posterior.refresh_statistics(inputs)

    def state(self) -> dict[str, Any]:
        return {"posterior": self.posterior.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        saved = len(state["posterior"]["method"]["broken"])
        if saved < len(self.posterior):  # some were dropped
            self._drop(range(saved, len(self.posterior)))
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
    settings: PriorConfig, config: FitConfig, model: nn.Module, num_data: int, steps: int, search: bool
) -> NormalPrior:
    """The prior that the settings describe; without a search for ranks it is the same Normal for all parameters."""
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
    targets, several = [], isinstance(model, ParticleModel)
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext(), torch.no_grad():
        for x, y in batches:
            targets.append(y.cpu())
            if isinstance(model, ParticleModel):
                parts.append(model.predict(x))
            else:
                with lowered(precision, batches.device):
                    outputs = one_tensor(model(arranged(x)))
                parts.append({name: found.cpu()[None] for name, found in likelihood.describe(outputs).items()})
    if several:
        return type(parts[0]).cat(parts), torch.cat(targets)
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    return likelihood.prediction(joined), torch.cat(targets)


def can_predict(likelihood: Likelihood) -> bool:
    """Whether the likelihood says what to predict; a plain function does not."""
    return not hasattr(likelihood, "function")


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """The share of right classes, or NaN if the targets are no classes."""
    if outputs.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
        return (outputs.argmax(1) == y).float().mean()
    return torch.full((), torch.nan, device=outputs.device)


def lowered(precision: str, device: torch.device) -> torch.autocast:
    """Autocast for bf16 and fp16; without its cache on a GPU, where a captured step would use stale weights."""
    dtype, on = torch.float16 if precision == "fp16" else torch.bfloat16, precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype, enabled=on, cache_enabled=device.type != "cuda")


@contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """Compute float32 matrix products in TF32, where that is asked for."""
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


def _largest(named: Iterable[tuple[str, Tensor]]) -> str:
    sizes = {name: float(p.detach().abs().max()) for name, p in named if p.numel()}
    return max(sizes, key=lambda name: sizes[name] if math.isfinite(sizes[name]) else math.inf, default="")


def _finite(value: Tensor) -> bool:
    """Whether all values are finite; of tensors that cannot tell, such as quantised ones, False."""
    try:
        return bool(torch.isfinite(value).all())
    except (NotImplementedError, RuntimeError):
        return False
