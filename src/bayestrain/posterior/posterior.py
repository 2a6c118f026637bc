"""`Posterior`: particles of a network that train together."""

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bayestrain.batchnorm import IdleBiases
from bayestrain.capture import Capture
from bayestrain.compact import CompactReport, checked_tol
from bayestrain.errors import ConfigError, ParticleWarning
from bayestrain.infer import METHODS, Diagnostics, Kernel, Method, diagnose, rbf, stein_discrepancy
from bayestrain.infer.method import MakeOptimizer
from bayestrain.layers import TTConv2d
from bayestrain.posterior.batches import checked_batch
from bayestrain.posterior.compaction import compact_particles, rank_spread, rank_spread_of_size
from bayestrain.posterior.joint import CallableLikelihood, Joint, PerDatum, stack_joints
from bayestrain.posterior.memory import Activations, MemoryEstimate, activations, held_bytes, optimizer_states, plan
from bayestrain.posterior.model import ParticleModel
from bayestrain.posterior.recompute import refuse_recomputing
from bayestrain.posterior.state import load_state, state_of
from bayestrain.predict import Classification, Likelihood
from bayestrain.prior import NormalPrior, Prior, RankPrior
from bayestrain.sizes import tt_layers

BUSY = 32 << 20
"""Bytes of activations with which the convolutions of one particle keep a GPU busy."""


@dataclass(frozen=True)
class PosteriorStep:
    """What the particles were worth on a batch before they moved: means over the batch ``(n,)``, and all outputs."""

    log_likelihood: Tensor
    log_prior: Tensor
    outputs: Tensor
    alive: Tensor


class Posterior(ParticleModel):
    """A posterior over the weights of a network, as n particles in one batched computation with one set of ranks.

    Use it in any training loop::

        posterior = Posterior(independent(build, 20), num_data=len(train))
        for x, y in batches:
            posterior.step(x, y)
        posterior.compact_()
        posterior.predict(x).epistemic

    Each particle's lambda sits at its mode given the particle's weights (`RankPrior.step`), so particles explore the
    weights' density with lambda profiled out. Batch norm's weights are part of a particle; its statistics are kept per
    particle as PyTorch keeps them, and `refresh_statistics` estimates them anew.

    Args:
        models: the particles' starts, copied: networks of one architecture on one device, from `independent`, from
            `around`, or your own.
        num_data: number of training data; the likelihood of a batch of B is scaled by ``num_data / B``.
        method: "svgd", "ensemble", "sgld" or "map".
        likelihood: `Classification()` (default), `Regression()`, a `Likelihood` of your own, or any function
            ``(outputs, targets) -> log probability of each datum``.
        prior: makes the prior of one network; default ``RankPrior(model, num_data)``, or ``NormalPrior`` if the network
            has no tensor-train layer.
        optimizer: makes the optimiser of the particles from their names and tensors, as any of torch's takes them;
            default Adam with a learning rate of 1e-3. Not for "sgld".
        kernel: SVGD's kernel (`infer.rbf`, `infer.imq`, or your own).
        chunk: particles that go through the network at once; None chooses by the memory there is. Same results.
        options: further arguments of the method, as `temperature` for "sgld".
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        num_data: int,
        *,
        method: str = "svgd",
        likelihood: Likelihood | PerDatum | None = None,
        prior: Callable[[nn.Module], Prior] | None = None,
        optimizer: MakeOptimizer | None = None,
        kernel: Kernel | None = None,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        models = list(models)
        if method not in METHODS:
            raise ConfigError(f"method must be one of {tuple(METHODS)}, got {method!r}.")
        if len(models) < METHODS[method].fewest:
            raise ConfigError(
                f"{method} needs at least {METHODS[method].fewest} particles, got {len(models)}. "
                + METHODS[method].advice
            )
        if not hasattr(num_data, "__index__") or num_data < 1:
            raise ConfigError(f"num_data must be the number of training data, at least 1, got {num_data!r}.")
        if method == "sgld" and optimizer is not None:
            raise ConfigError("sgld is its own optimiser: give lr=, temperature= and memory= instead of optimizer=.")
        if kernel is not None and method != "svgd":
            raise ConfigError(f"Only svgd has a kernel, not {method}.")
        allowed = {"clip"} | ({"lr", "temperature", "memory", "seed"} if method == "sgld" else set())
        if unknown := sorted(set(options) - allowed):
            raise ConfigError(f"{method} has no option {unknown[0]!r}. Beside the named ones it has {sorted(allowed)}.")
        likelihood = Classification() if likelihood is None else likelihood
        if not isinstance(likelihood, Likelihood):
            likelihood = CallableLikelihood(likelihood)
        make = optimizer or _adam
        parts = {"model": models[0], "likelihood": likelihood}
        named = [(f"{part}.{n}", p) for part in parts for n, p in parts[part].named_parameters() if p.requires_grad]
        trainable = [parameter for _, parameter in named]
        device = trainable[0].device if trainable else torch.device("cpu")
        states = (1.0 if options.get("memory") else 0.0) if method == "sgld" else optimizer_states(make, named, device)
        held = held_bytes(trainable, len(models), states)
        plan(len(models), held, 0, Activations(0, 0), device, chunk)  # refuses before anything is allocated

        make_prior = prior or (lambda model: _make_prior(model, num_data))
        dtype = trainable[0].dtype if trainable else None
        likelihood = copy.deepcopy(likelihood).to(device, dtype)  # its parameters, if any, are part of a particle
        twins = [copy.deepcopy(model) for model in models]
        joints = [Joint(model, likelihood, make_prior(model), num_data) for model in twins]
        particles, carried = stack_joints(joints)
        if method == "svgd":
            options |= {"kernel": kernel or rbf, "times_n": True}
        if method != "sgld":
            options["optimizer"] = make
        scale = 1 / num_data  # learning rates are those of mean losses
        self.method: Method = METHODS[method](
            self._log_likelihood,
            particles,
            log_prior=self._log_prior,
            carried=carried,
            scale=scale,
            chunk=chunk,
            **options,
        )
        super().__init__(joints[0], self.method.particles, self.method.carried)
        self.num_data = num_data
        self._states = states
        self._chunk = chunk
        self._estimate: MemoryEstimate | None = None
        self._idle: IdleBiases | None = None
        self._trusted = False
        """Whether the network was seen to need its weights no longer than a forward pass."""
        self._seen: list[dict[str, Tensor]] = []
        self.capture = Capture()

    @property
    def prior(self) -> Prior:
        """The prior, common to all particles."""
        assert self.joint.prior is not None
        return self.joint.prior

    def step(self, x: Tensor, y: Tensor) -> PosteriorStep:
        """Move all particles, then every lambda.

        On a GPU, with an optimiser made for it, the step is captured in a CUDA graph once and replayed, which is many
        times faster: ``Adam(named, lr=torch.tensor(1e-3, device="cuda"), capturable=True)``. What is returned is then
        overwritten by the next step.
        """
        with checked_batch(self, x, y):
            if self._estimate is None:
                self.estimate_memory(x, y)
            elif not self._trusted:
                self._trusted = refuse_recomputing(self.joint, self._first(), x, y)
            if not isinstance(self.joint.prior_weight, Tensor):
                self.joint.prior_weight = torch.zeros((), device=self.device)
            self.joint.prior_weight.fill_(self.prior.current_weight)
            found = self.capture.step(self._advance, x, y, self.prior, self.method.optimizer)
        self.method.count_step()
        return PosteriorStep(*found)

    def _advance(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.template.train()
        self._seen = []
        statistics = self._statistics()
        try:
            info = self.method.advance((x, y))
        except BaseException:  # a batch that was refused shall not count
            self._forget(statistics)
            raise
        with torch.no_grad():
            if idle := self._idle_biases():
                torch._foreach_zero_(idle)  # noise, a prior around another value: running means know of no bias
            for name, before in statistics.items():  # a batch that broke a particle shall not count for it
                now = self.carried[name]
                now.copy_(torch.where(info.alive.view(-1, *[1] * (now.ndim - 1)), now, before))
            self.joint.batched({n: t.detach() for n, t in {**self.particles, **self.carried}.items()}, "step")
        prior, *parts = self._seen
        self._seen = []
        data, outputs = (torch.cat([part[key] for part in parts]) for key in ("data", "outputs"))
        return data, prior["prior"], outputs, info.alive

    def _statistics(self) -> dict[str, Tensor]:
        """Copies of the carried tensors that a forward pass changes: batch norm's."""
        return {name: tensor.clone() for name, tensor in self.carried.items() if ".rank_state." not in name}

    def _forget(self, statistics: dict[str, Tensor]) -> None:
        """Of batches that went through the network, and keep the statistics from before them."""
        self._seen = []
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # recorded only: nothing has gone through
        for name, before in statistics.items():
            self.carried[name].copy_(before)

    def _log_likelihood(self, tensors: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        needed = {name: tensor for name, tensor in tensors.items() if ".rank_state." not in name}  # no lambda
        found = self.joint.batched(needed, "likelihood", *batch)
        self._seen.append(found)
        return found["density"]

    def _log_prior(self, tensors: dict[str, Tensor]) -> Tensor:
        found = self.joint.batched(tensors, "prior")
        self._seen.append(found)
        return found["density"]

    def estimate_memory(self, x: Tensor, y: Tensor) -> MemoryEstimate:
        """What training on batches like this one takes; raises if it cannot fit. `step` asks for it by itself."""
        self.template.train()
        one = self._first()
        before = self.joint.alone, self.joint.idle
        self.joint.alone, self.joint.idle = False, nullcontext  # measured the same way each time
        try:
            with checked_batch(self, x, y):
                needed = activations(self.joint, one, x, y)
        finally:
            self.joint.alone, self.joint.idle = before
        held = held_bytes([t.detach()[0] for t in self.particles.values()], len(self), self._states)
        allocated = held if self.method.steps else int(held / (2 + self._states))
        alone = self._chunk in (None, 1) and self._goes_alone(needed)
        chunk = self._chunk or (1 if alone else None)
        estimate = plan(len(self), held, allocated, needed, self.device, chunk)
        self.joint.alone, self.joint.idle = alone, nullcontext
        if alone or self._idle is not None:  # once at zero they stay there: an optimiser may think them weightless
            self._empty_idle_biases()
        if alone and self._idle is not None:
            self.joint.idle = self._idle
        self._trusted = self._trusted or refuse_recomputing(self.joint, one, x, y)
        self._estimate, self.method.chunk = estimate, estimate.chunk
        self.capture.forget()  # a captured step has the old chunks
        return self._estimate

    def _first(self) -> dict[str, Tensor]:
        """One particle, to try things with."""
        one = {name: t[0].detach().requires_grad_() for name, t in self.particles.items()}
        return one | {name: t[0] for name, t in self.carried.items()}

    def _goes_alone(self, needed: Activations) -> bool:
        """Whether particles had better go one by one: convolutions that keep a GPU busy only get slower in groups."""
        convolving = any(isinstance(module, _ConvNd | TTConv2d) for module in self.template.modules())
        return self.device.type == "cuda" and convolving and needed.bytes > BUSY

    @torch.no_grad()
    def _empty_idle_biases(self) -> None:
        """Biases that a batch norm takes away again become zero, which changes nothing (`IdleBiases`)."""
        self._idle = self._idle or IdleBiases(self.template)
        for layer, norms in self._idle.names.items():
            bias = self.particles[f"model.{layer}.bias"]
            for norm in norms:
                if (mean := self.carried.get(f"model.{norm}.running_mean")) is not None:
                    mean -= bias
            bias.zero_()

    def _idle_biases(self) -> list[Tensor]:
        """Those that have been emptied, of all particles."""
        return [self.particles[f"model.{layer}.bias"] for layer in (self._idle.names if self._idle is not None else ())]

    def compact_(
        self, tol: float | None = None, rule: str = "rounding", *, parameters: int | None = None
    ) -> CompactReport:
        """Cut the ranks that the particles, on the whole, do not need: one rank per bond for all, in place.

        Args:
            tol: relative error (Frobenius norm) of each layer's weight, as the root mean square over particles; for
                "lambda" the absolute threshold. Default 1e-2.
            rule: "rounding" and "contribution" do not depend on the gauge; "contribution" keeps the optimiser's state
                and is meant for the time of training; "lambda" is the paper's, on the posterior mean of lambda.
            parameters: instead of a tolerance, for "rounding": how many each particle may have. Ranks are cut, in
                whatever layers, where that changes the weights least.
        """
        report = compact_particles(self, tol, rule, self.method.optimizer, parameters)
        if report.changed:
            self._estimate = None  # less memory, other chunks
        return report

    def rank_spread(self, tol: float | None = None, *, parameters: int | None = None) -> dict[str, list[list[int]]]:
        """``{layer: [[rank of every particle] for each bond]}``: what each alone would be cut to.

        That is with a tolerance, 1e-2 if none is given, or to have at most so many parameters.
        """
        tol = checked_tol(tol, "rounding", parameters)
        return rank_spread(self, tol) if parameters is None else rank_spread_of_size(self, parameters)

    def fix_ranks_(self, variance: float | None = None, weight: float | None = None) -> None:
        """From here on the ranks are given: lambda goes, every weight has the prior Normal(0, variance).

        The optimiser forgets what it remembers, but for its learning rate.

        Args:
            variance: if None, that which weights outside of tensor trains have.
            weight: of the prior; if None, as it was.
        """
        prior = self.prior
        weight = prior.weight if weight is None else weight
        if variance is None:
            variance = prior.other_variance if isinstance(prior, RankPrior) else prior.variance
        fixed = NormalPrior(self.template, self.num_data, variance=variance, weight=weight)
        if isinstance(prior, RankPrior):
            prior.remove_()
        for layer in tt_layers(self.template).values():
            layer.rank_state = None  # left by a prior that the particles never had
        for name in [name for name in self.carried if ".rank_state." in name]:
            del self.carried[name]
        self.joint.prior = fixed
        self.method.restart_optimizer()
        self._estimate = None

    def drop_(self, indices: Collection[int]) -> None:
        """Go on without some particles, such as broken ones."""
        unknown = [i for i in indices if not 0 <= i < len(self)]
        if unknown:
            raise ConfigError(f"There are particles 0 to {len(self) - 1}, but no {unknown}.")
        self.method.keep_([i for i in range(len(self)) if i not in set(indices)])
        self._estimate = None

    def diagnostics(self) -> Diagnostics:
        """How the particles lie (see `infer.diagnose`), with a warning if they have become one."""
        found = diagnose(self.particles)
        if found.effective_particles < len(self) / 2:
            warnings.warn(
                f"The particles have collapsed: of {len(self)}, only about {found.effective_particles:.1f} are "
                "different. Start them apart (`independent`), or farther from each other.",
                ParticleWarning,
                stacklevel=2,
            )
        return found

    def stein_discrepancy(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Squared kernelised Stein discrepancy per dimension, with the gradients averaged over these batches."""
        self.template.train()
        total: dict[str, Tensor] = {}
        number = 0
        statistics = self._statistics()
        try:
            for batch in batches:
                number += 1
                for name, gradient in self.method.gradients(batch)[1].items():
                    total[name] = total[name] + gradient if name in total else gradient
        finally:
            self._forget(statistics)
        if not number:
            raise ConfigError("There is no batch to take gradients over.")
        dimensions = sum(tensor[0].numel() for tensor in self.particles.values())
        return stein_discrepancy(self.particles, {name: g / number for name, g in total.items()}) / dimensions

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step and the predictions depend on."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state, perhaps one with other ranks."""
        load_state(self, state)
        self._estimate = None

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.method.name})"


def _adam(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """Adam, on a GPU one whose steps can be captured."""
    device = named[0][1].device
    if device.type != "cuda":
        return torch.optim.Adam(named, lr=1e-3)
    return torch.optim.Adam(named, lr=torch.tensor(1e-3, device=device), capturable=True)


def _make_prior(model: nn.Module, num_data: int) -> Prior:
    return RankPrior(model, num_data) if tt_layers(model) else NormalPrior(model, num_data)
