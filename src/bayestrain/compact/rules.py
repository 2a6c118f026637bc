"""How each rule cuts one weight of n particles: particles keep indices of their own, but share the ranks.

A rank index means something different in every particle, so only errors are averaged, not indices: the rules
use the root mean square, over particles, of the relative change of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.compact.budget import Priced
from bayestrain.compact.measure import relative_change
from bayestrain.compact.weights import Ranks, Weight
from bayestrain.errors import ConfigError
from bayestrain.formats import algebra

SWEEPS = 3
"""Sweeps of alternating least squares after a cut by contribution in a format that cannot round."""

Cores = Sequence[Sequence[Tensor]]
"""The cores of every particle."""


@dataclass(frozen=True)
class Cut:
    """New cores of one weight, stacked ``(n, ..)``."""

    cores: list[Tensor]
    error: float
    shares: Sequence[Tensor] = ()
    """Per bond ``(n, R)``, what is lost of the weight's squared norm with each index, the last to go first."""
    keep: dict[str, Tensor] | None = None
    """Per bond the surviving indices ``(n, rank)``; None if the rule mixes them."""
    emptied: Sequence[str] = ()
    """Bonds that kept rank 1 although no mean of lambda is above the threshold."""


def cut(weight: Weight, rule: str | None, tol: float, ranks: Ranks | None = None) -> Cut:
    """Cut one weight to these ranks, or as far as the tolerance allows."""
    method = _method(weight, rule)
    if method == "lambda":
        return _by_lambda(weight, tol)
    if method != "rounding":
        return _by_contribution(weight, method, tol, ranks)
    shares = _singular_shares(weight)
    if ranks is None:  # the errors of the bonds add up in squares
        ranks = tuple(_rank(bond, tol / len(shares) ** 0.5) for bond in shares)
    return _rounded(weight, ranks, shares)


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


def _dropped(weight: Weight, cores: Cores, bond: str) -> tuple[Tensor, Tensor]:
    """The indices of a bond, least important first, and their shares, the last to go first; both ``(n, R)``."""
    orders, errors = zip(*(algebra.drop_order(weight.equation, own, bond) for own in cores), strict=True)
    lost = (torch.stack(errors) / weight.norms).square()
    return torch.stack(orders), lost.diff(dim=1, prepend=torch.zeros_like(lost[:, :1])).flip(1)


def _kept(weight: Weight, cores: Cores, bond: str, keep: Tensor) -> list[list[Tensor]]:
    """The cores of every particle with its own indices ``(n, rank)`` of a bond only."""
    return [algebra.keep(weight.equation, own, bond, index) for own, index in zip(cores, keep, strict=True)]


def _rounded(weight: Weight, ranks: Ranks, shares: Sequence[Tensor]) -> Cut:
    """Every particle rounded to the same ranks, padded with zeros where it needs less."""
    rounded = [weight.format.round(weight.equation, cores, 0.0, ranks) for cores in weight.exact]
    found = [weight.equation.ranks([core.shape for core in cores]) for cores in rounded]
    shapes = weight.equation.shapes(weight.layout.sizes, [max(bond) for bond in zip(*found, strict=True)])
    return _cut(weight, [list(map(_padded, cores, shapes)) for cores in rounded], shares)


def _padded(core: Tensor, shape: Sequence[int]) -> Tensor:
    missing = [want - have for have, want in zip(core.shape, shape, strict=True)]
    return F.pad(core, [n for own in reversed(missing) for n in (0, own)])


def _start(weight: Weight, method: str) -> Cores:
    """The cores whose indices are dropped: aligned ones where they are fitted again."""
    return weight.exact if method != "refit" else [weight.format.align(weight.equation, own) for own in weight.exact]


def _by_contribution(weight: Weight, method: str, tol: float, ranks: Ranks | None) -> Cut:
    """Drop, in every particle, equally many of the indices that contribute least to its weight."""
    cores, keep, shares = _start(weight, method), {}, []
    for number, bond in enumerate(weight.equation.bonds):
        order, share = _dropped(weight, cores, bond)
        # The errors of the bonds add up at worst.
        rank = _rank(share, tol / len(weight.ranks)) if ranks is None else ranks[number]
        keep[bond] = order[:, order.shape[1] - rank :].sort(dim=1).values
        cores = _kept(weight, cores, bond, keep[bond])
        shares.append(share)
    if method != "refit":
        return _cut(weight, cores, shares, keep)
    unchanged = all(index.shape[1] == rank for index, rank in zip(keep.values(), weight.ranks, strict=True))
    return _cut(weight, weight.exact if unchanged else _refitted(weight, cores), shares)


def _refitted(weight: Weight, cores: Cores) -> Cores:
    """The cores of every particle, fitted to what its weight was, where that brings them nearer."""
    result = []
    for whole, own in zip(weight.exact, cores, strict=True):
        fitted = algebra.refit(weight.equation, own, algebra.operands(weight.equation, whole), SWEEPS)
        before, after = (relative_change(weight.layout, weight.equation, whole, each) for each in (own, fitted))
        result.append(fitted if after < before else own)
    return result


def _by_lambda(weight: Weight, threshold: float) -> Cut:
    """The paper's rule: as many indices as the mean of lambda, sorted in every particle, has above the threshold.

    Sorting is ours: particles that did not start at one point have no indices in common to average over.
    """
    cores, keep, emptied = weight.exact, {}, []
    for bond, u in zip(weight.equation.bonds, weight.log_lambdas, strict=True):
        values, order = u.cpu().exp().sort(dim=1, descending=True)  # (n, R)
        rank = int((values.mean(0) > threshold).sum())
        if rank == 0:
            emptied.append(bond)
        keep[bond] = order[:, : max(rank, 1)].sort(dim=1).values
        cores = _kept(weight, cores, bond, keep[bond])
    return _cut(weight, cores, (), keep, emptied)


def _cut(
    weight: Weight, cores: Cores, shares: Sequence[Tensor], keep: dict[str, Tensor] | None = None,
    emptied: Sequence[str] = (),
) -> Cut:  # fmt: skip
    pairs = zip(weight.exact, cores, strict=True)
    squares = [relative_change(weight.layout, weight.equation, *pair) ** 2 for pair in pairs]
    stacked = [torch.stack(core) for core in zip(*cores, strict=True)]
    return Cut(stacked, (sum(squares) / len(squares)) ** 0.5, shares, keep, emptied)
