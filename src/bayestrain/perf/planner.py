"""Predict which way to use a factorised weight is fastest. Plain numbers; knows no torch.

There are three ways to multiply a batch by a train: materialise the weight, multiply by two factors (the cores merged
on either side of one bond), or multiply core by core. A weight that splits into an output half and an input half, such
as a convolution's, is either materialised or used as two thin ones. A way is a `Plan`; its time is predicted from
operations and bytes with the constants of a `Machine`.
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
    """What a kind of device does per second, as far as these layers are concerned.

    Attributes:
        rate: operations per second of large matrix products.
        bandwidth: bytes per second of a copy, counting what is read and what is written.
        reading: bytes per second that a product reads and writes.
        launch: seconds that any operation takes at least.
        link: further seconds for every product of a chain.
        half: a product with a dimension of this size reaches half the rate.
        slice: seconds for each slice of a batched product.
        state: a chain takes as many rows of the batch at a time as keep its widest state within these bytes.
        block: outputs are computed in blocks of this many.
    """

    rate: float
    bandwidth: float
    reading: float
    launch: float
    link: float
    half: float
    slice: float
    state: int
    block: int = 1

    def faster(self, times: float) -> Machine:
        """The same machine with `times` the rate: more threads, or a shorter number format."""
        return replace(self, rate=self.rate * times)


CPU_THREAD = Machine(9.5e10, 1.2e10, 4e10, 5e-6, 1.2e-5, 6.0, 3e-7, 1 << 20)
"""One thread of a server's CPU (AMD EPYC) in single precision, measured."""

CUDA = Machine(3.3e14, 3.5e12, 3.5e12, 3e-6, 2e-6, 48.0, 2e-9, 1 << 62)
"""An NVIDIA H200 with TF32 and operations launched by a CUDA graph, measured."""

CPU_THREAD_CONV, CUDA_CONV = (
    replace(CPU_THREAD, launch=3e-5, half=4.0, block=16),
    replace(CUDA, rate=2e14, half=32.0, block=8),
)
"""The same devices convolving."""

FEW_ROWS = 16
"""With fewer rows than this a chain keeps the batch as its first axis; otherwise the batch is the last one."""


class Plan(NamedTuple):
    """One way to use a weight: "whole weight", "two factors" or "core by core", with how a chain runs."""

    kind: str
    side: str = ""
    cuts: tuple[int, ...] = ()
    block: int = 0


class Task(NamedTuple):
    """What is asked of a weight: rows of the batch, bytes per number, whether a backward pass follows.

    `merged` says that the merged factors are at hand from an earlier call.
    """

    rows: int
    itemsize: int = 4
    training: bool = True
    merged: bool = False

    @property
    def passes(self) -> int:
        """Products of the same size that each product of the forward pass stands for."""
        return 3 if self.training else 1


class _Tally:
    """Adds up the seconds and multiplications of a plan."""

    def __init__(self, machine: Machine, itemsize: int) -> None:
        self.machine, self.itemsize, self.seconds, self.operations = machine, itemsize, 0.0, 0.0

    def product(self, batch: int, n: int, k: int, columns: int, times: float = 1.0) -> None:
        """`times` products of ``(n, k)`` with ``(k, columns)``, for each of `batch` slices."""
        self.operations += times * batch * n * k * columns
        machine, n = self.machine, math.ceil(n / self.machine.block) * self.machine.block
        moved = self.itemsize * (batch * (k * columns + n * columns) + n * k)
        share = math.prod(size / (size + machine.half) for size in (n, k, columns))
        slices = batch if min(n, columns) > 1 else 1
        work = max(2.0 * batch * n * k * columns / (machine.rate * share), moved / machine.reading)
        self.seconds += times * (machine.launch + machine.slice * slices + work)

    def copy(self, numbers: float, times: float = 1.0) -> None:
        """`times` copies, or sums, of so many numbers."""
        self.seconds += times * (self.machine.launch + 2 * self.itemsize * numbers / self.machine.bandwidth)


class Cost(NamedTuple):
    """A plan with its predicted seconds and its multiplications."""

    seconds: float
    operations: float
    plan: Plan


@dataclass(frozen=True)
class PairedShape:
    """Modes and ranks of a train whose modes are pairs of an output and an input; `ranks` with ones at both ends."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    ranks: tuple[int, ...]

    def costs(self, task: Task, machine: Machine) -> list[Cost]:
        """All plans with their predicted seconds."""
        return sorted(self._costs(task, machine))

    def _costs(self, task: Task, machine: Machine) -> Iterator[Cost]:
        tally = _Tally(machine, task.itemsize)
        self._merge(tally, 0, len(self.outs), task)
        tally.product(1, math.prod(self.outs), math.prod(self.ins), task.rows, task.passes)
        yield Cost(tally.seconds, tally.operations, Plan("whole weight"))
        bonds = range(1, len(self.outs))
        for cuts in dict.fromkeys([*((bond,) for bond in bonds), tuple(bonds)]):
            for side in ("right", "left"):
                yield self._chain(task, machine, side, cuts)

    def _chain(self, task: Task, machine: Machine, side: str, cuts: tuple[int, ...]) -> Cost:
        """Seconds of a chain of the factors between the bonds `cuts`, from this side (see `chain`)."""
        tally, few = _Tally(machine, task.itemsize), task.rows < FEW_ROWS
        for a, b in pairwise((0, *cuts, len(self.outs))):
            self._merge(tally, a, b, task)
            if side == "left" and not task.merged:
                tally.copy(math.prod(self._factor(a, b)))
        steps = self._steps(cuts, side)
        outputs, inputs = math.prod(self.outs), math.prod(self.ins)
        block = task.rows
        if not few:  # a power of two whose states fit; a state is what goes into a product, for one row
            widest = max(outputs, *(batch * k * columns for batch, _, k, columns in steps[1:]))
            block = min(task.rows, 1 << max(4, (machine.state // (widest * task.itemsize)).bit_length() - 1))
        blocks = math.ceil(task.rows / block)
        for batch, n, k, columns in steps:
            slices = batch if not few else 1 if columns == 1 else batch * block
            inner = columns * block if not few else batch * block if columns == 1 else columns
            tally.product(slices, n, k, inner, blocks * task.passes)
            if task.training and slices > 1:
                tally.copy(slices * n * k, blocks)  # gradients of the slices are written and added up
        if not few:
            tally.copy((outputs + (inputs if side == "left" else 0)) * block, blocks)
            if task.training:
                tally.copy((outputs + inputs) * block, blocks)
        seconds = tally.seconds + machine.link * len(steps) * blocks * task.passes
        plan = Plan("two factors" if len(cuts) == 1 else "core by core", side, cuts, block)
        return Cost(seconds, tally.operations, plan)

    def _steps(self, cuts: Sequence[int], side: str) -> list[tuple[int, int, int, int]]:
        """``(slices, rows, inner size, columns for one row of the batch)`` of every product, in order."""
        factors = [self._factor(a, b) for a, b in pairwise((0, *cuts, len(self.outs)))]
        left, done, steps = math.prod(self.ins), 1, []
        for a, m, j, b in factors if side == "left" else reversed(factors):
            left //= j
            steps.append((left, a * m, j * b, done) if side == "right" else (done, m * b, a * j, left))
            done *= m
        return steps

    def _factor(self, a: int, b: int) -> tuple[int, int, int, int]:
        """``(rank, outputs, inputs, rank)`` of cores a to b - 1, merged."""
        return self.ranks[a], math.prod(self.outs[a:b]), math.prod(self.ins[a:b]), self.ranks[b]

    def _merge(self, tally: _Tally, first: int, last: int, task: Task) -> None:
        """Merge cores first to last - 1 in halves, unless they are."""
        if last - first == 1 or task.merged:
            return
        half = first + (last - first + 1) // 2
        self._merge(tally, first, half, task)
        self._merge(tally, half, last, task)
        (a, m, j, r), (_, n, k, b) = self._factor(first, half), self._factor(half, last)
        tally.product(1, a * m * j, r, n * k * b, task.passes)
        tally.copy(a * m * j * n * k * b, 2 if task.training else 1)


@dataclass(frozen=True)
class HalvesShape:
    """A train with all modes of the outputs on one side of the bond `cut`; `ranks` with ones at both ends.

    The modes on the other side are those of the input, a convolution's taps among them. The rows of a convolution's
    task are positions of its output.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    cut: int
    outputs_first: bool

    def costs(self, task: Task, machine: Machine) -> list[Cost]:
        """Both plans with their predicted seconds."""
        sides = math.prod(self.sizes[: self.cut]), math.prod(self.sizes[self.cut :])
        rank, (outs, taps) = self.ranks[self.cut], sides if self.outputs_first else sides[::-1]
        found = []
        for kind in ("whole weight", "two factors"):
            tally, merging = _Tally(machine, task.itemsize), _Tally(replace(machine, block=1), task.itemsize)
            if not task.merged:
                self._merge(merging, 0, self.cut, task)
                self._merge(merging, self.cut, len(self.sizes), task)
            if kind == "two factors":
                tally.product(1, rank, taps, task.rows, task.passes)
                tally.product(1, outs, rank, task.rows, task.passes)
            else:
                merging.product(1, outs, rank, taps, 0 if task.merged else task.passes)
                tally.product(1, outs, taps, task.rows, task.passes)
            seconds, operations = tally.seconds + merging.seconds, tally.operations + merging.operations
            found.append(Cost(seconds, operations, Plan(kind)))
        return sorted(found)

    def _merge(self, tally: _Tally, first: int, last: int, task: Task) -> None:
        """Merge a run of cores in halves."""
        if last - first == 1:
            return
        half = first + (last - first + 1) // 2
        self._merge(tally, first, half, task)
        self._merge(tally, half, last, task)
        rows, columns = math.prod(self.sizes[first:half]), math.prod(self.sizes[half:last])
        tally.product(1, self.ranks[first] * rows, self.ranks[half], columns * self.ranks[last], task.passes)


@lru_cache(maxsize=4096)
def best(shape: PairedShape | HalvesShape, task: Task, machine: Machine) -> Plan:
    """The plan predicted to be fastest."""
    return shape.costs(task, machine)[0].plan


def dense_cost(outputs: int, inputs: int, task: Task, machine: Machine) -> Cost:
    """What the dense layer would take: a product, or a convolution whose `inputs` are channels times taps."""
    tally = _Tally(machine, task.itemsize)
    tally.product(1, outputs, inputs, task.rows, task.passes)
    return Cost(tally.seconds, tally.operations, Plan("dense"))
