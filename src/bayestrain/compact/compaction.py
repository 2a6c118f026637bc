"""`compact_`: cut ranks and make the cores physically smaller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import nn

from bayestrain.compact.budget import Ranks, cheapest_ranks
from bayestrain.compact.report import CompactedLayer, CompactReport, advice, emptied_note, vanished_note
from bayestrain.compact.rules import Cut, Seen, cut, priced
from bayestrain.compact.subject import Particles, Subject
from bayestrain.errors import ConfigError
from bayestrain.nn.sizes import count_parameters
from bayestrain.prior.hold import normalised_layers

RULES = ("rounding", "contribution", "lambda")
DEFAULT_TOL = 1e-2
VANISHED = 1e-3
"""Norm of a weight, per root of its outputs, below which its layer probably passes nothing on; random starts have 1."""


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
        tol: the relative error, in Frobenius norm, that each layer's weight may suffer (root mean square over
            particles); for "lambda" the absolute threshold. Default 1e-2.
        parameters: instead of a tolerance, how many parameters the model (each particle) may have. Ranks are cut, in
            whatever layers, where that changes the weights least; a model that is small enough stays as it is.
        rule:
            None: "rounding" where the format can; other formats are cut by contribution, then fitted again to what the
            weight was.
            "rounding": optimal truncation. It needs no lambda, sees only the weight, and finds the smallest ranks. It
            mixes rank indices, so the optimiser's state of the cores that change restarts.
            "contribution": drops the rank indices whose exact contribution to the weight fits the tolerance. The others
            stay as they are, so training continues with the optimiser's state.
            "lambda": the paper's rule, lambda above a threshold. Not the default, because lambda's scale is a gauge:
            multiplying a core by c and its neighbour by 1/c leaves the network as it is and moves every lambda, so an
            absolute threshold may cut a bond that matters (it keeps at least rank 1), and it promises no error.
        optimizer: the optimiser that holds the cores, if it is to continue. Without it, its state keeps the old shapes,
            which cannot be detected here, and its next step fails within PyTorch.
    """
    tol = checked_tol(tol, rule, parameters)
    if optimizer is None and not isinstance(model, nn.Module) and hasattr(model, "compact_"):
        own: Any = model  # calls this function with its optimiser
        return own.compact_(None if parameters else tol, parameters=parameters, rule=rule)  # type: ignore[no-any-return]
    subject = Subject(model)
    weights, before = subject.weights, count_parameters(subject.template)
    seen = {name: subject.seen(name) for name in weights}
    if parameters is None:
        new = [name for name in weights if weights[name].compacted != (rule, tol, _fingerprint(subject, name, rule))]
        cuts = {name: cut(seen[name], rule, tol) for name in new}
    else:
        ranks = _budgeted(subject, seen, rule, parameters)
        cuts = {name: cut(seen[name], rule, tol, ranks[name]) for name in seen if ranks[name] != seen[name].ranks}
    if optimizer is not None:
        subject.check_optimizer(optimizer, cuts)
    rows = []
    for name, weight in weights.items():
        row = CompactedLayer(name, weight.ranks, weight.ranks, weight.numel, weight.numel, 0.0)
        if name in cuts:
            subject.write(name, cuts[name], optimizer)
            spectra = tuple(tuple(bond.mean(0).sqrt().tolist()) for bond in cuts[name].shares)
            error = 0.0 if weight.ranks == row.ranks else cuts[name].error
            row = replace(row, ranks=weight.ranks, parameters=weight.numel, error=error, spectra=spectra)
        if parameters is None:
            weight.compacted = (rule, tol, _fingerprint(subject, name, rule))
        rows.append(row)
    notes = _notes(subject, seen, cuts, rows, tol, parameters is not None)
    return CompactReport(rule or "default", tol, tuple(rows), before, count_parameters(subject.template), notes)


def ranks_for(model: nn.Module | Particles, parameters: int, *, rule: str | None = None) -> dict[str, Ranks]:
    """The ranks that ``compact_(model, parameters=..)`` would leave; the model is not changed."""
    checked_tol(None, rule, parameters)
    subject = Subject(model)
    return _budgeted(subject, {name: subject.seen(name) for name in subject.weights}, rule, parameters)


def rank_spread(
    posterior: Particles, tol: float | None = None, *, parameters: int | None = None, rule: str | None = None
) -> dict[str, list[list[int]]]:
    """``{layer: [[rank of every particle] for each bond]}``: what each particle alone would be cut to."""
    tol = checked_tol(tol, rule, parameters)
    subject = Subject(posterior)
    seen = {name: subject.seen(name) for name in subject.weights}
    found: list[Mapping[str, Ranks]] = []
    for i in range(subject.number):
        alone = {
            name: replace(each, particles=[each.particles[i]], log_lambdas=[u[i : i + 1] for u in each.log_lambdas])
            for name, each in seen.items()
        }
        if parameters is not None:
            found.append(_budgeted(subject, alone, rule, parameters))
        else:
            found.append({name: cut(each, rule, tol).ranks(each.equation) for name, each in alone.items()})
    return {name: [list(bond) for bond in zip(*(ranks[name] for ranks in found), strict=True)] for name in seen}


def _budgeted(subject: Subject, seen: dict[str, Seen], rule: str | None, parameters: int) -> dict[str, Ranks]:
    """Ranks with which the network has at most so many parameters."""
    size = count_parameters(subject.template)
    if size <= parameters:
        return {name: each.ranks for name, each in seen.items()}
    others = size - sum(weight.numel for weight in subject.weights.values())
    return cheapest_ranks({name: priced(each, rule) for name, each in seen.items()}, others, parameters)


def checked_tol(tol: float | None, rule: str | None, parameters: int | None) -> float:
    """The tolerance, or the default one; raises if there is no such rule or it takes no such tolerance or budget."""
    if rule is not None and rule not in RULES:
        raise ConfigError(f"rule must be None or one of {RULES}, got {rule!r}.")
    if parameters is not None:
        if isinstance(parameters, bool) or not isinstance(parameters, Integral) or parameters < 1:
            raise ConfigError(f"parameters must be an integer of at least 1, got {parameters!r}.")
        if tol is not None or rule == "lambda":
            raise ConfigError(f"parameters= replaces tol, and rule='lambda' takes none; got tol={tol}, rule={rule!r}.")
        return 0.0
    tol = DEFAULT_TOL if tol is None else tol
    if not (0.0 <= tol < 1.0 or (rule == "lambda" and tol >= 0.0)):
        hint = f" If {tol} is how many parameters there may be, pass parameters={tol}." if tol >= 1 else ""
        raise ConfigError(f"tol must lie in [0, 1), got {tol}.{hint}")
    return tol


def _fingerprint(subject: Subject, name: str, rule: str | None) -> tuple[float, ...]:
    """Numbers that change when anything changes that a rule looks at."""
    tensors = [*subject.cores(name), *(subject.log_lambdas(name) if rule == "lambda" else [])]
    return tuple(float(value) for t in (t.double() for t in tensors) for value in (t.sum(), t.square().sum()))


def _notes(
    subject: Subject, seen: dict[str, Seen], cuts: dict[str, Cut], rows: list[CompactedLayer], tol: float, budget: bool
) -> tuple[str, ...]:  # fmt: skip
    """What the report says beside its table."""
    emptied = [emptied_note(name, bond, tol) for name, each in cuts.items() for bond in each.emptied]
    gone = {}
    for name, each in seen.items():
        small = each.norms.flatten() < VANISHED * each.layout.shape[0] ** 0.5
        if each.log_lambdas and bool(small.any()):
            gone[name] = vanished_note(name, small.nonzero().flatten().tolist(), subject.number)
    if gone:  # before a normalisation the size of a weight means nothing
        free = normalised_layers(subject.template)
        gone = {name: note for name, note in gone.items() if name not in {**free.sure, **free.possible}}
    states = [weight.rank_state for weight in subject.weights.values() if weight.rank_state is not None]
    before = any(len(u) < n for state in states for u, n in zip(state.log_lambdas, state.start, strict=True))
    moved = before or budget or any(row.ranks != row.ranks_before for row in rows)
    found = [] if emptied else advice(rows, gone, moved=moved, own_loop=subject.stacked is None, budget=budget)
    return *emptied, *gone.values(), *found
