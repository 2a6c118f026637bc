"""`Posterior`: particles of a network that train together, and how they start."""

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayestrain.compact import CompactReport, compact_
from bayestrain.errors import ConfigError, ParticleWarning, ShapeError, check_choice, check_counts
from bayestrain.formats import Format
from bayestrain.infer import METHODS, Anchored, Method, Spread, count
from bayestrain.infer.anchored import keys
from bayestrain.infer.particles import flatten
from bayestrain.nn.fast import fast
from bayestrain.nn.sizes import factorized_weights
from bayestrain.posterior.likelihoods import Classification, Likelihood, LogProb, as_likelihood, full_precision
from bayestrain.posterior.model import Joint, Part, ParticleModel, joined, stack_joints
from bayestrain.posterior.prediction import check_temperature
from bayestrain.prior import NormalPrior, RankPrior

RECOMPUTES = (
    "The network recomputes or moves its activations (torch.utils.checkpoint, save_on_cpu), which particles cannot: in "
    "the backward pass their weights are no longer in the network. Turn that off; a smaller chunk saves memory, too."
)

KEYS = "noise_keys"  # what each particle's joint has them as
NARROW = 0.5  # particles that have less of the posterior's width are not said to be spread like it


class PosteriorStep(NamedTuple):
    """The particles on a batch before they moved; a captured step overwrites these tensors with the next one."""

    log_likelihood: Tensor
    """``(n,)``: means over the batch."""
    log_prior: Tensor
    outputs: Tensor
    alive: Tensor


class Posterior(ParticleModel):
    """A posterior over the weights of a network: n particles in one batched computation, with one set of ranks.

    Use it in any training loop::

        posterior = Posterior(independent(build, 20), num_data=len(train))
        for x, y in batches:
            posterior.step(x, y)
        posterior.compact_()
        posterior.predict(x).epistemic

    Every particle has its own lambda and its own batch norm statistics; call `refresh_statistics` after training.

    Args:
        models: networks of one architecture on one device, which are copied: the particles' starts.
        num_data: number of training examples.
        likelihood: "classification", "regression", a `Likelihood`, or a function ``(outputs, targets) -> log
            probability of each datum``.
        method: "svgd", "anchored", "ensemble" (of one: MAP), "sgld" or "hmc" (with all data in every step).
        prior: makes the prior of one network; default ``RankPrior(model, num_data)``, or ``NormalPrior`` if the network
            has no factorised weight.
        chunk: particles that run through the network at once; None chooses by memory. It does not change results. A
            network that torch.vmap cannot run, such as an LSTM, needs 1.
        spread: how the particles are spread over processes, if `models` are only those of one. All processes then have
            to take the same steps, cuts and predictions; a prediction is that of all particles.
        options: arguments of the method's class in `bayestrain.infer`. The default of `optimizer`, a function from
            named tensors, is Adam at 1e-3, and at 1e-2 for cores and the likelihood's parameters.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        num_data: int,
        *,
        likelihood: Likelihood | LogProb | str = "classification",
        method: str = "svgd",
        prior: Callable[[nn.Module], NormalPrior] | None = None,
        chunk: int | None = None,
        spread: Spread | None = None,
        **options: Any,
    ) -> None:
        models = list(models)
        check_counts(num_data=num_data, chunk=chunk)
        check_choice("method", method, tuple(METHODS))
        kind = METHODS[method]
        kind.check_number(len(models) if spread is None else spread.total)
        options = {name: value for name, value in options.items() if value is not None}
        if unknown := sorted(options.keys() - kind.options):
            raise ConfigError(f"{method} has no option {unknown[0]!r}; it has {sorted(kind.options)}.")
        if "optimizer" in kind.options:
            options.setdefault("optimizer", _adam)

        first = next((p for p in models[0].parameters() if p.requires_grad), torch.empty(()))
        shared = copy.deepcopy(as_likelihood(likelihood)).to(first.device, first.dtype)
        joints = [Joint(copy.deepcopy(model), shared) for model in models]
        make_prior = prior or (lambda model: (RankPrior if factorized_weights(model) else NormalPrior)(model, num_data))
        self.prior, *_ = [make_prior(joint.model) for joint in joints]
        particles, carried = stack_joints(joints)
        self.method: Method = kind(self._gradients, particles, scale=1 / num_data, spread=spread, **options)
        if isinstance(found := self.method, Anchored) and self.prior.weights:  # lambda decides how wide cores' prior is
            found.anchors = {name: start for name, start in found.anchors.items() if ".cores." not in name}
        super().__init__(joints[0], self.method.particles, carried)
        self.num_data, self.chunk, perf = num_data, chunk, fast()
        self._capture = None if perf is None or self.method.spread.group is not None else perf.Capture()
        self.share = 1.0  # the batch's weight where other processes have the rest of it, and how to sum over these
        self.summed: Callable[[list[Tensor]], None] | None = None
        self._training_chunk: int | None = None  # before the first step
        self._prior_weight = torch.zeros((), device=self.device)  # a captured step sees it change
        self._seen: dict[str, Tensor] = {}

    def step(self, x: Tensor, y: Tensor) -> PosteriorStep:
        """Move all particles, then every lambda.

        On a GPU the step is captured in a CUDA graph, which is many times faster, if the optimiser allows it, as the
        default one does and ``Adam(named, lr=torch.tensor(1e-3, device="cuda"), capturable=True)``.
        """
        if len(y) == 0:
            raise ConfigError("A batch must have at least one datum, got an empty one. Leave it out.")
        if self._training_chunk is None:
            self.estimate_memory(x, y)
        self._prior_weight.fill_(self.prior.current_weight)
        capture, advance = self._capture, self._advance
        found = advance(x, y) if capture is None else capture.step(advance, x, y, self.prior, self.method.optimizer)
        self.method.count_step()
        return found

    def _advance(self, x: Tensor, y: Tensor) -> PosteriorStep:
        """A step that reads no value, so that it can be captured."""
        alive = self.method.advance((x, y)).alive
        seen, self._seen = self._seen, {}
        with torch.no_grad():
            for name in self.carried.keys() & seen.keys():  # a batch that broke a particle does not count for its norms
                own = self.carried[name]
                own.copy_(torch.where(alive.view(-1, *[1] * (own.ndim - 1)), seen[name], own))
            tensors = {name: tensor.detach() for name, tensor in {**self.particles, **self.carried}.items()}
            steps = self.prior.steps

            def move(_: Joint) -> dict[str, Tensor]:
                self.prior.steps = steps
                self.prior.step()
                return {}

            # An alignment of a user's own may branch on values, so it takes one particle after the other.
            branching = any(type(weight.format).align is not Format.align for weight in self.prior.weights.values())
            self.joint.batched(tensors, move, size=1 if branching and self.prior.aligns_next else None)
        return PosteriorStep(seen["log_likelihood"], seen["log_prior"], seen["outputs"], alive)

    def _gradients(
        self, particles: Mapping[str, Tensor], batch: Any, perturbed: bool = True
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log densities with gradients: the prior of all particles at once, then the likelihood chunk by chunk."""

        def log_prior(_: Joint) -> dict[str, Tensor]:
            value = self.prior.log_prob()
            return {"density": self._prior_weight * value, "log_prior": value.detach()}

        self.template.train()
        n, size, method = len(self), self._training_chunk or self.chunk or len(self), self.method
        of_prior, self._seen = self._part(slice(n), log_prior)
        own = {}
        if isinstance(method, Anchored) and perturbed:
            own[KEYS] = keys(batch, method.numbers)
            for name, anchor in method.anchors.items():
                if anchor.shape == of_prior[name].shape:
                    of_prior[name] = of_prior[name] + anchor * (self._prior_weight / self.prior.variance)
        chunks = [slice(i, i + size) for i in range(0, n, size)]
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES):
                found = [self._part(each, self._log_likelihood, *batch, **own) for each in chunks]
        except (RuntimeError, ConfigError) as error:
            # PyTorch 2.11 cannot run the last one, a part of its checkpoints, under vmap.
            if any(sign in str(error) for sign in (RECOMPUTES, "use_reentrant", "_NoopSaveInputs")):
                raise ConfigError(RECOMPUTES) from error
            raise
        gradients, seen = (joined(each) for each in zip(*found, strict=True))
        if self.summed is not None:
            self.summed([*gradients.values(), seen["density"]])
        density, prior = seen.pop("density"), self._seen.pop("density")
        self._seen = {**self._seen, **seen}
        total = torch._foreach_add([gradients[name] for name in particles], [of_prior[name] for name in particles])
        return density + prior, dict(zip(particles, total, strict=True))

    def _log_likelihood(self, joint: Joint, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        outputs, key = joint.model(x), getattr(joint, KEYS, None)
        mean = joint.likelihood.log_prob(outputs, y).mean()
        climbed = mean if key is None else joint.likelihood.perturbed(outputs, y, key).mean()
        seen = {"log_likelihood": mean.detach(), "outputs": full_precision(outputs).detach()}
        return {"density": self.num_data * self.share * climbed, **seen}

    def _part(
        self, which: slice, part: Part, *inputs: Tensor, **own: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of a density of some particles, and what the part returned, with the buffers after it.

        Each particle's joint has its `own` while the part runs.
        """
        leaves = {name: tensor[which].detach().requires_grad_() for name, tensor in self.particles.items()}
        # A pass changes batch norm's buffers; the prior, which has no inputs, only reads its own.
        changed = {n: t[which].clone() for n, t in self.carried.items() if inputs and ".rank_state." not in n}
        with torch.enable_grad():
            others = {**(changed if inputs else self.carried), **{name: tensor[which] for name, tensor in own.items()}}
            found = self.joint.batched({**leaves, **others}, part, *inputs)
            total, wanted = found["density"].sum(), list(leaves.values())
            gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        found["density"] = found["density"].detach()
        return dict(zip(leaves, gradients, strict=True)), {**changed, **found}

    def width(self, x: Tensor, y: Tensor) -> float:
        """Return how wide the particles lie, next to the posterior given these training data; warn if below a half.

        Draws from any density have ``E[(theta - mean) . grad log p(theta)] = -D``: it is 1 for draws, 0 for particles
        that each sit on a peak, as those of an ensemble do, and in between the share of the variance that they have.
        """
        if len(self) < 2:
            raise ConfigError("One particle has no width. Compare at least 2.")
        self._prior_weight.fill_(self.prior.current_weight)
        (_, gradients), self._seen = self._gradients(self.particles, (x, y), perturbed=False), {}
        theta, rows = flatten(self.particles), flatten(gradients)
        found = -float(((theta - theta.mean(0)).double() * rows).sum() / (theta.shape[1] * (len(self) - 1)))
        if found < NARROW:
            warnings.warn(
                f"The particles have {found:.2f} of the posterior's width, so their epistemic uncertainty is a lower "
                'bound. Use method="anchored", with starts drawn from the prior.',
                ParticleWarning,
                stacklevel=2,
            )
        return found

    def estimate_memory(self, x: Tensor, y: Tensor) -> Any:
        """Estimate a step's memory and choose the chunk; raise if it cannot fit. None without `bayestrain.perf`."""
        perf = fast()
        if perf is None or self._capture is None:
            return None
        self._capture.forget()  # a captured step has the old chunks
        one = {name: tensor[:1].detach().clone() for name, tensor in {**self.particles, **self.carried}.items()}
        own = [*(one[name].requires_grad_() for name in self.particles), x, y]
        self.template.train()
        needed = perf.memory.activations(lambda: self.joint.batched(one, self._log_likelihood, x, y), own, self.device)
        weights = sum(tensor.nbytes for tensor in self.particles.values())
        held = 4 * weights  # with gradients, and what Adam keeps, which is the most
        allocated = held if self.method.steps else weights
        estimate = perf.memory.choose_chunk(len(self), held, allocated, needed, self.template, self.device, self.chunk)
        self._training_chunk = estimate.chunk
        return estimate

    def compact_(
        self, tol: float | None = None, *, parameters: int | None = None, rule: str | None = None
    ) -> CompactReport:
        """Cut ranks as `bayestrain.compact_` does, one rank per bond for all particles, with the optimiser's state."""
        report = compact_(self, tol, parameters=parameters, rule=rule, optimizer=self.method.optimizer)
        self._changed()
        return report

    def fix_ranks_(self) -> None:
        """Fix the ranks: lambda is removed, and every weight has the prior Normal(0, `prior.variance`) from here on.

        The weight of the prior stays as it was. The optimiser loses its moments.
        """
        old = self.prior
        for weight in factorized_weights(self.joint).values():
            weight.rank_state = None
        self.prior = NormalPrior(self.template, self.num_data, variance=old.variance, weight=old.weight)
        for name in [name for name in self.carried if ".rank_state." in name]:
            del self.carried[name]
        self.method.optimizer.state.clear()
        self._changed()

    def drop_(self, indices: Collection[int]) -> None:
        """Continue without some particles, such as broken ones."""
        if unknown := [i for i in indices if not 0 <= i < len(self)]:
            raise ConfigError(f"indices must be particles from 0 to {len(self) - 1}, got {unknown}.")
        kept = [i for i in range(len(self)) if i not in set(indices)]
        self.method.keep_(kept)
        for name, tensor in self.carried.items():
            self.carried[name] = tensor[kept]
        self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step and the predictions depend on."""
        return {
            "method": self.method.state_dict(),
            "carried": dict(self.carried),
            "shared": {n: p.detach() for n, p in self.joint.named_parameters() if n not in self.particles},
            "prior": self.prior.state_dict(),
            "ranks_fixed": not isinstance(self.prior, RankPrior),
            "variance": self.prior.variance,
            "temperature": getattr(self.likelihood, "temperature", None),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, perhaps with other ranks; it is tried on a copy of one particle before the first change."""
        try:
            stacked = {**state["method"]["particles"], **state["carried"]}
            one = {name: tensor[0] for name, tensor in stacked.items()} | state["shared"]
            trial = copy.deepcopy(self.joint)
            for weight in factorized_weights(trial).values() if state["ranks_fixed"] else ():
                weight.rank_state = None
            if odd := sorted(trial.tensors().keys() ^ one.keys()):
                raise ShapeError(f"only one of the two has {odd[0]!r}")
            trial.load_state_dict(one, strict=False)  # not strict: a tensor with several names is there under one
            count(stacked)
            self.method.check_state(state["method"])
            copy.copy(self.prior).load_state_dict(state["prior"])
            check_temperature(temperature := state["temperature"] or 1.0)
            NormalPrior(trial.model, self.num_data, variance=(variance := float(state["variance"])))
        except Exception as error:  # damage can raise anything
            raise ConfigError(f"The saved state does not fit this posterior: {error}") from error
        if state["ranks_fixed"]:
            self.fix_ranks_()
            self.prior.variance = variance
        self.joint.load_state_dict(one, strict=False)
        for name, tensor in state["carried"].items():
            self.carried[name] = tensor.to(self.carried[name], copy=True)
        self.method.load_state_dict(state["method"])
        self.prior.load_state_dict(state["prior"])
        if isinstance(self.likelihood, Classification):
            self.likelihood.temperature = temperature
        self._changed()

    def _predict(self, *args: Any) -> dict[str, Tensor]:
        return {name: self.method.spread.gather(tensor) for name, tensor in super()._predict(*args).items()}

    @torch.no_grad()
    def gathered(self) -> ParticleModel:
        """Return all particles, on the CPU of every process, if they are spread over several."""
        return self if self.method.spread.group is None else self._moved("cpu", self.method.spread.gather)

    def _changed(self) -> None:
        self._training_chunk = None
        self.joint.forget_copies()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.method.name})"


def _adam(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    captured = (device := named[0][1].device).type == "cuda"
    groups: list[dict[str, Any]] = []
    for lr, quick in ((1e-3, False), (1e-2, True)):
        own = [(name, p) for name, p in named if quick == (".cores." in name or name.startswith("likelihood."))]
        groups += [{"params": own, "lr": torch.tensor(lr, device=device) if captured else lr}] if own else []
    return torch.optim.Adam(groups, capturable=captured)


def independent(build: Callable[[], nn.Module], n: int, seed: int = 0) -> list[nn.Module]:
    """Call `build` n times, each with its own random numbers, for diverse particles; the global generator stays."""
    models = []
    with torch.random.fork_rng(devices=[]):
        for i in range(n):
            torch.manual_seed(seed * 1_000_003 + i)
            models.append(build())
            if i == 0 and isinstance(models[0], nn.Module) and (perf := fast()) is not None:
                perf.memory.check_particles(models[0], n)
    return models


@torch.no_grad()
def around(model: nn.Module, n: int, scale: float = 1e-2, seed: int = 0) -> list[nn.Module]:
    """Copy a trained network n times, with Gaussian noise of `scale` times its RMS added to every trainable tensor.

    All copies lie in one mode of the posterior and stay there: cheap, but hardly more diverse than the point.
    """
    if not scale > 0:
        raise ConfigError(f"scale must be positive, or all particles coincide, got {scale}.")
    if (perf := fast()) is not None:
        perf.memory.check_particles(model, n)
    generator = torch.Generator().manual_seed(seed)
    copies = [copy.deepcopy(model) for _ in range(n)]
    for parameter in (p for twin in copies for p in twin.parameters() if p.requires_grad):
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter.device)
        parameter.add_(noise * scale * parameter.square().mean().sqrt())
    return copies
