"""A convolution as a chain of thin ones, read off the equation of its weight.

Cutting the network between input channels, taps and output channels leaves up to three kernels: 1x1 from the inputs,
one with the taps, 1x1 to the outputs. The bonds that are cut are the channels in between.
"""

import math
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

from bayestrain.formats import algebra
from bayestrain.formats.algebra import Shaped
from bayestrain.formats.equation import Labels
from bayestrain.nn.factorized import FactorizedWeight


class Chain(NamedTuple):
    """A way to run a kernel as two or three thin ones."""

    stages: tuple[int, ...]  # for every core the kernel it is part of: 0 (inputs), 1 (taps) or 2 (outputs)
    through: Labels  # bonds that all three kernels share: in the one with the taps, each of their indices is a group
    before: Labels  # the other bonds in front of the taps
    behind: Labels  # and behind them
    groups: int
    channels: tuple[int, int]  # in front of the taps and behind them


@lru_cache(maxsize=4096)
def chains(network: tuple[Shaped, ...], axes: tuple[Labels, ...]) -> tuple[Chain, ...]:
    """Every chain for a weight of these cores, whose axes (outputs, inputs, taps ..) have these labels."""
    size = {label: n for labels, shape in network for label, n in zip(labels, shape, strict=True)}
    outs, ins, modes = set(axes[0]), set(axes[1]), {label for labels in axes for label in labels}
    sides = [modes.intersection(labels) for labels, _ in network]
    ways = [(False, True) if all(side <= own for side in sides if side & own) else (False,) for own in (ins, outs)]
    found = []
    for first, last in product(*ways):
        free = [stage for stage, used in enumerate((first, True, last)) if used]
        choices = []
        for side in sides:
            fixed = 0 if first and side <= ins else 2 if last and side <= outs else 1
            choices.append([fixed] if side else free)
        for stages in product(*choices) if first or last else ():
            own: list[set[str]] = [set(), set(), set()]
            for (labels, _), stage in zip(network, stages, strict=True):
                own[stage].update(label for label in labels if label not in modes)
            if not own[0] & own[2] <= own[1]:
                continue  # a bond past the taps: groups of kernels that are all the same
            cut = own[0] & own[2], (own[0] & own[1]) - own[2], (own[1] & own[2]) - own[0]
            through, before, behind = (tuple(label for label in size if label in labels) for labels in cut)
            groups = math.prod(size[label] for label in through)
            ends = before if first else axes[1], behind if last else axes[0]
            a, b = (groups * math.prod(size[label] for label in labels) for labels in ends)
            found.append(Chain(stages, through, before, behind, groups, (a, b)))
    return tuple(found)


def cheapest(
    network: tuple[Shaped, ...], axes: tuple[Labels, ...], shape: tuple[int, ...], positions: tuple[int, int]
) -> tuple[Chain | None, float]:
    """The chain with the fewest multiplications, and how many relative to the whole kernel; None if that has fewest.

    `positions`: where the 1x1 kernel of the inputs and that of the outputs act, for every one that the taps act on.
    """
    outputs, inputs, *taps = shape
    best, fewest = None, math.prod(shape)
    for chain in chains(network, axes):
        first, last = 0 in chain.stages, 2 in chain.stages
        a, b = chain.channels[0] if first else inputs, chain.channels[1] if last else outputs
        work = a * b // chain.groups * math.prod(taps)
        work += first * inputs * a * positions[0] + last * outputs * b * positions[1]
        if work < fewest:
            best, fewest = chain, work
    return best, fewest / math.prod(shape)


cheapest._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `formats.algebra`


def network(weight: FactorizedWeight) -> tuple[Shaped, ...]:
    """The labels and sizes of a weight's cores, as `chains` takes them."""
    return tuple((labels, tuple(map(int, core.shape))) for core, labels in weight.operands())


def kernels(weight: FactorizedWeight, chain: Chain) -> list[Tensor]:
    """The kernels of a chain in the order in which they act, each ``(channels, channels of a group, taps ..)``."""
    (outs, ins, *taps), axes, padded = weight.layout.labels, weight.layout.axes, weight.layout.padded
    parts: list[list[algebra.Operand]] = [[], [], []]
    for operand, stage in zip(weight.operands(), chain.stages, strict=True):
        parts[stage].append(operand)
    first, middle, last = parts
    (a, b), ones, found = chain.channels, (1,) * (len(weight.shape) - 2), []
    if first:
        kernel = algebra.contract(first, (*chain.through, *chain.before, *ins))
        found.append(kernel.reshape(a, padded[1])[:, : axes[1]].reshape(a, axes[1], *ones))
    ends = *(chain.behind if last else outs), *(chain.before if first else ins)
    kernel = algebra.contract(middle, (*chain.through, *ends, *(label for labels in taps for label in labels)))
    kernel = kernel.reshape(b, a // chain.groups, *padded[2:])
    limits = None if last else axes[0], None if first else axes[1], *axes[2:]
    kernel = kernel[tuple(map(slice, limits))]
    found.append(kernel.reshape(*kernel.shape[:2], *weight.shape[2:]))
    if last:
        kernel = algebra.contract(last, (*outs, *chain.through, *chain.behind))
        found.append(kernel.reshape(padded[0], b)[: axes[0]].reshape(axes[0], b, *ones))
    return found
