"""The tensor train: a chain of cores, one per mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bayestrain.formats.equation import Equation
from bayestrain.formats.format import Format, bond_budget, checked_finite, kept


class TensorTrain(Format):
    """``ax, xby, yc -> abc``: entry (i, j, k) is the product of the matrices that i, j and k select from the cores."""

    name: ClassVar[str] = "tt"
    splits: ClassVar[bool] = True

    def equation(self, modes: Sequence[int]) -> Equation:
        count = len(modes)
        mode, bond = [f"m{k}" for k in range(count)], [f"r{k}" for k in range(count + 1)]
        cores = [(bond[k], mode[k], bond[k + 1]) for k in range(count)]
        ends = (bond[0], bond[-1])
        return Equation(tuple(tuple(x for x in core if x not in ends) for core in cores), tuple(mode))

    def decompose(self, tensor: Tensor, tol: float = 0.0, max_rank: int | Sequence[int] | None = None) -> list[Tensor]:
        """TT-SVD (Oseledets 2011, algorithm 1): the error is at most `tol`, near the best for the ranks it finds."""
        dtype, shape = tensor.dtype, tensor.shape
        caps = self.max_ranks(shape, max_rank)
        tensor = checked_finite(tensor)
        largest = tensor.abs().amax()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))  # squares of the entries stay in range
        budget = bond_budget(torch.linalg.vector_norm(tensor / scale), tol, len(caps))
        cores: list[Tensor] = []
        rest, left = (tensor / scale).reshape(1, -1), 1
        for size, cap in zip(shape[:-1], caps, strict=True):
            u, s, vh = torch.linalg.svd(rest.reshape(left * size, -1), full_matrices=False)
            rank = kept(s, budget, cap)
            cores.append(u[:, :rank].reshape(left, size, rank))
            rest, left = s[:rank, None] * vh[:rank], rank
        cores.append((rest * scale).reshape(left, shape[-1], 1))
        return _without_ends([core.to(dtype) for core in cores])

    def round(
        self,
        equation: Equation,  # noqa: ARG002
        cores: Sequence[Tensor],
        tol: float = 0.0,
        max_rank: int | Sequence[int] | None = None,
    ) -> list[Tensor]:
        """TT rounding (Oseledets 2011, algorithm 2): a QR sweep right, then a truncated SVD sweep back.

        It depends on the tensor and not on its gauge. The norm comes back spread evenly over the cores.
        """
        caps = self.max_ranks([core.shape[1] for core in _with_ends(cores)], max_rank)
        scale, chain = _orthogonal_sweep(cores)
        budget = bond_budget(torch.linalg.vector_norm(chain[-1]), tol, len(caps))
        _singular_sweep(chain, lambda bond, s: kept(s, budget, caps[bond]))
        norm = torch.linalg.vector_norm(chain[0])
        if norm > 0:
            chain[0] = chain[0] / norm
            chain = [core * torch.exp((scale + norm.log()) / len(chain)) for core in chain]
        return _without_ends(chain)

    def spectra(self, equation: Equation, cores: Sequence[Tensor]) -> list[Tensor]:  # noqa: ARG002
        """The singular values of the unfolding at every bond, largest first, without materialising the tensor."""
        scale, chain = _orthogonal_sweep(cores)
        return [values * scale.exp() for values in _singular_sweep(chain, lambda _, s: len(s))]

    def shown_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """With the ranks of 1 at both ends, as is usual for trains."""
        return (1, *ranks, 1)


def _with_ends(cores: Sequence[Tensor]) -> list[Tensor]:
    """The cores as ``(left, mode, right)``, with ranks of 1 at both ends."""
    last = len(cores) - 1
    return [
        core.reshape(1 if k == 0 else core.shape[0], -1, 1 if k == last else core.shape[-1])
        for k, core in enumerate(cores)
    ]


def _without_ends(chain: Sequence[Tensor]) -> list[Tensor]:
    result = list(chain)
    result[0] = result[0].squeeze(0)
    result[-1] = result[-1].squeeze(-1)
    return result


def _orthogonal_sweep(cores: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Left-orthogonal cores (all but the last) ``(left, mode, right)`` of the tensor divided by ``exp(scale)``.

    The size of what is carried from core to core goes into the scale, so that a long product stays in range.
    """
    scale, carry = cores[0].new_zeros(()), cores[0].new_ones(1, 1)
    found: list[Tensor] = []
    for core in _with_ends(cores):
        body = torch.tensordot(carry, core, 1)
        size = torch.linalg.vector_norm(body)
        size = torch.where(size > 0, size, torch.ones_like(size))
        body, scale = body / size, scale + size.log()
        q, carry = torch.linalg.qr(body.flatten(0, 1))
        found.append(q.reshape(*body.shape[:2], -1))
    found[-1] = body
    return scale, found


def _singular_sweep(chain: list[Tensor], rank: Callable[[int, Tensor], int]) -> list[Tensor]:
    """Make the cores of a left-orthogonal chain right-orthogonal, in place, and return the singular values.

    `rank` says from a bond's number and its singular values how many of them to keep.
    """
    found: list[Tensor] = []
    for k in range(len(chain) - 1, 0, -1):
        u, s, vh = torch.linalg.svd(chain[k].flatten(1), full_matrices=False)
        found.append(s)
        r = rank(k - 1, s)
        chain[k] = vh[:r].reshape(r, *chain[k].shape[1:])
        chain[k - 1] = chain[k - 1] @ (u[:, :r] * s[:r])
    return found[::-1]
