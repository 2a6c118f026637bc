"""Alignment of many trees at once: networks of one equation are stacked, and all of their bonds are one batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats.align import LIVE, aligning_gauges, change_gauge, tree_grams
from bayestrain.formats.equation import Equation


def align_trees(networks: Sequence[tuple[Equation, Sequence[Tensor]]], live: float = LIVE) -> list[list[Tensor]]:
    """`formats.align.align` for any number of trees in a few large operations.

    Cores are padded with zeros. A change of gauge at one bond leaves the Gram matrices of all others as they are.
    """
    alike: dict[Equation, list[int]] = {}
    for n, (equation, _) in enumerate(networks):
        alike.setdefault(equation, []).append(n)
    stacks = {
        equation: [_stacked([networks[n][1][k].double() for n in own]) for k in range(len(equation.cores))]
        for equation, own in alike.items()
    }
    found = [torch.vmap(partial(tree_grams, equation))(cores) for equation, cores in stacks.items() if equation.bonds]
    grams = [pair for own in found for pair in own.values()]
    if not grams:
        return [list(cores) for _, cores in networks]
    widest, counts = max(left.shape[-1] for left, _ in grams), [len(left) for left, _ in grams]
    sides = zip(*grams, strict=True)
    left, right = (torch.cat([F.pad(own, (0, widest - own.shape[-1]) * 2) for own in side]) for side in sides)
    gauge, inverse = aligning_gauges(left, right, live)
    turns = zip(gauge.split(counts), inverse.split(counts), (own.shape[-1] for own, _ in grams), strict=True)
    results = [list(cores) for _, cores in networks]
    for equation, cores in stacks.items():
        for bond in equation.bonds:
            turn, back, rank = next(turns)
            change = partial(_changed, equation, bond)
            cores = torch.vmap(change)(cores, turn[:, :rank, :rank], back[:, :rank, :rank])
        for k, stack in enumerate(cores):
            for n, new in zip(alike[equation], stack.unbind(), strict=True):
                old = networks[n][1][k]
                results[n][k] = new[tuple(map(slice, old.shape))].to(old.dtype)
    return results


def _changed(equation: Equation, bond: str, cores: Sequence[Tensor], gauge: Tensor, inverse: Tensor) -> list[Tensor]:
    return change_gauge(equation, cores, bond, gauge, inverse)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of several sizes padded with zeros and stacked."""
    whole = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    missing = [[(0, most - size) for most, size in zip(whole, own.shape, strict=True)] for own in tensors]
    return torch.stack([F.pad(own, sum(pads[::-1], ())) for own, pads in zip(tensors, missing, strict=True)])
