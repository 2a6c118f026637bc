"""Predict which way to multiply by a train is fastest. Plain numbers; knows no torch.

Neighbouring cores are merged into factors, which act one after the other. Without a cut there is one factor, the whole
weight; with one there are two; cut at every bond, the train is multiplied core by core. The time of each way is
predicted from its operations and bytes with the constants of a `Machine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Machine(NamedTuple):
    """What a device does, as far as these layers are concerned."""

    rate: float
    """Operations per second of large matrix products."""
    bandwidth: float
    """Bytes per second, counting what is read and what is written."""
    launch: float
    """Seconds that any operation takes at least."""
    link: float
    """Further seconds for every product of a chain."""
    half: float
    """A product with a dimension of this size reaches half the rate."""
    block: int = 1
    """Outputs are computed in blocks of this many."""


CPU_THREAD = Machine(rate=9.5e10, bandwidth=4e10, launch=5e-6, link=1.2e-5, half=6.0)
"""One thread of a server's CPU (AMD EPYC) in single precision, measured."""

CUDA = Machine(rate=3.3e14, bandwidth=3.5e12, launch=3e-6, link=2e-6, half=48.0)
"""An NVIDIA H200 with TF32 and operations launched by a CUDA graph, measured."""

CPU_THREAD_CONV = CPU_THREAD._replace(launch=3e-5, half=4.0, block=16)
CUDA_CONV = CUDA._replace(rate=2e14, half=32.0, block=8)
"""The same devices convolving."""


@dataclass(frozen=True)
class Train:
    """The modes of a layer's weight that is a train, core by core."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    """How much of the outputs, and of the inputs, each core has."""
    shape: tuple[int, ...]
    """The weight's, without padding."""
    middle: int = 0
    """The bond with all outputs on one side and all inputs, taps included, on the other; the only one to cut then."""
    inputs_first: bool = False
    """Whether the inputs are on the left of it."""

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """The bonds between factors, for every way to multiply."""
        bonds = (self.middle,) if self.middle else tuple(range(1, len(self.outs)))
        yield from dict.fromkeys([(), *((bond,) for bond in bonds), bonds])

    def runs(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The first core of every factor and the one behind its last, in the order in which they act."""
        found = list(pairwise((0, *cuts, len(self.outs))))
        return found if self.inputs_first else found[::-1]


class Task(NamedTuple):
    """What is asked of a weight; the rows of a convolution are positions of its output."""

    rows: int
    itemsize: int = 4
    training: bool = True
    """Whether a backward pass follows."""
    merged: bool = False
    """Whether merged factors are available from an earlier call."""


class Cost(NamedTuple):
    """Predicted seconds and multiplications of one way to multiply, and its cuts."""

    seconds: float
    operations: float
    cuts: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The way in words."""
        return ("whole weight", "two factors", "core by core")[min(len(self.cuts), 2)]


class _Tally:
    """Adds up the seconds and multiplications of a task."""

    def __init__(self, task: Task, machine: Machine) -> None:
        self.task, self.machine, self.seconds, self.operations = task, machine, 0.0, 0.0
        self.passes = 3 if task.training else 1
        """Products of the same size that each product of the forward pass stands for."""

    def product(self, batch: int, n: int, k: int, columns: int, block: int = 1) -> None:
        """Products of ``(n, k)`` with ``(k, columns)``, for each of `batch` slices, and their backward pass."""
        machine = self.machine
        self.operations += self.passes * batch * n * k * columns
        n = math.ceil(n / block) * block
        moved = self.task.itemsize * (batch * (k * columns + n * columns) + n * k)
        share = math.prod(size / (size + machine.half) for size in (n, k, columns))
        work = max(2.0 * batch * n * k * columns / (machine.rate * share), moved / machine.bandwidth)
        self.seconds += self.passes * (machine.launch + work)

    def copy(self, numbers: float) -> None:
        """A copy, or a sum, of so many numbers."""
        self.seconds += self.machine.launch + 2 * self.task.itemsize * numbers / self.machine.bandwidth

    def merge(self, train: Train, ranks: tuple[int, ...], first: int, last: int) -> None:
        """Merge cores first to last - 1 in halves, at the middle bond if it is one of theirs."""
        if last - first == 1:
            return
        half = train.middle if first < train.middle < last else first + (last - first + 1) // 2
        self.merge(train, ranks, first, half)
        self.merge(train, ranks, half, last)
        (rows, columns) = (math.prod(train.outs[a:b] + train.ins[a:b]) for a, b in ((first, half), (half, last)))
        self.product(1, ranks[first] * rows, ranks[half], columns * ranks[last])


def cost(train: Train, ranks: tuple[int, ...], cuts: tuple[int, ...], task: Task, machine: Machine) -> Cost:
    """What it takes to multiply by the factors between some bonds; `ranks` has ones at both ends."""
    tally, twice, runs = _Tally(task, machine), 2 if task.training else 1, train.runs(cuts)
    ins, done = math.prod(train.ins), 1
    left = ins
    for first, last in runs:
        before, after = (first, last) if train.inputs_first else (last, first)
        m, j = math.prod(train.outs[first:last]), math.prod(train.ins[first:last])
        left //= j
        n, k = ranks[after] * m, j * ranks[before]
        if not task.merged:
            tally.merge(train, ranks, first, last)
        tally.product(left, n, k, done * task.rows, machine.block)
        done *= m
        if task.training and left > 1:
            tally.copy(left * n * k)  # gradients of the slices are written and added up
    if cuts and not train.middle:
        for _ in range(twice):
            tally.copy((ins + done) * task.rows)  # the batch becomes the last axis and back
        tally.seconds += machine.link * len(runs) * tally.passes
    elif not train.middle:
        tally.copy(0 if task.merged else ins * done * twice)  # outputs and inputs are brought apart
    return Cost(tally.seconds, tally.operations, cuts)


@lru_cache(maxsize=4096)
def cheapest(train: Train, ranks: tuple[int, ...], task: Task, machine: Machine) -> Cost:
    """The way predicted to be fastest."""
    return min(cost(train, ranks, cuts, task, machine) for cuts in train.cuts())


def dense_cost(outputs: int, inputs: int, task: Task, machine: Machine) -> Cost:
    """What the dense layer would take: a product, or a convolution whose `inputs` are channels times taps."""
    tally = _Tally(task, machine)
    tally.product(1, outputs, inputs, task.rows, machine.block)
    return Cost(tally.seconds, tally.operations)
