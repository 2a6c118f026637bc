"""Alignment of many trees at once: networks of one equation are stacked, and all of their bonds are one batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats.align import LIVE, aligning_gauges, change_gauge, tree_grams
from bayestrain.formats.equation import Equation


def align_trees(stacks: Sequence[tuple[Equation, list[Tensor]]], live: float = LIVE) -> list[list[Tensor]]:
    """`formats.align.align` for stacks of trees, whose cores may be padded with zeros.

    A change of gauge at one bond leaves the Gram matrices of all others as they are.
    """
    if not stacks:
        return []
    found = [torch.vmap(tree_grams, (None, 0))(equation, cores) for equation, cores in stacks]
    grams = [pair for own in found for pair in own.values()]
    widest, counts = max(left.shape[-1] for left, _ in grams), [len(left) for left, _ in grams]
    sides = zip(*grams, strict=True)
    left, right = (torch.cat([F.pad(own, (0, widest - own.shape[-1]) * 2) for own in side]) for side in sides)
    gauge, inverse = aligning_gauges(left, right, live)
    turns = zip(gauge.split(counts), inverse.split(counts), (own.shape[-1] for own, _ in grams), strict=True)
    results = []
    for equation, cores in stacks:
        for bond in equation.bonds:
            turn, back, rank = next(turns)
            change = torch.vmap(change_gauge, (None, 0, None, 0, 0))
            cores = change(equation, cores, bond, turn[:, :rank, :rank], back[:, :rank, :rank])
        results.append(cores)
    return results
