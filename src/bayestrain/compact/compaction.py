"""`compact_`: cut ranks and make the cores physically smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import nn

from bayestrain.compact.budget import cheapest_ranks
from bayestrain.compact.report import CompactedLayer, CompactReport, notes_on
from bayestrain.compact.rules import Cut, cut, priced
from bayestrain.compact.weights import Particles, Ranks, Weight, find_weights
from bayestrain.errors import ConfigError
from bayestrain.nn.sizes import count_parameters

RULES = ("rounding", "contribution", "lambda")
DEFAULT_TOL = 1e-2


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
        optimizer: the optimiser that holds the cores, if it is to continue. An optimiser that was not given keeps state
            of the old shapes, and its next step raises an error.
    """
    if optimizer is None and not isinstance(model, nn.Module) and hasattr(model, "compact_"):
        posterior: Any = model  # calls this function with its optimiser
        return posterior.compact_(tol, parameters=parameters, rule=rule)  # type: ignore[no-any-return]
    tol = _checked_tol(tol, rule, parameters)
    template, weights = find_weights(model)
    size = count_parameters(template)
    if parameters is None:
        done = [weight.module.compacted == (rule, tol, weight.fingerprint(rule)) for weight in weights]
        cuts = [None if same else cut(weight, rule, tol) for weight, same in zip(weights, done, strict=True)]
    else:
        ranks = _budgeted(weights, size, rule, parameters)
        cuts = [None if own == w.ranks else cut(w, rule, tol, own) for w, own in zip(weights, ranks, strict=True)]
    rows = []
    for weight, own in zip(weights, cuts, strict=True):
        rows.append(_row(weight, own, optimizer))
        if parameters is None:
            weight.module.compacted = (rule, tol, weight.fingerprint(rule))
    notes = notes_on(weights, cuts, rows, tol, parameters is not None)
    return CompactReport(rule or "default", tol, tuple(rows), size, count_parameters(template), notes)


def _row(weight: Weight, cut: Cut | None, optimizer: torch.optim.Optimizer | None) -> CompactedLayer:
    """Put a cut in place and report it."""
    row = CompactedLayer(weight.name, weight.ranks, weight.ranks, weight.module.numel, weight.module.numel, 0.0)
    if cut is None:
        return row
    weight.write(cut.cores, cut.keep, optimizer)
    spectra = tuple(tuple(bond.mean(0).sqrt().tolist()) for bond in cut.shares)
    error = 0.0 if weight.ranks == row.ranks else cut.error
    return replace(row, ranks=weight.ranks, parameters=weight.module.numel, error=error, spectra=spectra)


def _budgeted(weights: Sequence[Weight], size: int, rule: str | None, parameters: int) -> list[Ranks]:
    """Ranks with which a network of this size has at most so many parameters."""
    if size <= parameters:
        return [weight.ranks for weight in weights]
    others = size - sum(weight.module.numel for weight in weights)
    return cheapest_ranks([priced(weight, rule) for weight in weights], others, parameters)


def _checked_tol(tol: float | None, rule: str | None, parameters: int | None) -> float:
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
        raise ConfigError(f"tol must lie in [0, 1), got {tol}. For a number of parameters, pass parameters=.")
    return tol
