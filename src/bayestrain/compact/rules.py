"""How each rule cuts one weight of n particles: particles keep indices of their own, but share the ranks.

A rank index means something different in every particle, so only errors are averaged, not indices: the rules
use the root mean square, over particles, of the relative change of the weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayestrain.compact.budget import Priced, Ranks
from bayestrain.compact.measure import relative_change
from bayestrain.compact.weights import Weight
from bayestrain.errors import ConfigError
from bayestrain.formats import algebra

SWEEPS = 3
"""Sweeps of alternating least squares after a cut by contribution in a format that cannot round."""

Cores = Sequence[Sequence[Tensor]]
"""The cores of every particle."""


class Cut(NamedTuple):
    """New cores of one weight, stacked ``(n, ..)``."""

    cores: list[Tensor]
    keep: dict[str, Tensor] | None
    """Per bond the surviving indices ``(n, rank)``; None if the rule mixes them."""
    error: float
    shares: list[Tensor]
    """Per bond ``(n, R)``, what is lost of the weight's squared norm with each index, the last to go first."""


def cut(weight: Weight, rule: str | None, tol: float, ranks: Ranks | None = None) -> Cut:
    """Cut one weight to these ranks, or as far as the tolerance allows."""
    method = _method(weight, rule)
    if method == "rounding":
        shares = _singular_shares(weight)
        ranks = ranks or tuple(_rank(bond, tol / len(shares) ** 0.5) for bond in shares)  # errors add up in squares
        rounded = [weight.format.round(weight.equation, cores, 0.0, ranks) for cores in weight.exact]
        return _cut(weight, rounded, None, shares)
    keep, shares = {}, []
    cores = _start(weight, method)
    for number, bond in enumerate(weight.equation.bonds):
        if method == "lambda":  # sorted: particles that did not start at one point have no indices in common
            values, order = weight.log_lambdas[number].cpu().exp().sort(dim=1)
            rank = max(int((values.mean(0) > tol).sum()), 1)
        else:
            order, share = _dropped(weight, cores, bond)
            shares.append(share)
            rank = _rank(share, tol / len(weight.ranks)) if ranks is None else ranks[number]  # at worst errors add up
        keep[bond] = order[:, -rank:].sort(dim=1).values
        pairs = zip(cores, keep[bond], strict=True)
        cores = [algebra.keep(weight.equation, own, bond, index) for own, index in pairs]
    if method == "refit":
        return _cut(weight, [_refitted(weight, *pair) for pair in zip(weight.exact, cores, strict=True)], None, shares)
    return _cut(weight, cores, keep, shares)


def _cut(weight: Weight, cores: Cores, keep: dict[str, Tensor] | None, shares: list[Tensor]) -> Cut:
    changes = [_change(weight, *pair) for pair in zip(weight.exact, cores, strict=True)]
    error = (sum(change**2 for change in changes) / len(changes)) ** 0.5
    return Cut([_stacked(core) for core in zip(*cores, strict=True)], keep, error, shares)


def _stacked(cores: Sequence[Tensor]) -> Tensor:
    """One core of every particle; one that needs lower ranks is padded with zeros."""
    result = cores[0].new_zeros(len(cores), *map(max, zip(*(core.shape for core in cores), strict=True)))
    for own, core in zip(result, cores, strict=True):
        own[tuple(map(slice, core.shape))] = core
    return result


def priced(weight: Weight, rule: str | None) -> Priced:
    """What the indices of one weight are worth to a budget, in the mean over particles."""
    if (method := _method(weight, rule)) == "rounding":
        rows = [bond.mean(0) for bond in _singular_shares(weight)]
        rows = [row[: max(int((row > 0).sum()), 1)] for row in rows]  # rounding keeps no index for noise
    else:
        start = _start(weight, method)
        rows = [_dropped(weight, start, bond)[1].mean(0) for bond in weight.equation.bonds]
    return Priced(weight.equation, weight.layout.sizes, [row.tolist() for row in rows])


def _method(weight: Weight, rule: str | None) -> str:
    """What a rule does with this weight: "rounding", "refit", "contribution" or "lambda"."""
    can_round = weight.format.rounds(weight.equation)
    if rule == "rounding" and not can_round:
        raise ConfigError(
            f"rule='rounding' needs a format that can round, and layer {weight.name!r} has format "
            f"{weight.format.name!r}. Leave rule out: it is then cut by contribution and fitted again."
        )
    if rule == "lambda" and not weight.log_lambdas:
        raise ConfigError(f"rule='lambda' needs lambda, and layer {weight.name!r} has none. Train with a RankPrior.")
    return rule or ("rounding" if can_round else "refit")


def _rank(shares: Tensor, tol: float) -> int:
    """The smallest rank with which the indices from it on lose at most `tol` of the norm together."""
    tails = shares.mean(0).flip(0).cumsum(0).flip(0).clamp_min(0.0).sqrt()
    return max(int((tails > tol).sum()), 1)


def _singular_shares(weight: Weight) -> list[Tensor]:
    """Shares by singular values; what is rounding noise has none."""
    found = []
    for bond in zip(*(weight.format.spectra(weight.equation, cores) for cores in weight.exact), strict=True):
        values = torch.stack(bond)
        noise = 10 * torch.finfo(values.dtype).eps * values.shape[1] * values[:, :1]
        found.append(torch.where(values > noise, values / weight.norms, 0.0).square())
    return found


def _start(weight: Weight, method: str) -> Cores:
    """The cores whose indices are dropped: aligned ones where they are fitted again."""
    return weight.exact if method != "refit" else [weight.format.align(weight.equation, own) for own in weight.exact]


def _dropped(weight: Weight, cores: Cores, bond: str) -> tuple[Tensor, Tensor]:
    """The indices of a bond, least important first, and their shares, the last to go first; both ``(n, R)``."""
    orders, errors = zip(*(algebra.drop_order(weight.equation, own, bond) for own in cores), strict=True)
    lost = (torch.stack(errors) / weight.norms).square()
    return torch.stack(orders), lost.diff(dim=1, prepend=torch.zeros_like(lost[:, :1])).flip(1)


def _refitted(weight: Weight, whole: Sequence[Tensor], cores: Sequence[Tensor]) -> Sequence[Tensor]:
    """The cores fitted to what the weight was, where that brings them nearer."""
    fitted = algebra.refit(weight.equation, cores, algebra.operands(weight.equation, whole), SWEEPS)
    return min(cores, fitted, key=lambda each: _change(weight, whole, each))


def _change(weight: Weight, old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    return relative_change(weight.layout, weight.equation, old, new)
