"""`compact_`: cut the ranks that do not matter, a physically smaller model out."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bayestrain import shrinkage, tt
from bayestrain.batchnorm import normalised_layers
from bayestrain.errors import ConfigError
from bayestrain.layers import TTLayer
from bayestrain.layers.base import own_precision
from bayestrain.sizes import count_parameters, tt_layers
from bayestrain.tables import text_table
from bayestrain.target import check_finite, check_parameters, sized, weight_share

RULES = ("rounding", "contribution", "lambda")
DEFAULT_TOL = 1e-2
VANISHED = 1e-3
"""Norm of a weight, per root of its outputs, below which its layer probably passes nothing on; random starts have 1."""


@dataclass(frozen=True)
class CompactedLayer:
    """One row of a `CompactReport`; `error` is the relative change of the layer's weight, as measured."""

    name: str
    ranks_before: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters_before: int
    parameters: int
    error: float


@dataclass(frozen=True)
class CompactReport:
    """What `compact_` did. Prints as a table, with advice where something looks wrong."""

    rule: str
    tol: float
    layers: tuple[CompactedLayer, ...]
    parameters_before: int
    parameters: int
    notes: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether any rank fell."""
        return any(layer.ranks != layer.ranks_before for layer in self.layers)

    @property
    def change(self) -> float:
        """The largest relative change of a layer's weight."""
        return max(layer.error for layer in self.layers)

    def then(self, later: "CompactReport") -> "CompactReport":
        """This and the one after it as one; of their changes of a weight the larger."""
        rows = [
            replace(after, ranks_before=row.ranks_before, parameters_before=row.parameters_before,
                    error=max(row.error, after.error))
            for row, after in zip(self.layers, later.layers, strict=True)
        ]  # fmt: skip
        notes = tuple(dict.fromkeys((*self.notes, *later.notes)))
        return replace(later, layers=tuple(rows), parameters_before=self.parameters_before, notes=notes)

    def __str__(self) -> str:
        rows = [
            [row.name, " ".join(map(str, row.ranks_before)), " ".join(map(str, row.ranks)),
             f"{row.parameters_before:,}", f"{row.parameters:,}", f"{row.error:.1e}"]
            for row in self.layers
        ]  # fmt: skip
        rows.append(["whole model", "", "", f"{self.parameters_before:,}", f"{self.parameters:,}", ""])
        header = ["layer", "ranks before", "ranks", "parameters before", "parameters", "error"]
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return text_table(header, rows, left_columns=3) + notes


@torch.no_grad()
def compact_(
    model: nn.Module,
    tol: float | None = None,
    rule: str = "rounding",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    parameters: int | None = None,
) -> CompactReport:
    """Cut the ranks that do not matter and make the cores physically smaller, in place.

    Parameters keep their identity. A rank is never below 1. Calling it again on unchanged weights does nothing.

    Args:
        model: a model with TT layers.
        tol: for "rounding" (default 1e-2) and "contribution" (default 1e-2) the relative error, in Frobenius norm, that
            each layer's weight may suffer; for "lambda" (default 1e-2) the absolute threshold.
        rule:
            "rounding": TT rounding. Needs no lambda, sees only the weight, finds the smallest ranks for the tolerance.
            It mixes the rank indices, so an optimiser's state for the cores cannot be kept.
            "contribution": drops the rank indices whose exact contribution to the weight fits the tolerance. Keeps the
            other slices as they are, so training goes on with the optimiser's state.
            "lambda": the paper's rule, lambda above a threshold. Not the default, because lambda's scale is a gauge:
            multiplying a core by c and its neighbour by 1/c leaves the network as it is and moves every lambda, so an
            absolute threshold may cut a bond that matters (it keeps at least rank 1) and promises no error.
        optimizer: the optimiser that holds the cores, needed if it is to go on: without it, its state keeps the old
            shapes and its next step fails within PyTorch. With "contribution" and "lambda" its state is sliced along,
            with "rounding" the state of the cores that changed starts anew.
        parameters: instead of a tolerance, for "rounding": how many the model may have. Ranks are cut, in whatever
            layers, where that changes the weights least; a model that is small enough stays as it is.
    """
    tol = checked_tol(tol, rule, parameters)
    layers = tt_layers(model)
    if not layers:
        raise ConfigError("The model has no tensor-train layer to compact. Call bayestrain.tensorize_(model) first.")
    for name, layer in layers.items():
        check_finite(name, layer)
    with own_precision(next(iter(layers.values())).cores[0]):
        if parameters is None:
            plans = {name: _plan(name, layer, rule, tol) for name, layer in layers.items()}
        else:
            ranks = sized(model, parameters).ranks
            plans = {name: _plan_rounding(layer, 0.0, ranks[name]) for name, layer in layers.items()}
    if optimizer is not None:
        _check_optimizer(optimizer, plans, layers)

    before = count_parameters(model)
    rows = []
    for name, layer in layers.items():
        ranks_before, parameters_before = layer.ranks, layer.parameters_left
        plans[name].apply(layer, optimizer)
        if parameters is None:
            layer.compacted = (rule, tol, _seen(layer, rule))
        rows.append(
            CompactedLayer(name, ranks_before, layer.ranks, parameters_before, layer.parameters_left, plans[name].error)
        )
    collapsed = [collapse(name, bond, tol) for name, plan in plans.items() for bond in plan.collapsed]
    norms = {name: [float(tt.norm([core.double() for core in layer.cores]))] for name, layer in layers.items()}
    gone = {name: vanished_note(name) for name in vanished(model, norms)}
    steps = "check that prior.loss() is in the loss and prior.step() is called after each optimiser step, "
    found = advice(rows, rule, cut_before(layers), gone, steps, to_size=parameters is not None)
    notes = (*collapsed, *gone.values(), *found)
    return CompactReport(rule, tol, tuple(rows), before, count_parameters(model), notes)


def checked_tol(tol: float | None, rule: str, parameters: int | None) -> float:
    """The tolerance, or the default one; raises if there is no such rule or it takes no such tolerance or size."""
    if rule not in RULES:
        raise ConfigError(f"rule must be one of {RULES}, got {rule!r}.")
    if parameters is not None:
        check_parameters(parameters)
        if tol is not None or rule != "rounding":
            raise ConfigError(f"parameters= is instead of tol and for rule='rounding', got tol={tol}, rule={rule!r}.")
        return 0.0
    tol = DEFAULT_TOL if tol is None else tol
    if not (0.0 <= tol < 1.0 or (rule == "lambda" and tol >= 0.0)):
        hint = f" If {tol} is how many parameters there may be, say parameters={tol}." if tol >= 1 else ""
        raise ConfigError(f"tol must lie in [0, 1), got {tol}.{hint}")
    return tol


@dataclass
class _Plan:
    """New cores for one layer; `keep` holds the surviving rank indices of every bond, if the rule slices."""

    cores: list[Tensor]
    error: float
    keep: list[Tensor] | None = None
    collapsed: Sequence[int] = ()
    """Bonds that kept rank 1 though no lambda is above the threshold."""

    def apply(self, layer: TTLayer, optimizer: torch.optim.Optimizer | None) -> None:
        parameters = list(layer.cores)
        changed = [p.shape != new.shape for p, new in zip(parameters, self.cores, strict=True)]
        if not any(changed):
            return
        grads = [p.grad for p in parameters]
        layer.set_cores(self.cores)
        state = layer.rank_state
        if self.keep is None:
            for parameter in parameters:
                parameter.grad = None
                if optimizer is not None:
                    restart_state(optimizer, parameter)
            if state is not None:
                for bond, core in enumerate(self.cores[1:], start=1):
                    state.set_log_lambda(bond, core.new_zeros(core.shape[0]))
                modes = shrinkage.conditional_mode(
                    self.cores, state.log_lambdas, state.a, state.b, state.floor, sweeps=50, dropped=state.dropped
                )
                for bond, u in enumerate(modes, start=1):
                    state.set_log_lambda(bond, u)
            return
        for k, parameter in enumerate(parameters):
            if grads[k] is not None:
                parameter.grad = self._slice(k, grads[k])
            if optimizer is not None:
                own = optimizer.state.get(parameter, {})
                for key, value in own.items():
                    if isinstance(value, Tensor) and value.ndim == parameter.ndim:
                        own[key] = self._slice(k, value)
        if state is not None:
            for bond, (u, kept) in enumerate(zip(state.log_lambdas, self.keep, strict=True), start=1):
                state.set_log_lambda(bond, u.index_select(0, kept))

    def _slice(self, k: int, tensor: Tensor) -> Tensor:
        """Cut a tensor shaped like core k to the surviving rank indices on both sides."""
        assert self.keep is not None
        if k > 0:
            tensor = tensor.index_select(0, self.keep[k - 1])
        return tensor.index_select(-1, self.keep[k]) if k < len(self.keep) else tensor


def restart_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Forget what an optimiser knows of a parameter that has a new shape."""
    known = optimizer.state.pop(parameter, {})
    if isinstance(optimizer, torch.optim.SGD) and known.get("momentum_buffer") is not None:
        # Fused SGD wants a buffer of all parameters or of none; one of zeros does what none does, without dampening.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _plan_rounding(layer: TTLayer, tol: float, ranks: Sequence[int] | None = None) -> _Plan:
    """New cores of one layer, rounded with a tolerance, to given ranks at most."""
    cores = [core.detach() for core in layer.cores]
    if ranks is not None and tuple(ranks) == layer.ranks:
        return _Plan(cores, 0.0)
    exact = [core.double() for core in cores]
    rounded = tt.round_cores(exact, tol * weight_share(layer, exact), None if ranks is None else ranks[1:-1])
    new = [core.to(old.dtype) for core, old in zip(rounded, cores, strict=True)]
    return _Plan(cores, 0.0) if tt.ranks(new) == layer.ranks else _Plan(new, relative_error(layer, exact, new))


def _plan(name: str, layer: TTLayer, rule: str, tol: float) -> _Plan:
    """Decide the new cores of one layer without touching it."""
    cores = [core.detach() for core in layer.cores]
    if layer.compacted == (rule, tol, _seen(layer, rule)):
        return _Plan(cores, 0.0)
    if rule == "rounding":
        return _plan_rounding(layer, tol)
    exact = [core.double() for core in cores]
    collapsed: list[int] = []
    if rule == "contribution":
        keep = _kept_by_contribution(exact, tol * weight_share(layer, exact))
    else:
        if layer.rank_state is None:
            raise ConfigError(
                f"rule='lambda' needs lambda and layer {name!r} has none. "
                "Train with a RankPrior, or use rule='rounding'."
            )
        keep = []
        for bond, u in enumerate(layer.rank_state.log_lambdas, start=1):
            kept = (u.exp() > tol).nonzero().flatten()
            if len(kept) == 0:
                kept = u.argmax()[None]
                collapsed.append(bond)
            keep.append(kept)
    new = cores
    for bond, kept in enumerate(keep, start=1):
        new = tt.slice_bond(new, bond, kept)
    return _Plan(new, relative_error(layer, exact, new), keep, collapsed)


def _kept_by_contribution(cores: Sequence[Tensor], tol: float) -> list[Tensor]:
    """Rank indices to keep, bond after bond, such that all that is dropped has a norm of at most ``tol * norm``.

    The errors of different bonds add at worst, so each bond may use an equal share of the tolerance.
    """
    budget = tol * float(tt.norm(cores)) / max(len(cores) - 1, 1)
    keep: list[Tensor] = []
    for bond in range(1, len(cores)):
        order, dropped = tt.drop_order(cores, bond)
        count = min(int((dropped <= budget).sum()), len(order) - 1)
        kept = order[count:].sort().values
        keep.append(kept)
        cores = tt.slice_bond(cores, bond, kept)
    return keep


def relative_error(layer: TTLayer, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """Relative change of the layer's weight, in double precision; without forming it, unless the modes are padded."""
    new = [core.double() for core in new]
    if layer.is_padded:
        weight = layer.dense_weight(old)
        size, change = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(weight - layer.dense_weight(new))
    else:
        size, change = tt.norm(old), tt.norm(tt.subtract(old, new))
    return float(change / size) if size > 0 else 0.0


def _seen(layer: TTLayer, rule: str) -> tuple[float, ...]:
    lambdas = layer.rank_state.log_lambdas if rule == "lambda" and layer.rank_state is not None else []
    return fingerprint((*layer.cores, *lambdas))


def fingerprint(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Numbers that change when anything changes that a rule looks at."""
    exact = (tensor.detach().double() for tensor in tensors)
    return tuple(float(value) for tensor in exact for value in (tensor.sum(), tensor.square().sum()))


def _check_optimizer(optimizer: torch.optim.Optimizer, plans: dict[str, _Plan], layers: dict[str, TTLayer]) -> None:
    """Refuse before any change what could not be carried along."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS keeps one flat vector for all parameters, which cannot follow their new shapes. "
            "Compact without optimizer=, then make a new one."
        )
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, layer in layers.items():
        for k, core in enumerate(layer.cores):
            if core.requires_grad and id(core) not in known:
                raise ConfigError(
                    f"The optimiser does not hold core {k} of layer {name!r}. Pass the one that trains it."
                )
            if plans[name].keep is None:
                continue
            for key, value in optimizer.state.get(core, {}).items():
                if isinstance(value, Tensor) and value.ndim > 0 and value.shape != core.shape:
                    raise ConfigError(
                        f"The optimiser's state {key!r} for core {k} of layer {name!r} has shape {tuple(value.shape)}, "
                        f"not the core's {tuple(core.shape)}, and cannot be sliced. Use rule='rounding', which starts "
                        "the state anew."
                    )


def cut_before(layers: Mapping[str, TTLayer]) -> bool:
    """Whether ranks have fallen already."""
    return any(any(layer.rank_state.dropped) for layer in layers.values() if layer.rank_state is not None)


def collapse(name: str, bond: int, threshold: float) -> str:
    """The note on a bond that a threshold on lambda would have emptied."""
    return (
        f"bond {bond} of {name!r} collapsed: no lambda is above {threshold}, rank 1 was kept. An absolute threshold "
        "depends on the gauge; use rule='rounding'."
    )


def vanished(model: nn.Module, norms: Mapping[str, Sequence[float]]) -> dict[str, list[int]]:
    """Layers with lambda whose weights, one per particle, are as good as none, and in which particles; given norms.

    In front of a batch norm the size of a weight says nothing.
    """
    layers = tt_layers(model)
    found = {
        name: [i for i, norm in enumerate(each) if norm < VANISHED * math.sqrt(layers[name].outputs)]
        for name, each in norms.items()
        if layers[name].rank_state is not None
    }
    if not any(found.values()):
        return {}
    free = normalised_layers(model)
    return {
        name: which for name, which in found.items() if which and name not in free.seen and name not in free.doubtful
    }


def vanished_note(name: str, where: str = "") -> str:
    """The note on a layer whose weight is all but zero, perhaps in some particles only."""
    return (
        f"the weight of {name!r} has shrunk to almost nothing{where}. Probably the prior outweighed the data before "
        "they could have an effect: let it come in slowly (warmup_steps of RankPrior, prior.warmup_epochs of a run), "
        "or lower its weight."
    )


def advice(
    rows: Sequence[CompactedLayer], rule: str, earlier: bool, gone: Container[str] = (), steps: str = "",
    *, to_size: bool = False,
) -> list[str]:  # fmt: skip
    """What to try where ranks did not move, though none fell `earlier`, or fell to 1; `steps` to check come first.

    Of layers that are `gone`, the weight of the prior is not to rise, and their ranks are no matter. Where a cut is
    `to_size`, ranks that did not move were small enough.
    """
    notes = []
    moved = earlier or to_size or any(row.ranks != row.ranks_before for row in rows)
    if not moved and any(max(row.ranks) > 1 for row in rows):
        weight = "" if any(row.name in gone for row in rows) else " or with a larger prior weight"
        notes.append(f"no rank moved. Train longer{weight}, {steps}or raise tol.")
    if rule != "lambda":
        remedy = "allow more parameters" if to_size else "lower the prior weight"
        notes += [
            f"layer {row.name!r} collapsed to rank 1 at every bond. If accuracy fell, {remedy}."
            for row in rows
            if max(row.ranks) == 1 < max(row.ranks_before) and row.name not in gone
        ]
    return notes
