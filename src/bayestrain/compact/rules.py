"""How each rule cuts one weight of n particles: particles keep indices of their own, but share the ranks.

A rank index means something else in every particle, so nothing is averaged over equal indices. Errors are: the rules
look at the root mean square, over particles, of the relative change of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bayestrain.compact.budget import Priced, Ranks
from bayestrain.compact.measure import relative_change, weight_norm
from bayestrain.errors import ConfigError
from bayestrain.formats import Equation, Format, algebra
from bayestrain.nn.layout import Layout

SWEEPS = 3
"""Sweeps of alternating least squares after a cut by contribution in a format that cannot round."""

Particles = Sequence[Sequence[Tensor]]
"""The cores of every particle."""


@dataclass(frozen=True)
class Seen:
    """One weight as a rule sees it, in double precision."""

    name: str
    format: Format
    equation: Equation
    layout: Layout
    particles: Particles
    log_lambdas: list[Tensor]
    """Per bond ``(n, R)``; empty if the weight has no lambda."""

    @property
    def ranks(self) -> Ranks:
        """The rank of every bond."""
        return self.equation.ranks([core.shape for core in self.particles[0]])

    @cached_property
    def norms(self) -> Tensor:
        """``(n, 1)``: the norm of every particle's weight, without the padding of its tensor."""
        norms = [[weight_norm(self.layout, self.equation, cores)] for cores in self.particles]
        return torch.tensor(norms, dtype=torch.float64).clamp_min(1e-300)

    def method(self, rule: str | None) -> str:
        """What a rule does with this weight: "rounding", "refit", "contribution" or "lambda"."""
        can_round = self.format.rounds(self.equation)
        if rule == "rounding" and not can_round:
            raise ConfigError(
                f"rule='rounding' needs a format that can round, and layer {self.name!r} has format "
                f"{self.format.name!r}. Leave rule out: it is then cut by contribution and fitted again."
            )
        if rule == "lambda" and not self.log_lambdas:
            raise ConfigError(f"rule='lambda' needs lambda, and layer {self.name!r} has none. Train with a RankPrior.")
        return rule or ("rounding" if can_round else "refit")


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

    def ranks(self, equation: Equation) -> Ranks:
        """The rank of every bond."""
        return equation.ranks([core.shape[1:] for core in self.cores])


def cut(seen: Seen, rule: str | None, tol: float, ranks: Ranks | None = None) -> Cut:
    """Cut one weight to these ranks, or as far as the tolerance allows."""
    method = seen.method(rule)
    if method == "lambda":
        return _by_lambda(seen, tol)
    if method != "rounding":
        return _by_contribution(seen, method, tol, ranks)
    shares = _singular_shares(seen)
    if ranks is None:  # the errors of the bonds add up in squares
        tails = [bond.mean(0).flip(0).cumsum(0).flip(0).sqrt() for bond in shares]  # [r]: of all from index r on
        ranks = tuple(max(int((tail > tol / len(shares) ** 0.5).sum()), 1) for tail in tails)
    return _rounded(seen, ranks, shares)


def priced(seen: Seen, rule: str | None) -> Priced:
    """What the indices of one weight are worth to a budget, in the mean over particles."""
    if rounds := (method := seen.method(rule)) == "rounding":
        shares = _singular_shares(seen)
    else:
        start = _start(seen, method)
        shares = [_dropped(seen, start, bond)[1] for bond in seen.equation.bonds]
    rows = [bond.mean(0) for bond in shares]
    if rounds:  # rounding keeps no index for noise
        rows = [row[: max(int((row > 0).sum()), 1)] for row in rows]

    def usable(ranks: Ranks) -> Ranks:
        return seen.format.max_ranks(seen.layout.sizes, ranks) if rounds else ranks

    return Priced(seen.equation, seen.layout.sizes, [row.tolist() for row in rows], usable)


def _singular_shares(seen: Seen) -> list[Tensor]:
    """Shares by singular values; what is rounding noise has none."""
    found = []
    for bond in zip(*(seen.format.spectra(seen.equation, cores) for cores in seen.particles), strict=True):
        values = torch.stack(bond)
        noise = 10 * torch.finfo(values.dtype).eps * values.shape[1] * values[:, :1]
        found.append(torch.where(values > noise, values / seen.norms, 0.0).square())
    return found


def _dropped(seen: Seen, particles: Particles, bond: str) -> tuple[Tensor, Tensor]:
    """The indices of a bond, least important first, and their shares, the last to go first; both ``(n, R)``."""
    orders, errors = zip(*(algebra.drop_order(seen.equation, cores, bond) for cores in particles), strict=True)
    lost = (torch.stack(errors) / seen.norms).square()
    return torch.stack(orders), lost.diff(dim=1, prepend=torch.zeros_like(lost[:, :1])).flip(1)


def _kept(seen: Seen, particles: Particles, bond: str, keep: Tensor) -> Particles:
    """The cores of every particle with its own indices ``(n, rank)`` of a bond only."""
    return [algebra.keep(seen.equation, own, bond, index) for own, index in zip(particles, keep, strict=True)]


def _rounded(seen: Seen, ranks: Ranks, shares: Sequence[Tensor]) -> Cut:
    """Every particle rounded to the same ranks, padded with zeros where it needs less."""
    rounded = [seen.format.round(seen.equation, cores, 0.0, ranks) for cores in seen.particles]
    found = [seen.equation.ranks([core.shape for core in cores]) for cores in rounded]
    shapes = seen.equation.shapes(seen.layout.sizes, [max(bond) for bond in zip(*found, strict=True)])
    padded = [[core.new_zeros(shape) for core, shape in zip(cores, shapes, strict=True)] for cores in rounded]
    for whole, cores in zip(padded, rounded, strict=True):
        for new, core in zip(whole, cores, strict=True):
            new[tuple(map(slice, core.shape))] = core
    return _cut(seen, padded, shares)


def _start(seen: Seen, method: str) -> Particles:
    """The cores whose indices are dropped: aligned ones where they are fitted again."""
    return seen.particles if method != "refit" else [seen.format.align(seen.equation, own) for own in seen.particles]


def _by_contribution(seen: Seen, method: str, tol: float, ranks: Ranks | None) -> Cut:
    """Drop, in every particle, equally many of the indices that contribute least to its weight."""
    particles, keep, shares = _start(seen, method), {}, []
    bonds = seen.equation.bonds
    for number, bond in enumerate(bonds):
        order, share = _dropped(seen, particles, bond)
        tails = share.mean(0).flip(0).cumsum(0).flip(0).clamp_min(0.0).sqrt()
        # The errors of the bonds add up at worst.
        rank = max(int((tails > tol / len(bonds)).sum()), 1) if ranks is None else ranks[number]
        keep[bond] = order[:, order.shape[1] - rank :].sort(dim=1).values
        particles = _kept(seen, particles, bond, keep[bond])
        shares.append(share)
    if method != "refit":
        return _cut(seen, particles, shares, keep)
    unchanged = all(index.shape[1] == rank for index, rank in zip(keep.values(), seen.ranks, strict=True))
    return _cut(seen, seen.particles if unchanged else _refitted(seen, particles), shares)


def _refitted(seen: Seen, particles: Particles) -> Particles:
    """The cores of every particle, fitted to what its weight was, where that brings them nearer."""
    result = []
    for whole, cores in zip(seen.particles, particles, strict=True):
        fitted = algebra.refit(seen.equation, cores, algebra.operands(seen.equation, whole), SWEEPS)
        before, after = (relative_change(seen.layout, seen.equation, whole, each) for each in (cores, fitted))
        result.append(fitted if after < before else cores)
    return result


def _by_lambda(seen: Seen, threshold: float) -> Cut:
    """The paper's rule: as many indices as the mean of lambda, sorted in every particle, has above the threshold.

    Sorting is ours: particles that did not start at one point have no indices in common to average over.
    """
    particles, keep, emptied = seen.particles, {}, []
    for bond, u in zip(seen.equation.bonds, seen.log_lambdas, strict=True):
        values, order = u.cpu().exp().sort(dim=1, descending=True)  # (n, R)
        rank = int((values.mean(0) > threshold).sum())
        if rank == 0:
            emptied.append(bond)
        keep[bond] = order[:, : max(rank, 1)].sort(dim=1).values
        particles = _kept(seen, particles, bond, keep[bond])
    return _cut(seen, particles, (), keep, emptied)


def _cut(
    seen: Seen, particles: Particles, shares: Sequence[Tensor], keep: dict[str, Tensor] | None = None,
    emptied: Sequence[str] = (),
) -> Cut:  # fmt: skip
    pairs = zip(seen.particles, particles, strict=True)
    squares = [relative_change(seen.layout, seen.equation, *pair) ** 2 for pair in pairs]
    stacked = [torch.stack(core) for core in zip(*particles, strict=True)]
    return Cut(stacked, (sum(squares) / len(squares)) ** 0.5, shares, keep, emptied)
