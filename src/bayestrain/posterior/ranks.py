"""One set of ranks for all particles: the posterior mean decides, every particle is cut for itself to that size.

Works on one layer's stacked cores, ``(n, left, *modes, right)`` each. A rank index means something else in every
particle, so nothing is averaged over equal indices: errors are, sorted within each particle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayestrain import tt
from bayestrain.target import squares


@dataclass(frozen=True)
class SharedCut:
    """New stacked cores of one layer; `keep` has the surviving indices ``(n, rank)`` of every bond, if sliced."""

    cores: list[Tensor]
    keep: list[Tensor] | None = None
    collapsed: Sequence[int] = ()
    """Bonds that kept rank 1 though no mean of lambda is above the threshold."""


def by_rounding(cores: Sequence[Tensor], tol: float) -> SharedCut:
    """The smallest ranks for which the particles' errors, relative to each one's norm, have a mean square of tol^2."""
    share = tol / max(len(cores) - 1, 1) ** 0.5
    mean = [bond.mean(0) for bond in each_squares(cores, torch.ones(len(cores[0])))]
    return to_ranks(cores, [_smallest(tail, share) for tail in _tails(mean)])


def to_ranks(cores: Sequence[Tensor], shared: Sequence[int]) -> SharedCut:
    """Every particle rounded to the same inner ranks."""
    rounded = [_pad(tt.round_cores(particle, 0.0, shared), shared) for particle in unstack(cores)]
    return SharedCut(_stack(rounded, cores))


def by_contribution(cores: Sequence[Tensor], tol: float) -> SharedCut:
    """Drop, in every particle, equally many of the indices that contribute least to its weight; the rest stays put."""
    particles = unstack(cores)
    norms = torch.stack([tt.norm(particle) for particle in particles]).clamp_min(1e-300)
    budget = tol / max(len(cores) - 1, 1)
    keep: list[Tensor] = []
    for bond in range(1, len(cores)):
        orders, errors = zip(*(tt.drop_order(particle, bond) for particle in particles), strict=True)
        mean = (torch.stack(errors) / norms[:, None]).square().mean(0).sqrt()
        count = min(int((mean <= budget).sum()), len(mean) - 1)
        kept = torch.stack([order[count:].sort().values for order in orders])
        keep.append(kept)
        particles = [tt.slice_bond(p, bond, indices) for p, indices in zip(particles, kept, strict=True)]
    return SharedCut(_stack(particles, cores), keep)


def by_lambda(cores: Sequence[Tensor], log_lambdas: Sequence[Tensor], threshold: float) -> SharedCut:
    """The paper's rule: as many as the posterior mean of lambda, sorted in every particle, has above the threshold.

    Sorting is ours: particles that did not start at one point have no indices in common to average over.
    """
    particles = unstack(cores)
    keep: list[Tensor] = []
    collapsed = []
    for bond, u in enumerate(log_lambdas, start=1):
        values, order = u.cpu().exp().sort(dim=1, descending=True)  # (n, R)
        rank = int((values.mean(0) > threshold).sum())
        if rank == 0:
            rank = 1
            collapsed.append(bond)
        kept = order[:, :rank].sort(dim=1).values
        keep.append(kept)
        particles = [tt.slice_bond(p, bond, indices) for p, indices in zip(particles, kept, strict=True)]
    return SharedCut(_stack(particles, cores), keep, collapsed)


def own_ranks(cores: Sequence[Tensor], tol: float) -> list[list[int]]:
    """Per bond, the rank that each particle alone would be rounded to."""
    share = tol / max(len(cores) - 1, 1) ** 0.5
    return [[_smallest(row, share) for row in tail] for tail in _tails(each_squares(cores, torch.ones(len(cores[0]))))]


def take(tensor: Tensor, keep: Sequence[Tensor], core: int) -> Tensor:
    """Cut a tensor shaped like stacked core number `core` to each particle's surviving indices on both sides."""
    for bond, axis in ((core, 1), (core + 1, tensor.ndim - 1)):
        if 1 <= bond <= len(keep):
            shape = [1] * tensor.ndim
            shape[0], shape[axis] = keep[bond - 1].shape
            tensor = tensor.take_along_dim(keep[bond - 1].view(shape), dim=axis)
    return tensor


def each_squares(cores: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Per bond ``(n, R)``: the squares of each particle's singular values, relative to its weight, largest first.

    `shares` has the norm of every particle's weight relative to that of its train.
    """
    spectra = [tt.bond_spectra(particle) for particle in unstack(cores)]
    return [squares(torch.stack(bond), shares) for bond in zip(*spectra, strict=True)]


def _tails(bonds: Sequence[Tensor]) -> list[Tensor]:
    """Per bond ``(.., R)``: the relative error of keeping the largest 0, 1, .., R - 1 singular values."""
    return [bond.flip(-1).cumsum(-1).flip(-1).sqrt() for bond in bonds]


def _smallest(tail: Tensor, share: float) -> int:
    return max(int((tail > share).sum()), 1)


def unstack(cores: Sequence[Tensor]) -> list[list[Tensor]]:
    """The cores of every particle, in double precision."""
    exact = [core.detach().cpu().double() for core in cores]  # many small decompositions: no work for a GPU
    return [[core[i] for core in exact] for i in range(len(exact[0]))]


def _stack(particles: list[list[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(core).to(old) for core, old in zip(zip(*particles, strict=True), like, strict=True)]


def _pad(cores: list[Tensor], shared: Sequence[int]) -> list[Tensor]:
    """Zeros up to the shared ranks, for a particle that needs less."""
    chain = (1, *shared, 1)
    padded = []
    for core, left, right in zip(cores, chain[:-1], chain[1:], strict=True):
        new = core.new_zeros(left, *core.shape[1:-1], right)
        new[: core.shape[0], ..., : core.shape[-1]] = core
        padded.append(new)
    return padded
