"""`RankPrior`, under which factorised weights find their ranks, and `NormalPrior` for dense networks."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from bayestrain.errors import CollapseWarning, ConfigError, DecayWarning, check_counts
from bayestrain.nn.factorized import FLOOR, GAMMA_RATE, GAMMA_SHAPE, FactorizedWeight
from bayestrain.nn.fast import fast
from bayestrain.nn.precision import own_precision, traced, transformed
from bayestrain.nn.sizes import factorized_weights
from bayestrain.prior import density
from bayestrain.prior.groups import Group, is_sharded, norm_of, total, whole
from bayestrain.prior.hold import layers_to_hold
from bayestrain.prior.watch import Watch

UPDATES = {"newton": density.newton_step, "gradient": density.gradient_step}

ALIGN_SWEEPS = 5  # rounds of Newton steps of every lambda after an alignment; the steps that follow do the rest
EARLY = 4  # how many times as often rank indices are aligned at first, when ranks are decided
SMALL = 1 << 16  # tensors up to this size are joined before they are summed; copying larger ones would cost more

POSITIVE = "must be positive", lambda x: 0 < x < math.inf
NOT_NEGATIVE = "cannot be negative", lambda x: 0 <= x < math.inf

WARMUP, LONGEST_WARMUP = 250, 1000
"""Default steps of warm-up with as many entries of cores as terms of data, growing as the root of their ratio."""


class NormalPrior:
    """Normal(0, `variance`) on every trainable parameter: for dense networks, and for fixed ranks.

    Every prior offers a training loop the same: `loss` to add to its own loss, and `step` after the optimiser's step::

        loss = F.cross_entropy(model(x), y) + prior.loss()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        prior.step()

    Args:
        model: the network. Only parameters that require a gradient now have a prior.
        num_data: number of training examples.
        terms_per_datum: how many terms of each datum your loss averages over. 1 is for a loss that is a mean over data
            only; a mean over tokens, pixels or outputs as well, as of `nn.MSELoss`, has as many as a datum has of them.
        variance: prior variance of every parameter.
        weight: 1 is Bayes; below 1 is a tempered posterior; may be changed at any time.
        warmup_steps: the weight rises linearly from 0 over this many calls of `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        *,
        terms_per_datum: int = 1,
        variance: float = density.OTHER_VARIANCE,
        weight: float = 1.0,
        warmup_steps: int = 0,
    ) -> None:
        rule = "must be the number of training examples, such as len(dataset), at least 1"
        _check(rule, lambda n: hasattr(n, "__index__") and n >= 1, num_data=num_data)
        check_counts(terms_per_datum=terms_per_datum)
        _check(*POSITIVE, variance=variance)
        _check(*NOT_NEGATIVE, weight=weight, warmup_steps=warmup_steps)
        self.model, self.num_data, self.terms_per_datum, self.variance = model, num_data, terms_per_datum, variance
        self.weight, self.warmup_steps, self.steps = weight, warmup_steps, 0
        self.weights: dict[str, FactorizedWeight] = {}
        """The weights that have a lambda, by the names of their layers; here none."""
        self.groups: list[Group] = []
        self.align_every, self._move = 0, density.newton_step
        self._others = _places(model, ())

    @property
    def current_weight(self) -> float:
        """The weight that `loss` applies now, warm-up included."""
        return self.weight * min(1.0, self.steps / self.warmup_steps) if self.warmup_steps else self.weight

    @property
    def _terms(self) -> int:
        return self.num_data * self.terms_per_datum

    @property
    def aligns_next(self) -> bool:
        """Whether the next `step` will align rank indices."""
        step, every = self.steps + 1, self.align_every
        return every > 0 and step % (max(every // EARLY, 1) if step < 2 * every else every) == 0

    def log_prob(self) -> Tensor:
        """``log p`` of all parameters and lambdas, unweighted, every constant included; differentiable."""
        own: list[Any] = [module._parameters[name] for module, name in self._others]
        found = density.exact(own)
        flat = [tensor.reshape(-1) for tensor in found if not is_sharded(tensor)]
        small = [tensor for tensor in flat if tensor.numel() <= SMALL]
        parts = [tensor for tensor in flat if tensor.numel() > SMALL] + ([torch.cat(small)] if small else [])
        sums = [part.square().sum() for part in parts] or [torch.zeros(())]
        if sharded := [tensor.square().sum() for tensor in found if is_sharded(tensor)]:
            sums.append(whole(reduce(torch.add, sharded)))
        entries = sum(tensor.numel() for tensor in found)
        others = -0.5 * (total(sums) / self.variance + entries * math.log(2 * math.pi * self.variance))
        return total([*(group.log_prob(self.variance) for group in self.groups), others])

    def loss(self, weight: Tensor | float | None = None) -> Tensor:
        """``-weight * log p / terms``, for a loss that is a mean over all terms; `weight` replaces `current_weight`."""
        return self.log_prob() * (-(self.current_weight if weight is None else weight) / self._terms)

    def step(self) -> None:
        """After the optimiser's step: hold the scales that are free, align if it is due, then move every lambda."""
        self.hold_()
        self.move_()

    @torch.no_grad()
    def hold_(self) -> None:
        """The first part of `step`, which changes cores."""
        align = self.aligns_next
        for group in self.groups:
            with own_precision(next(iter(group.weights.values())).cores[0]):
                group.hold_scale_()
                if align:
                    group.align_()
                    group.move_(density.newton_step, ALIGN_SWEEPS)
        self.steps += 1

    @torch.no_grad()
    def move_(self, due: Tensor | None = None) -> None:
        """The second part of `step`; if there is a tensor `due`, lambda stays where it is unless that is true."""

        def move(u: Tensor, *terms: Any) -> Tensor:
            moved = self._move(u, *terms)
            return moved if due is None else torch.where(due, moved, u)

        for group in self.groups:
            with own_precision(next(iter(group.weights.values())).cores[0]):
                group.move_(move)

    def lambdas(self) -> dict[str, list[Tensor]]:
        """``{layer name: [lambda of every bond]}``, as copies."""
        states = {name: weight.rank_state for name, weight in self.weights.items()}
        return {name: [u.exp() for u in state.log_lambdas] for name, state in states.items() if state}

    def remove_(self) -> None:
        """Remove lambda from the model: what remains is what a user deploys."""
        for weight in self.weights.values():
            weight.rank_state = None

    def state_dict(self) -> dict[str, Any]:
        """What the prior itself must remember to resume; lambda is in the model's ``state_dict``."""
        return {"steps": self.steps, "weight": self.weight, "warmup_steps": self.warmup_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved `state_dict`."""
        steps, weight, warmup = int(state["steps"]), float(state["weight"]), int(state["warmup_steps"])
        _check(*NOT_NEGATIVE, steps=steps, weight=weight, warmup_steps=warmup)
        self.steps, self.weight, self.warmup_steps = steps, weight, warmup


class RankPrior(NormalPrior):
    """Gaussian-Gamma prior on every factorised weight, Normal(0, `other_variance`) on every other trainable parameter.

    Used as `NormalPrior` is. Lambda is attached to the weights and saved in the model's ``state_dict``; a new prior on
    a loaded model continues with it. Freeze first what shall not train: a weight without a core that trains has none.
    A `CollapseWarning` says so, once, if the prior erases a weight.

    Args:
        a, b: shape and rate of the Gamma prior on every lambda.
        warmup_steps: None warms up the longer, the fewer data there are for the entries of the cores: 250 steps if as
            many, at most 1000.
        update: how `step` moves ``log lambda``: "newton" (to the conditional mode) or "gradient".
        floor: smallest lambda of a bond, relative to its largest.
        other_variance: prior variance of all parameters that are no cores, and of cores without bonds.
        hold_scale: names of the layers whose weight norm is held, because a normalisation behind them makes it free:
            one of PyTorch's, or a module with an attribute ``forgets_scale = True``. "auto" finds those, and warns
            where it cannot be sure; naming a layer vouches for it. The network computes the same.
        align_every: every so many steps, four times as often in the first two periods, rank indices are turned to the
            singular directions of their bonds: ranks are found sooner and more surely. 0 for never.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        *,
        terms_per_datum: int = 1,
        a: float = GAMMA_SHAPE,
        b: float = GAMMA_RATE,
        weight: float = 1.0,
        warmup_steps: int | None = None,
        update: str = "newton",
        floor: float = FLOOR,
        other_variance: float = density.OTHER_VARIANCE,
        hold_scale: str | Iterable[str] = "auto",
        align_every: int = 100,
    ) -> None:
        _check(*POSITIVE, a=a, b=b, other_variance=other_variance)
        _check(*NOT_NEGATIVE, align_every=align_every)
        _check(f"must be one of {tuple(UPDATES)}", UPDATES.__contains__, update=update)
        _check("is relative to the largest lambda and must lie in (0, 1)", lambda x: 0 < x < 1, floor=floor)
        super().__init__(
            model, num_data, terms_per_datum=terms_per_datum, variance=other_variance, weight=weight,
            warmup_steps=0 if warmup_steps is None else warmup_steps,
        )  # fmt: skip
        self.align_every, self._move, self.weights = align_every, UPDATES[update], factorized_weights(model)
        if not self.weights:
            raise ConfigError("The model has no factorised weight. Call bayestrain.tensorize_(model) first.")
        for name, p in model.named_parameters():
            if p.requires_grad and not (p.is_meta or nn.parameter.is_lazy(p) or bool(whole(p.isfinite().all()))):
                raise ConfigError(
                    f"Parameters must be finite, but {name!r} ({p.dtype}) has NaN or infinite entries. Initialise "
                    "the layer again; half precision is safer with model.float()."
                )
        self.held = layers_to_hold(model, self.weights, hold_scale)
        """The layers whose norm is held, each with the normalisations behind it."""
        for name, own in self.weights.items():
            state = own.attach_rank_state()
            state.a, state.b, state.floor = a, b, floor
            if name in self.held:
                state.held_norm.copy_(torch.where(state.held_norm > 0, state.held_norm, norm_of(own).detach()))
        trained = {name: own for name, own in self.weights.items() if any(core.requires_grad for core in own.cores)}
        if warmup_steps is None:
            sizes = [(own, own.attach_rank_state().start) for own in trained.values()]  # also of a compacted model
            ratio = sum(own.equation.entries(own.layout.sizes, start) for own, start in sizes) / self._terms
            self.warmup_steps = round(min(WARMUP * math.sqrt(ratio), LONGEST_WARMUP))
        self._others = _places(model, (core for own in trained.values() for core in own.cores))
        group = getattr(fast(), "group", Group)(trained, self.held)  # None where perf would not be faster
        rest = {name: own for name, own in trained.items() if group is None or name not in group.weights}
        self.groups = [own for own in (group, Group(rest, self.held)) if own is not None and own.weights]
        watched = (name for own in self.groups for name in own.trained if name not in self.held)
        self._watch, self._warned = Watch({name: self.weights[name] for name in watched}, self._others), False

    def hold_(self) -> None:
        """As for every prior; of the first steps every tenth, and then every hundredth looks for vanished weights."""
        aligned = self.aligns_next
        super().hold_()
        if self._warned or not self._watch.due(self.steps, aligned) or traced() or transformed():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        terms = self._terms / self.current_weight if self.current_weight else math.inf
        if lost := self._watch.look(self.steps, terms):
            self._warned = True
            warnings.warn(
                f"The prior is erasing the weight of {', '.join(map(repr, lost))}: after {self.steps} steps hardly any "
                f"of its norm is left. It counts {self.num_data} data with terms_per_datum={self.terms_per_datum}. If "
                "the loss is a mean over outputs, tokens or pixels, too, set terms_per_datum to their number. If not, "
                f"raise warmup_steps, now {self.warmup_steps}, or lower weight, now {self.weight:g}.",
                CollapseWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "watch": self._watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        watch = copy.copy(self._watch)
        if "watch" in state:  # that of a `NormalPrior` has none
            watch.load_state_dict(state["watch"])
        super().load_state_dict(state)
        self._watch = watch


def _places(model: nn.Module, without: Iterable[Tensor]) -> list[tuple[nn.Module, str]]:
    """Where each trainable parameter is stored, except some; looking them up by name in every step would be slow."""
    known = {id(parameter) for parameter in without}
    places = ((p, module, name) for module in model.modules() for name, p in module._parameters.items())
    found = {id(p): (module, name) for p, module, name in places if p is not None and p.requires_grad}
    return [place for number, place in found.items() if number not in known]


def _check(rule: str, fits: Callable[[Any], bool], **values: object) -> None:
    for name, value in values.items():
        if not fits(value):
            raise ConfigError(f"{name} {rule}, got {value!r}.")


def check_weight_decay(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Warn if an optimiser applies weight decay to cores: it pulls all ranks down alike, on top of the prior."""
    decayed = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    found = factorized_weights(model).items()
    if names := [name for name, weight in found if any(id(core) in decayed for core in weight.cores)]:
        warnings.warn(
            f"The optimiser applies weight decay to the cores of {', '.join(names)}, which the prior already shrinks. "
            "Give them a group of their own: cores = [p for n, p in model.named_parameters() if 'cores.' in n]; "
            f"{type(optimizer).__name__}([{{'params': cores, 'weight_decay': 0.0}}, {{'params': others}}], ..).",
            DecayWarning,
            stacklevel=2,
        )
