"""Predict which way to multiply by a train is fastest. Plain numbers; knows no torch.

There are three ways: materialise the weight, multiply by two factors (the cores merged on either side of one bond), or
multiply core by core. A weight that splits into an output half and an input half, such as a convolution's, is either
materialised or used as two thin ones. The time of a `Plan` is predicted from its operations and bytes with the
constants of a `Machine`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True)
class Machine:
    """What a device does per second, as far as these layers are concerned.

    Attributes:
        rate: operations per second of large matrix products.
        bandwidth: bytes per second of a copy, counting what is read and what is written.
        reading: bytes per second that a product reads and writes.
        launch: seconds that any operation takes at least.
        link: further seconds for every product of a chain.
        half: a product with a dimension of this size reaches half the rate.
        slice: seconds for each slice of a batched product.
        block: outputs are computed in blocks of this many.
    """

    rate: float
    bandwidth: float
    reading: float
    launch: float
    link: float
    half: float
    slice: float
    block: int = 1

    def faster(self, times: float) -> Machine:
        """The same machine with `times` the rate: more threads, or a shorter number format."""
        return replace(self, rate=self.rate * times)


CPU_THREAD = Machine(9.5e10, 1.2e10, 4e10, 5e-6, 1.2e-5, 6.0, 3e-7)
"""One thread of a server's CPU (AMD EPYC) in single precision, measured."""

CUDA = Machine(3.3e14, 3.5e12, 3.5e12, 3e-6, 2e-6, 48.0, 2e-9)
"""An NVIDIA H200 with TF32 and operations launched by a CUDA graph, measured."""

CPU_THREAD_CONV = replace(CPU_THREAD, launch=3e-5, half=4.0, block=16)
CUDA_CONV = replace(CUDA, rate=2e14, half=32.0, block=8)
"""The same devices convolving."""


class Plan(NamedTuple):
    """One way to use a weight: "whole weight", "two factors" or "core by core", and the bonds between factors."""

    kind: str
    cuts: tuple[int, ...] = ()


class Task(NamedTuple):
    """What is asked of a weight; the rows of a convolution are positions of its output."""

    rows: int
    itemsize: int = 4
    training: bool = True
    """Whether a backward pass follows."""
    merged: bool = False
    """Whether merged factors are available from an earlier call."""

    @property
    def passes(self) -> int:
        """Products of the same size that each product of the forward pass stands for."""
        return 3 if self.training else 1


class Cost(NamedTuple):
    """A plan with its predicted seconds and its multiplications."""

    seconds: float
    operations: float
    plan: Plan


class _Tally:
    """Adds up the seconds and multiplications of a plan."""

    def __init__(self, task: Task, machine: Machine) -> None:
        self.task, self.machine, self.seconds, self.operations = task, machine, 0.0, 0.0

    def product(self, batch: int, n: int, k: int, columns: int, block: int = 1) -> None:
        """Products of ``(n, k)`` with ``(k, columns)``, for each of `batch` slices, and their backward pass."""
        times, machine = self.task.passes, self.machine
        self.operations += times * batch * n * k * columns
        n = math.ceil(n / block) * block
        moved = self.task.itemsize * (batch * (k * columns + n * columns) + n * k)
        share = math.prod(size / (size + machine.half) for size in (n, k, columns))
        slices = batch if min(n, columns) > 1 else 1
        work = max(2.0 * batch * n * k * columns / (machine.rate * share), moved / machine.reading)
        self.seconds += times * (machine.launch + machine.slice * slices + work)

    def copy(self, numbers: float) -> None:
        """A copy, or a sum, of so many numbers."""
        self.seconds += self.machine.launch + 2 * self.task.itemsize * numbers / self.machine.bandwidth

    def merge(self, sizes: Sequence[int], ranks: Sequence[int], first: int, last: int) -> None:
        """Merge cores first to last - 1 in halves, unless they are."""
        if last - first == 1 or self.task.merged:
            return
        half = first + (last - first + 1) // 2
        self.merge(sizes, ranks, first, half)
        self.merge(sizes, ranks, half, last)
        rows, columns = ranks[first] * math.prod(sizes[first:half]), math.prod(sizes[half:last]) * ranks[last]
        self.product(1, rows, ranks[half], columns)

    def cost(self, plan: Plan) -> Cost:
        return Cost(self.seconds, self.operations, plan)


@dataclass(frozen=True)
class PairedShape:
    """Modes and ranks of a train whose modes are pairs of an output and an input; `ranks` with ones at both ends."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Of the modes."""
        return [m * j for m, j in zip(self.outs, self.ins, strict=True)]

    def costs(self, task: Task, machine: Machine) -> Iterator[Cost]:
        """All plans with their predicted seconds."""
        tally = _Tally(task, machine)
        tally.merge(self.sizes, self.ranks, 0, len(self.outs))
        tally.copy(0 if task.merged else math.prod(self.sizes) * (2 if task.training else 1))
        tally.product(1, math.prod(self.outs), math.prod(self.ins), task.rows)
        yield tally.cost(Plan("whole weight"))
        bonds = range(1, len(self.outs))
        for cuts in dict.fromkeys([*((bond,) for bond in bonds), tuple(bonds)]):
            yield self._chain(task, machine, cuts)

    def _chain(self, task: Task, machine: Machine, cuts: tuple[int, ...]) -> Cost:
        """A chain of the factors between the bonds `cuts`, from the right end."""
        tally, runs = _Tally(task, machine), list(pairwise((0, *cuts, len(self.outs))))
        ins, done = math.prod(self.ins), 1
        left = ins
        for a, b in runs[::-1]:
            m, j = math.prod(self.outs[a:b]), math.prod(self.ins[a:b])
            left //= j
            n, k = self.ranks[a] * m, j * self.ranks[b]
            tally.merge(self.sizes, self.ranks, a, b)
            tally.product(left, n, k, done * task.rows)
            done *= m
            if task.training and left > 1:
                tally.copy(left * n * k)  # gradients of the slices are written and added up
        for _ in range(2 if task.training else 1):
            tally.copy((ins + done) * task.rows)  # the batch becomes the last axis and back
        tally.seconds += machine.link * len(runs) * task.passes
        return tally.cost(Plan("two factors" if len(cuts) == 1 else "core by core", cuts))


@dataclass(frozen=True)
class HalvesShape:
    """A train with all modes of the outputs on one side of the bond `cut`; `ranks` with ones at both ends.

    The modes on the other side are those of the input, a convolution's taps among them.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    cut: int
    outputs_first: bool

    def costs(self, task: Task, machine: Machine) -> Iterator[Cost]:
        """Both plans with their predicted seconds."""
        sides = math.prod(self.sizes[: self.cut]), math.prod(self.sizes[self.cut :])
        rank, (outs, taps) = self.ranks[self.cut], sides if self.outputs_first else sides[::-1]
        for kind in ("whole weight", "two factors"):
            tally = _Tally(task, machine)
            tally.merge(self.sizes, self.ranks, 0, self.cut)
            tally.merge(self.sizes, self.ranks, self.cut, len(self.sizes))
            if kind == "two factors":
                tally.product(1, rank, taps, task.rows, machine.block)
                tally.product(1, outs, rank, task.rows, machine.block)
            else:
                if not task.merged:
                    tally.product(1, outs, rank, taps)
                tally.product(1, outs, taps, task.rows, machine.block)
            yield tally.cost(Plan(kind))


Shape = PairedShape | HalvesShape


@lru_cache(maxsize=4096)
def cheapest(shape: Shape, task: Task, machine: Machine) -> Cost:
    """The plan predicted to be fastest."""
    return min(shape.costs(task, machine))


def dense_cost(outputs: int, inputs: int, task: Task, machine: Machine) -> Cost:
    """What the dense layer would take: a product, or a convolution whose `inputs` are channels times taps."""
    tally = _Tally(task, machine)
    tally.product(1, outputs, inputs, task.rows, machine.block)
    return tally.cost(Plan("dense"))
