"""`compact_`: cut ranks, make the cores physically smaller, and report it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn

from bayestrain.compact.rules import cheapest_ranks, cut, priced
from bayestrain.compact.weights import Particles, Weight, find_weights
from bayestrain.errors import ConfigError, check_counts
from bayestrain.nn.sizes import count_parameters
from bayestrain.prior import check_weight_decay
from bayestrain.tables import text_table

RULES = ("rounding", "contribution", "lambda")

VANISHED = 1e-3  # norm per root of outputs of a weight that probably passes nothing on; random starts have 1


@dataclass(frozen=True)
class CompactedLayer:
    """One row of a `CompactReport`; `error` is the relative change of the weight (root mean square over particles)."""

    name: str
    ranks_before: tuple[int, ...]
    ranks: tuple[int, ...]
    parameters_before: int
    parameters: int
    error: float = 0.0


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

    def then(self, later: Self) -> Self:
        """This report merged with a later one; of two changes of a weight it keeps the larger."""
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
    model: nn.Module | Particles,
    tol: float | None = None,
    *,
    parameters: int | None = None,
    rule: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> CompactReport:
    """Cut the ranks that do not matter and make the cores physically smaller, in place.

    Parameters keep their identity. A rank is never below 1. Calling it again on unchanged weights does nothing. In a
    posterior, every particle keeps rank indices of its own, but all have the same ranks.

    Args:
        model: a network with factorised weights, or a `Posterior`, whose own optimiser follows.
        tol: the largest relative error of each layer's weight in Frobenius norm (root mean square over particles); for
            "lambda" the absolute threshold. Default 1e-2.
        parameters: instead of a tolerance, how many parameters the model (each particle) may have. Ranks are cut in
            those layers where that changes the weights least.
        rule: None is "rounding" where the format can; other formats are cut by contribution, then fitted again.
            "rounding" finds the smallest ranks, but mixes rank indices: the optimiser's state of the cores restarts.
            "contribution" drops the rank indices whose exact contribution to the weight fits the tolerance. The others
            stay as they are, so training continues with the optimiser's state.
            "lambda" is the paper's rule, lambda above a threshold. It depends on the gauge (a core times c, the next
            one divided by c), so it may cut a bond that matters.
        optimizer: the optimiser that holds the cores, if it is to continue; the next step of any other raises an error.
    """
    if optimizer is None and not isinstance(model, nn.Module) and hasattr(model, "compact_"):
        return model.compact_(tol, parameters=parameters, rule=rule)  # type: ignore[no-any-return]  # with its optimiser
    tol = _checked_tol(tol, rule, parameters)
    template, weights = find_weights(model)
    if optimizer is not None and any(weight.module.rank_state for weight in weights):
        check_weight_decay(optimizer, template)
    size = count_parameters(template)
    if parameters is None:
        cuts = [None if w.module.compacted == (rule, tol, w.fingerprint(rule)) else cut(w, rule, tol) for w in weights]
    else:
        ranks = [weight.module.ranks for weight in weights]
        if size > parameters:
            others = size - sum(weight.module.numel for weight in weights)
            ranks = cheapest_ranks([priced(weight, rule) for weight in weights], others, parameters)
        cuts = [None if to == w.module.ranks else cut(w, rule, tol, to) for w, to in zip(weights, ranks, strict=True)]
    rows = []
    for weight, found in zip(weights, cuts, strict=True):
        module, before, entries = weight.module, weight.module.ranks, weight.module.numel
        if found is not None:
            weight.write(found.cores, found.keep, optimizer)
        error = found.error if found and module.ranks != before else 0.0
        rows.append(CompactedLayer(weight.name, before, module.ranks, entries, module.numel, error))
        if parameters is None:
            module.compacted = (rule, tol, weight.fingerprint(rule))
    notes = _notes(weights, rows, rule, tol, parameters is not None)
    return CompactReport(rule or "default", tol, tuple(rows), size, count_parameters(template), notes)


def _notes(
    weights: Sequence[Weight], rows: Sequence[CompactedLayer], rule: str | None, tol: float, budget: bool
) -> tuple[str, ...]:
    notes, moved = [], False
    for weight, row in zip(weights, rows, strict=True):
        state = weight.module.rank_state
        moved |= row.ranks != (state.start if state else row.ranks_before)
        # Without a prior no weight vanishes, and before a normalisation the size of a weight means nothing.
        judged = state is not None and not state.held_norm > 0
        vanished = int((weight.norms < VANISHED * weight.layout.shape[0] ** 0.5).sum()) if judged else 0
        bonds = zip(weight.equation.bonds, weight.log_lambdas if rule == "lambda" else (), strict=False)
        if emptied := [bond for bond, u in bonds if u.exp().mean(0).amax() <= tol]:
            notes.append(
                f"{', '.join(emptied)} of {row.name!r} collapsed: no lambda is above {tol}, so rank 1 was kept. An "
                "absolute threshold depends on the gauge; leave out rule='lambda'."
            )
        elif vanished:
            where = f" in {vanished} of {weight.number} particles" if weight.number > 1 else ""
            notes.append(
                f"the weight of {row.name!r} has shrunk to almost nothing{where}. The prior probably outweighed the "
                "data early: raise warmup_steps of RankPrior (warmup_epochs of a run), or lower the prior's weight."
            )
        elif row.ranks != row.ranks_before and max(row.ranks) == 1:
            remedy = "allow more parameters" if budget else "lower the prior weight"
            notes.append(f"layer {row.name!r} collapsed to rank 1 at every bond. If accuracy fell, {remedy}.")
    if not (notes or moved or budget) and any(max(row.ranks, default=1) > 1 for row in rows):
        steps = "check that prior.loss() is in the loss and prior.step() is called after each optimiser step, "
        own_loop = steps if weights[0].posterior is None else ""
        notes.append(f"no rank moved. Train longer or with a larger prior weight, {own_loop}or raise tol.")
    return tuple(notes)


def _checked_tol(tol: float | None, rule: str | None, parameters: int | None) -> float:
    """The tolerance, or the default one; raises if the arguments do not fit each other."""
    if rule is not None and rule not in RULES:
        raise ConfigError(f"rule must be None or one of {RULES}, got {rule!r}.")
    if parameters is not None:
        check_counts(parameters=parameters)
        if tol is not None or rule == "lambda":
            raise ConfigError(f"parameters= replaces tol, and rule='lambda' takes none; got tol={tol}, rule={rule!r}.")
        return 0.0
    tol = 1e-2 if tol is None else tol
    if not (0.0 <= tol < 1.0 or (rule == "lambda" and tol >= 0.0)):
        raise ConfigError(f"tol must lie in [0, 1), got {tol}. For a number of parameters, pass parameters=.")
    return tol
