"""Alignment of many trees at once: weights of one equation are stacked, and all of their bonds are one batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats.align import LIVE, aligning_gauges, change_gauge, tree_grams
from bayestrain.perf.stacks import Stacks


def align_trees(trees: Sequence[Stacks]) -> dict[str, list[Tensor]]:
    """The cores of every weight as `formats.align.align` returns them, in double precision.

    A change of gauge at one bond leaves the Gram matrices of all others as they are.
    """
    if not trees:
        return {}
    found, results = [(own, own(torch.float64)) for own in trees], dict[str, list[Tensor]]()
    grams = [pair for own, cores in found for pair in torch.vmap(tree_grams, (None, 0))(own.equation, cores).values()]
    widest, counts = max(left.shape[-1] for left, _ in grams), [len(left) for left, _ in grams]
    sides = zip(*grams, strict=True)
    left, right = (torch.cat([F.pad(own, (0, widest - own.shape[-1]) * 2) for own in side]) for side in sides)
    gauge, inverse = aligning_gauges(left, right, LIVE)
    turns = zip(gauge.split(counts), inverse.split(counts), (own.shape[-1] for own, _ in grams), strict=True)
    for own, cores in found:
        for bond in own.equation.bonds:
            turn, back, rank = next(turns)
            change = torch.vmap(change_gauge, (None, 0, None, 0, 0))
            cores = change(own.equation, cores, bond, turn[:, :rank, :rank], back[:, :rank, :rank])
        results |= own.apart(cores)
    return results
