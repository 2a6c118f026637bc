"""`RankPrior`: the prior over a model's weights that lets tensor-train ranks choose themselves."""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayestrain import shrinkage, tt
from bayestrain.batchnorm import normalised_layers
from bayestrain.bonds import copy_, join, pieces
from bayestrain.errors import ConfigError, HoldWarning
from bayestrain.grouped import Group, Groups, Scale
from bayestrain.layers import TTLayer
from bayestrain.layers.base import own_precision
from bayestrain.sizes import tt_layers

UPDATES = ("newton", "gradient")

RATE = 0.1
"""Step size of the gradient update."""

ALIGN_SWEEPS = 5
"""Newton steps of every lambda after an alignment; those of the steps to come do the rest."""


class Gradients(NamedTuple):
    """A prior's loss and the gradients of it."""

    loss: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]

    def add_(self) -> Tensor:
        """Add the gradients to the parameters' ``grad``; returns the loss."""
        add_to_gradients_(self.parameters, self.gradients)
        return self.loss


class RankPrior:
    """Gaussian-Gamma prior on every TT layer, Normal(0, `other_variance`) on every other trainable parameter.

    Use it in any training loop::

        loss = F.cross_entropy(model(x), y) + prior.loss()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        prior.step()

    Args:
        model: a model with TT layers. ``log lambda`` is attached to them and saved in the model's ``state_dict``.
            Freeze what shall not train before: only parameters that require a gradient now have a prior.
        num_data: number of training data; the prior is divided by it, because the loss is a mean over data.
        a, b: shape and rate of the Gamma prior on every lambda.
        weight: 1 is Bayes; below 1 is a tempered posterior; may be changed at any time.
        warmup_steps: the weight rises linearly from 0 over this many calls of `step`.
        update: how `step` moves ``log lambda``: "newton" (to the conditional mode) or "gradient".
        rate: step size of the gradient update, by default 0.1; Newton's has none.
        floor: smallest lambda of a bond, relative to its largest.
        other_variance: prior variance of all parameters outside of TT cores.
        start: value every lambda starts with.
        hold_scale: names of the layers whose weight norm is held, because a batch norm behind them makes it free;
            "auto" finds those of which that can be seen, and warns of others. Their cores are rescaled together, with
            lambda, the bias and the running statistics of the batch norm found behind them, so that the network
            computes the same. (In half precision by powers of two, for all else would be rounded.) Naming a layer
            vouches for it, and for a batch norm registered right behind it where the network cannot be traced; where
            none is found, only the layer itself is rescaled.
        align_every: every so many steps the rank indices of all layers are turned to the singular directions of their
            bonds (`gauge.align`), where lambda can see single singular values. The network does not change; ranks are
            found sooner and more surely. 0 switches it off.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        *,
        a: float = shrinkage.GAMMA_SHAPE,
        b: float = shrinkage.GAMMA_RATE,
        weight: float = 1.0,
        warmup_steps: int = 0,
        update: str = "newton",
        rate: float | None = None,
        floor: float = shrinkage.FLOOR,
        other_variance: float = 100.0,
        start: float = 1.0,
        hold_scale: str | Iterable[str] = "auto",
        align_every: int = 100,
    ) -> None:
        if not hasattr(num_data, "__index__") or num_data < 1:
            raise ConfigError(
                f"num_data must be the number of training data, at least 1, got {num_data!r}. Try len(train)."
            )
        if update not in UPDATES:
            raise ConfigError(f"update must be one of {UPDATES}, got {update!r}.")
        if rate is not None and update != "gradient":
            raise ConfigError(f"rate is the step size of update 'gradient', {update!r} has none. Leave it out.")
        rate = RATE if rate is None else rate
        for name, value in (("a", a), ("b", b), ("rate", rate), ("other_variance", other_variance), ("start", start)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be positive, got {value}.")
        for name, value in (("weight", weight), ("warmup_steps", warmup_steps), ("align_every", align_every)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} cannot be negative, got {value}.")
        if abs(math.log(start)) > shrinkage.LIMIT:
            limit = f"{shrinkage.LIMIT:g}"
            raise ConfigError(f"start must lie between exp(-{limit}) and exp({limit}), got {start}.")
        if not 0 < floor < 1:
            raise ConfigError(f"floor is relative to the largest lambda and must lie in (0, 1), got {floor}.")
        layers = tt_layers(model)
        if not layers:
            raise ConfigError("The model has no tensor-train layer. Call bayestrain.tensorize_(model) first.")
        norms = _norms_to_hold(model, layers, hold_scale)

        self.model = model
        self.num_data = num_data
        self.a, self.b = a, b
        self.weight = weight
        self.warmup_steps = warmup_steps
        self.update = update
        self.rate = rate
        self.floor = floor
        self.other_variance = other_variance
        self.layers = layers
        self.trainable = trainable_names(model)
        self.held = norms
        self.align_every = align_every
        self.steps = 0
        cores = {id(core) for layer in layers.values() for core in layer.cores}
        self._other_names = self.trainable - {name for name, p in model.named_parameters() if id(p) in cores}
        trained = frozenset(
            name
            for name, layer in layers.items()
            if all(f"{name}.cores.{k}".lstrip(".") in self.trainable for k in range(len(layer.cores)))
        )
        with torch.no_grad():
            for name, layer in layers.items():
                fresh = layer.rank_state is None
                state = layer.attach_rank_state()
                state.a, state.b, state.floor = a, b, floor
                for u in state.log_lambdas if fresh else ():
                    u.fill_(math.log(start))
                if name in norms:  # the norm of now, unless one is held already
                    held = state.held_norm
                    held.copy_(torch.where(held > 0, held, tt.norm(list(layer.cores))))
        self._groups = Groups(layers, trained, frozenset(norms))

    @property
    def current_weight(self) -> float:
        """The weight that `loss` applies now, warm-up included."""
        return self.weight * min(1.0, self.steps / self.warmup_steps) if self.warmup_steps else self.weight

    @property
    def aligns_next(self) -> bool:
        """Whether the next `step` will align the rank indices."""
        return self.align_every > 0 and (self.steps + 1) % self.align_every == 0

    def log_prob(self) -> Tensor:
        """``log p`` of all parameters and lambdas, unweighted, every constant included."""
        terms = []
        for group in self._now():
            flat, u = join(group.cores), join(group.log_lambdas)
            terms.append(group.bonds.log_prob(flat, group.bonds.precision(u), u, self.a, self.b))
        if others := self._others():
            terms.append(normal_log_prob(others, self.other_variance))
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def _others(self) -> list[Tensor]:
        """The trainable parameters that are no cores."""
        return [parameter for name, parameter in self.model.named_parameters() if name in self._other_names]

    def loss(self) -> Tensor:
        """``-weight * log p / num_data``, to be added to a loss that is a mean over data."""
        return self.log_prob() * (-self.current_weight / self.num_data)

    @torch.no_grad()
    def gradients(self, weight: Tensor | float | None = None) -> Gradients:
        """The loss, and its gradients in closed form, for a loop without `loss`: ``prior.gradients().add_()``.

        `weight` stands in for `current_weight`: a tensor, where a captured step must see it change.
        """
        scale = (self.current_weight if weight is None else weight) / self.num_data
        terms, parameters, gradients = [], [], []
        for group in self._now():
            flat, u = join(group.cores), join(group.log_lambdas)
            precision = group.bonds.precision(u)
            terms.append(group.bonds.log_prob(flat, precision, u, self.a, self.b))
            gradient = (flat * precision * scale).to(group.cores[0].dtype)
            parameters += group.cores
            gradients += pieces(gradient, group.cores)
        if others := self._others():
            terms.append(normal_log_prob(others, self.other_variance))
            parameters += others
            gradients += torch._foreach_mul(others, scale / self.other_variance)
        loss = torch.stack([term.to(terms[0].device) for term in terms]).sum() * -scale
        return Gradients(loss, parameters, gradients)

    @torch.no_grad()
    def move_lambdas_(self) -> None:
        """Move every lambda towards where the cores want it; a part of `step` for loops that do it elsewhere."""
        for group in self._now():
            with own_precision(group.cores[0]):
                u = group.bonds.moved(join(group.cores), join(group.log_lambdas), self._move, self.a, self.floor)
                copy_(group.log_lambdas, pieces(u, group.log_lambdas))

    @torch.no_grad()
    def scales(self) -> list[Scale | None]:
        """What `step` would hold the scales with now; for loops that work it out beside something else."""
        return [group.scale() if group.layout.held else None for group in self._now()]

    @torch.no_grad()
    def step(self, move: bool = True, scales: Sequence[Scale | None] | None = None) -> None:
        """After the optimiser's step: hold the scales that are free, then move every lambda.

        A loop that has moved lambda itself (`move_lambdas_`) says so; one that has taken `scales` before the
        optimiser's step gives them.
        """
        align = self.aligns_next
        self.steps += 1
        groups = self._now()
        for group, scale in zip(groups, scales or [None] * len(groups), strict=True):
            with own_precision(group.cores[0]):
                group.hold_scale_(self.held, scale)
                if align:
                    group.align_(partial(shrinkage.newton_step, b=self.b), self.a, self.floor, ALIGN_SWEEPS)
        if move:
            self.move_lambdas_()

    def _move(self, u: Tensor, linear: Tensor, inverse: Tensor, inverse_square: Tensor) -> Tensor:
        if self.update == "newton":
            return shrinkage.newton_step(u, linear, inverse, inverse_square, self.b)
        return shrinkage.gradient_step(u, linear, inverse, inverse_square, self.b, self.rate)

    def lambdas(self) -> dict[str, list[Tensor]]:
        """``{layer name: [lambda of every bond]}``, as copies."""
        return {
            name: [u.detach().exp() for u in layer.rank_state.log_lambdas]
            for name, layer in self.layers.items()
            if layer.rank_state is not None
        }

    def remove_(self) -> None:
        """Take lambda off the model: what is left is what a user deploys."""
        for layer in self.layers.values():
            layer.rank_state = None

    def _now(self) -> list[Group]:
        if any(layer.rank_state is None for layer in self.layers.values()):
            raise ConfigError("The model has lost its lambda: the prior was removed. Make a new RankPrior to go on.")
        return self._groups.now()

    def state_dict(self) -> dict[str, Any]:
        """What the prior itself must remember to go on; lambda is in the model's ``state_dict``."""
        return {"steps": self.steps, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved `state_dict`."""
        self.steps, self.weight = int(state["steps"]), float(state["weight"])


class NormalPrior:
    """Normal(0, `variance`) on every trainable parameter: for dense networks, and for given ranks.

    Used as `RankPrior` is; there is no lambda, so `step` only counts.
    """

    def __init__(self, model: nn.Module, num_data: int, *, variance: float = 100.0, weight: float = 1.0) -> None:
        if not (math.isfinite(variance) and variance > 0):
            raise ConfigError(f"variance must be positive, got {variance}.")
        self.model, self.num_data, self.variance, self.weight = model, num_data, variance, weight
        self.trainable = trainable_names(model)
        self.aligns_next = False
        self.steps = 0

    @property
    def current_weight(self) -> float:
        """The weight that `loss` applies."""
        return self.weight

    def log_prob(self) -> Tensor:
        """``log p`` of all parameters, unweighted, every constant included."""
        return normal_log_prob(self._chosen(), self.variance)

    def _chosen(self) -> list[Tensor]:
        return [parameter for name, parameter in self.model.named_parameters() if name in self.trainable]

    def loss(self) -> Tensor:
        """``-weight * log p / num_data``, to be added to a loss that is a mean over data."""
        return self.log_prob() * (-self.current_weight / self.num_data)

    @torch.no_grad()
    def gradients(self, weight: Tensor | float | None = None) -> Gradients:
        """As for `RankPrior`."""
        scale, chosen = (self.current_weight if weight is None else weight) / self.num_data, self._chosen()
        return Gradients(self.log_prob() * -scale, chosen, [*torch._foreach_mul(chosen, scale / self.variance)])

    def move_lambdas_(self) -> None:
        """There are none."""

    def scales(self) -> list[Scale | None]:
        """There are none to hold."""
        return []

    def step(self, move: bool = True, scales: Sequence[Scale | None] | None = None) -> None:  # noqa: ARG002
        """After the optimiser's step: nothing to move."""
        self.steps += 1

    def lambdas(self) -> dict[str, list[Tensor]]:
        """There are none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the prior itself must remember to go on."""
        return {"steps": self.steps, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved `state_dict`."""
        self.steps, self.weight = int(state["steps"]), float(state["weight"])


Prior = RankPrior | NormalPrior


SMALL = 1 << 16
"""Tensors up to this size are joined before they are summed; copying larger ones would cost more than it saves."""


def normal_log_prob(tensors: Sequence[Tensor], variance: float) -> Tensor:
    """``log Normal(0, variance)`` of all entries together."""
    small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
    parts = [tensor for tensor in tensors if tensor.numel() > SMALL] + ([join(small)] if small else [])
    squares = torch.stack([part.square().sum() for part in parts]).sum()
    entries = sum(tensor.numel() for tensor in tensors)
    return -0.5 * (squares / variance + entries * math.log(2 * math.pi * variance))


def add_to_gradients_(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``grad += gradient`` for every parameter that requires one; it may stand there several times."""
    there: dict[int, tuple[Tensor, Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        elif id(parameter) in there:
            parameter.grad.add_(gradient)
        else:
            there[id(parameter)] = parameter.grad, gradient
    if there:
        torch._foreach_add_(*map(list, zip(*there.values(), strict=True)))


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The parameters that train, by name: they still have it when particles stand in for them."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def _norms_to_hold(
    model: nn.Module, layers: dict[str, TTLayer], hold_scale: str | Iterable[str]
) -> dict[str, list[_BatchNorm]]:
    """The layers to hold, each with the batch norms behind it."""
    normalised = normalised_layers(model)
    found = {**normalised.doubtful, **normalised.seen}
    if hold_scale == "auto":
        wanted = set(normalised.seen)
        if doubtful := [name for name in layers if name in normalised.doubtful]:
            warnings.warn(
                f"Whether batch norms alone see the outputs of {', '.join(doubtful)} could not be seen, so their scale "
                f"is not held. If they do, name them: hold_scale={[name for name in layers if name in found]}.",
                HoldWarning,
                stacklevel=3,
            )
    else:
        wanted = {hold_scale} if isinstance(hold_scale, str) else set(hold_scale)
        if unknown := wanted - set(layers):
            raise ConfigError(f"hold_scale names no TT layer: {sorted(unknown)}. There are {sorted(layers)}.")
    held: dict[str, list[_BatchNorm]] = {}
    for name in layers:
        if name in wanted:
            norms = (model.get_submodule(norm_name) for norm_name in found.get(name, []))
            held[name] = [norm for norm in norms if isinstance(norm, _BatchNorm)]
    return held
