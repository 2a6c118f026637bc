"""What `fit` trains: one network, or all particles of a posterior. The loop treats both alike."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bayestrain.compact import CompactReport, compact_
from bayestrain.errors import DecayWarning, TrainingError
from bayestrain.infer import diagnose, imq
from bayestrain.infer.method import MakeOptimizer, load_optimizer
from bayestrain.nn import count_parameters, ranks
from bayestrain.nn.evaluation import evaluating
from bayestrain.nn.fast import fast
from bayestrain.posterior import Likelihood, ParticleModel, Posterior
from bayestrain.posterior.likelihoods import one_tensor
from bayestrain.posterior.model import Joint
from bayestrain.prior import NormalPrior, RankPrior, check_weight_decay
from bayestrain.prior.groups import is_sharded, whole
from bayestrain.train.batches import Batches, apply, rows
from bayestrain.train.config import FitConfig, PosteriorConfig, PriorConfig, plain
from bayestrain.train.distributed import World
from bayestrain.train.muon import Muon, muon_groups

Batch = tuple[Any, Tensor]

LONGEST_WARMUP = 20  # epochs; without the full prior a network overfits few data, and trusts in too little noise
TAUGHT = 0.5  # the share of a teacher in the likelihood loss; the labels have the rest


@dataclass(frozen=True)
class Setup:
    """The settings of a run, and what they make; `make` is a user's own way to make an optimiser."""

    config: FitConfig
    prior: PriorConfig | None
    how: PosteriorConfig
    num_data: int
    steps: int
    world: World
    make: MakeOptimizer | None = None
    teacher: nn.Module | None = None
    seed: int = 0

    def make_optimizer(self, named: list[tuple[str, Tensor]], model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser for parameters of `model` or of its particles; CUDA graphs can capture its steps."""
        if self.make is not None:
            return self.make(named)
        config, device = self.config, self.world.device
        captured, groups = device.type == "cuda", muon_groups(named, model, decay_cores=config.decay_cores)
        lr = torch.tensor(config.lr, device=device) if captured else config.lr
        options = {"lr": lr, "weight_decay": config.weight_decay, "fused": captured or None}
        options |= {"momentum": config.momentum} if config.optimizer == "sgd" else {"capturable": captured}
        if any(is_sharded(p) for _, p in named):  # fast optimisers take all parameters sharded, or none
            options |= {"fused": None, "foreach": False}
        kinds: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": Muon}
        return kinds[config.optimizer](groups, **options)  # type: ignore[no-any-return]

    def make_prior(self, model: nn.Module) -> NormalPrior | None:
        """The prior of one network; without a search for ranks it is the same Normal for all parameters."""
        config, prior = self.config, self.prior
        if prior is None:
            return None
        if not config.search:
            return NormalPrior(model, self.num_data, variance=prior.other_variance, weight=prior.weight)
        options = {**vars(prior), "hold_scale": "auto" if prior.hold_scale else ()}
        epochs = options.pop("warmup_epochs")
        warmup = None if epochs < 0 else round(epochs * self.steps)
        found = RankPrior(model, self.num_data, warmup_steps=warmup, **options)
        if epochs < 0:
            longest = max(found.warmup_steps, LONGEST_WARMUP * self.steps)
            found.warmup_steps = min(round(config.epochs / 4 * self.steps), longest)
        return found


class Network:
    """One network with its likelihood, prior and optimiser. Fine-tuning has no prior where ranks were pruned."""

    prior: NormalPrior | None
    optimizer: torch.optim.Optimizer
    posterior: Posterior | None = None
    alive: Tensor | None = None  # which particles had a finite density and gradient in any step since `repair`
    _due: Tensor | None = None
    """Whether the last step has left the move of lambda to the next one, which can make it beside the network's pass;
    None where it never does."""
    kept: tuple[str, ...] = ("template", "likelihood", "optimizer", "scaler", "prior")

    def __init__(self, model: nn.Module, likelihood: Likelihood, setup: Setup) -> None:
        self.template, self.likelihood, self.config, self.device = model, likelihood, setup.config, setup.world.device
        self.prior, self.teacher = setup.make_prior(model), setup.teacher
        named = [*model.named_parameters(), *likelihood.named_parameters("likelihood")]
        named = [(name, p) for name, p in named if p.requires_grad]
        self.trained = [p for _, p in named]
        self.optimizer = setup.make_optimizer(list(named), model)
        if isinstance(self.prior, RankPrior) and not self.config.decay_cores:
            check_weight_decay(self.optimizer, model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "fp16")
        perf = fast() if self.device.type == "cuda" and not self.scaler.is_enabled() and setup.world.size == 1 else None
        self.capture = None if perf is None else perf.Capture()
        self.world, self._joint = setup.world, Joint(model, likelihood)
        self._forget()
        self.idle: Callable[[], AbstractContextManager[None]] = nullcontext if perf is None else perf.IdleBiases(model)
        self._due = None if perf is None else torch.zeros((), dtype=torch.bool, device=self.device)
        self._weight = torch.zeros((), device=self.device)  # the prior's, where a captured step reads it

    @property
    def number(self) -> int:
        """Of particles."""
        return 1 if self.posterior is None else self.posterior.method.spread.total

    def parameters(self) -> dict[str, Tensor]:
        if self.posterior is None:
            own: Any = dict(self.template.named_parameters())  # of a sharded one, what this process has
            return {k: (p.to_local() if is_sharded(p) else p).detach()[None] for k, p in own.items()}
        return {name.removeprefix("model."): p.detach() for name, p in self.posterior.particles.items()}

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Likelihood loss, prior loss and accuracy (NaN without classes) of one step; the next may overwrite them."""
        (x, y), prior = batches[0], self.prior
        if self.capture is None or len(batches) > 1 or not isinstance(x, Tensor):
            return self._advance(batches, None)
        weight = None if prior is None else self._weight.fill_(prior.current_weight)
        found = self.capture.step(lambda x, y: (self._advance([(x, y)], weight),), x, y, prior, self.optimizer)
        return found[0]  # type: ignore[no-any-return]

    def _advance(self, batches: Sequence[Batch], weight: Tensor | None) -> Tensor:
        """A step of the README's loop. Nothing here depends on values on the device, so a CUDA graph can replay it."""
        self.template.train()
        counts, world, losses, rights = [rows(batch) for batch in batches], self.world, [], []
        total = int(world.sum_data(torch.tensor(sum(counts))))
        with self.capture.beside(self.device) if self.capture else nullcontext():
            self._settle()
            prior, pulls = self._pull(weight)
        with products(self.config.precision):
            for number, (x, y) in enumerate(batches):
                share = counts[number] / total
                with self.idle(), self._unless_last(number, batches):
                    found = self._parallel(self._loss, x, y)
                    data = found["loss"] * share
                    self.scaler.scale(data * world.replicas).backward()  # gradients become means over processes
                losses.append(data.detach())
                rights.append(accuracy(found["outputs"], y).to(data) * share)
        if self.capture is not None:
            self.capture.join(self.device)
        self._add(pulls)
        if self.config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            if any(is_sharded(p) for p in self.trained):
                size = torch.stack([whole(p.grad.norm()) for p in self.trained if p.grad is not None]).norm()
                nn.utils.clip_grads_with_norm_(self.trained, self.config.clip_norm, size, foreach=False)
            else:
                nn.utils.clip_grad_norm_(self.trained, self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.prior is not None and self._due is not None:
            self.prior.hold_()
            self._due.fill_(True)
        elif self.prior is not None:
            aligned = self.prior.aligns_next
            self.prior.step()
            if aligned:
                weights = self.prior.weights.values()
                world.copy_(t for w in weights for t in (*w.cores, *(w.rank_state.log_lambdas if w.rank_state else ())))
        loss, right = world.sum_data(torch.stack([reduce(torch.add, losses), reduce(torch.add, rights)])).detach()
        return torch.stack([loss, prior.to(data), right])

    def _unless_last(self, number: int, batches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Gradients are added up over processes once, with the last batch of a step."""
        parallel = self._parallel if number + 1 < len(batches) else None
        return parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else nullcontext()

    def _loss(self, joint: Joint, x: Any, y: Tensor) -> dict[str, Tensor]:
        """The likelihood loss of a batch, and the network's outputs."""
        with lowered(self.config.precision, self.device):
            outputs = one_tensor(joint.model(arranged(x)))
        loss = -joint.likelihood.log_prob(outputs, y).mean()
        if self.teacher is not None:
            with torch.no_grad(), lowered(self.config.precision, self.device):
                known = one_tensor(self.teacher(arranged(x)))
            loss = (1 - TAUGHT) * loss - TAUGHT * joint.likelihood.taught(outputs, known).mean()
        return {"loss": loss, "outputs": outputs}

    def _pull(self, weight: Tensor | None) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The prior's loss, and its gradients for `trained`."""
        if self.prior is None:
            return torch.zeros((), device=self.device), [None] * len(self.trained)
        loss = self.prior.loss(weight)
        return loss.detach(), torch.autograd.grad(self.scaler.scale(loss), self.trained, allow_unused=True)

    def _add(self, pulls: Sequence[Tensor | None]) -> None:
        """Add the prior's gradients to the likelihood's, many at a time: autograd would add them one by one."""
        own = [(p, pull) for p, pull in zip(self.trained, pulls, strict=True) if pull is not None]
        if both := [(pull, p.grad) for p, pull in own if p.grad is not None]:
            add: Any = torch._foreach_add  # not in place: gradients may be views
            if any(is_sharded(pull) for pull, _ in both):
                add = partial(map, torch.add)  # some are sharded, some not
            sums = iter(add(*map(list, zip(*both, strict=True))))
            own = [(p, pull if p.grad is None else next(sums)) for p, pull in own]
        for p, total in own:
            p.grad = total

    def _settle(self) -> None:
        if self.prior is not None and self._due is not None:
            self.prior.move_(self._due)
            self._due.zero_()

    def compact_(self, tol: float | None = None, **options: Any) -> CompactReport:
        """Cut ranks, as `bayestrain.compact_` does."""
        if self.posterior is not None:
            return self.posterior.compact_(tol, **options)
        self._settle()
        self._forget()
        report = None
        with warnings.catch_warnings(action="ignore", category=DecayWarning):  # which came first of all, if at all
            if self.world.rank == 0:
                report = compact_(self.template, tol, optimizer=self.optimizer, **options)
        report = self.world.cut(report, self.template, self.optimizer)
        self._forget()
        return report

    def end_search(self) -> None:
        """Fix the ranks: lambda is removed, and the optimiser loses its moments."""
        if self.prior is not None:
            self.prior.remove_()
        self.prior = None
        self.optimizer.state.clear()
        self._forget()

    def _forget(self) -> None:
        if self.capture is not None:
            self.capture.forget()
        self._parallel = self.world.wrap(self._joint)  # again: it stores shapes

    def repair(self) -> str:
        """Drop particles that are not finite, and say so; raise if too few are left."""
        self._settle()
        exact = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in self.parameters().values()]
        squares = torch.stack([p.square().unsqueeze(-1).flatten(1).sum(1) for p in exact])  # as the prior has them
        sane = squares.isfinite().all(0)
        if self.alive is not None:
            sane, self.alive = sane & self.alive, None
        if self.posterior is None:
            everywhere = torch.tensor([not self.world.any(not bool(sane))])
        else:
            everywhere = self.posterior.method.spread.gather(sane.byte()).bool()
        if not (broken := (~everywhere).nonzero().flatten().tolist()):
            return ""
        if self.posterior is None or self.number - len(broken) < self.posterior.method.fewest:
            raise TrainingError(f"weights have values that are not finite in {len(broken)} of {self.number} networks")
        self.posterior.drop_((~sane).nonzero().flatten().tolist())
        return f"particles {broken} have values that are not finite and were dropped; {self.number} are left"

    def largest(self) -> str:
        """The name of the parameter with the largest or broken values."""
        sizes = {name: float(p.abs().max()) for name, p in self.parameters().items() if p.numel()}
        return max(sizes, key=lambda name: sizes[name] if math.isfinite(sizes[name]) else math.inf, default="")

    def measure(self, batches: Batches | None) -> dict[str, float] | None:
        """The metrics of the predictions; for a likelihood that is a function, the log likelihood of the data."""
        if batches is None:
            return None
        model, parts = self.posterior or self.template, []
        if self.likelihood.predicts:
            prediction, targets = predict(model, self.likelihood, batches, self.config.precision)
            found: dict[str, float] = prediction.metrics(targets)
            return {key: value for key, value in found.items() if self.posterior or key != "mean_log_likelihood"}
        with evaluating(self.template), torch.no_grad():
            for x, y in batches:
                outputs = self.posterior.outputs(x) if self.posterior else self.template(arranged(x))[None]
                each = torch.stack([self.likelihood.log_prob(one, y).double() for one in outputs])
                parts.append(each.logsumexp(0) - math.log(self.number))
        return {"log_likelihood": float(torch.cat(parts).mean())}

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"prior_weight": 0.0 if self.prior is None else self.prior.current_weight}
        about |= {"parameters": count_parameters(self.template), "ranks": plain(ranks(self.template))}
        if self.posterior is not None:
            about |= {"particles": self.number}
            about |= {"diagnostics": vars(diagnose(self.posterior.particles, self.posterior.method.spread))}
        return about

    def state(self) -> dict[str, Any]:
        self._settle()
        return {name: getattr(self, name).state_dict() for name in self.kept if getattr(self, name) is not None}

    def restore(self, state: dict[str, Any]) -> None:
        load_optimizer(self.optimizer, state["optimizer"])
        for name in [name for name in state if name != "optimizer"]:
            getattr(self, name).load_state_dict(state[name])
        self._forget()


class Particles(Network):
    """All particles of a posterior. Fine-tuning has a Normal prior."""

    posterior: Posterior
    kept = ("posterior",)

    def __init__(self, models: Sequence[nn.Module], likelihood: Likelihood, setup: Setup) -> None:
        config, how = setup.config, setup.how
        options: dict[str, Any] = {"clip": config.clip_norm or None, "kernel": imq if how.kernel == "imq" else None}
        options |= {"temperature": None if how.temperature == 1.0 else how.temperature, "chunk": how.chunk or None}
        if how.method == "sgld":
            options |= {"lr": config.lr, "memory": 0.99, "seed": setup.seed}
        else:
            options["optimizer"] = lambda named: setup.make_optimizer(named, models[0])
        options |= {"likelihood": likelihood, "method": how.method, "prior": setup.make_prior}
        options["spread"] = setup.world.spread(len(models))
        self.posterior, self.world = Posterior(models, setup.num_data, **options), setup.world
        if self.world.replicas > 1:
            self.posterior.summed = self.world.sum_many
        self.template, self.likelihood = self.posterior.template, self.posterior.likelihood
        self.optimizer, self.config, self.device = self.posterior.method.optimizer, config, self.world.device

    @property
    def prior(self) -> NormalPrior:  # type: ignore[override]
        return self.posterior.prior

    def step(self, batches: Sequence[Batch]) -> Tensor:
        ((x, y),), world = batches, self.world
        mine = rows(batches[0])
        share = mine / int(world.sum_data(torch.tensor(mine)))
        self.posterior.share = share
        with products(self.config.precision), lowered(self.config.precision, self.device):
            seen = self.posterior.step(x, y)
        prior = self.prior.current_weight * seen.log_prior / self.posterior.num_data
        right = torch.stack([accuracy(outputs, y) for outputs in seen.outputs]).to(prior)
        self.alive = seen.alive.clone() if self.alive is None else self.alive | seen.alive
        terms = torch.stack([-seen.log_likelihood * share, -prior / world.replicas, right * share])  # (3, n)
        sums = torch.cat([torch.where(seen.alive, terms, 0.0).sum(1), seen.alive.sum()[None] / world.replicas])
        *means, alive = world.sum_all(sums).unbind()
        return torch.stack(means) / alive

    def end_search(self) -> None:
        self.posterior.fix_ranks_()

    def restore(self, state: dict[str, Any]) -> None:
        left = len(state["posterior"]["method"]["broken"])
        if left < (number := len(self.posterior)):
            self.posterior.drop_(range(left, number))
        self.posterior.load_state_dict(state["posterior"])


def predict(
    model: nn.Module | ParticleModel, likelihood: Likelihood, batches: Batches, precision: str = "float32"
) -> tuple[Any, Tensor]:
    """The prediction for all batches, on the CPU, and their targets."""
    parts, targets = [], []
    with evaluating(model.template if isinstance(model, ParticleModel) else model), torch.no_grad():
        for x, y in batches:
            targets.append(y.cpu())
            if isinstance(model, ParticleModel):
                parts.append(model.predict(x))
            else:
                with lowered(precision, batches.device):
                    outputs = one_tensor(model(arranged(x)))
                parts.append(likelihood.prediction({k: t.cpu()[None] for k, t in likelihood.describe(outputs).items()}))
    return type(parts[0]).cat(parts), torch.cat(targets)


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """The share of correct classes, or NaN if the targets are not classes."""
    if outputs.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
        return (outputs.argmax(1) == y).float().mean()
    return torch.full((), torch.nan, device=outputs.device)


def lowered(precision: str, device: torch.device) -> torch.autocast:
    """Autocast for bf16 and fp16; without its cache on a GPU, where a captured step would use stale weights."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=device.type != "cuda")


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Compute float32 matrix products on a GPU in TF32, if requested."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if precision == "tf32" else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def arranged(x: Any) -> Any:
    """Images channels last in memory on a GPU, where convolutions are faster on them."""
    return apply(x, lambda t: t.contiguous(memory_format=torch.channels_last) if t.is_cuda and t.ndim == 4 else t)
