"""Predict which way to multiply by a train is fastest. Plain numbers; knows no torch.

Neighbouring cores are merged into factors, which act one after the other. Without a cut there is one factor, the whole
weight; with one there are two; cut at every bond, the train is multiplied core by core. The time of each way is
predicted from its operations and bytes with the constants of a `Machine`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Machine(NamedTuple):
    """What a device does, as far as these layers are concerned."""

    rate: float  # operations per second of large matrix products
    bandwidth: float  # bytes per second, counting what is read and what is written
    launch: float  # seconds that any operation takes at least
    link: float  # further seconds for every product of a chain
    half: float  # a product with a dimension of this size reaches half the rate
    block: int = 1  # outputs are computed in blocks of this many
    fused: float = 0.0  # operations per second of the kernels for two factors; 0 where there are none


CPU_THREAD = Machine(rate=9.5e10, bandwidth=4e10, launch=5e-6, link=1.2e-5, half=6.0)
"""One thread of a server's CPU (AMD EPYC) in single precision, measured."""

CUDA = Machine(rate=3.3e14, bandwidth=3.5e12, launch=3e-6, link=2e-6, half=48.0, fused=1.05e14)
"""An NVIDIA H200 with TF32 and operations launched by a CUDA graph, measured."""

EAGER_LAUNCH = 2e-5  # seconds of an operation that Python launches one by one on that machine, about
LARGEST_TILE = 64  # rows or columns that a factor may have in the kernels
SHARED_MEMORY = 160_000  # bytes of shared memory that a GPU needs for such tiles

CPU_THREAD_CONV = CPU_THREAD._replace(launch=3e-5, half=4.0, block=16)
CUDA_CONV = CUDA._replace(rate=2e14, half=32.0, block=8, fused=0.0)
"""The same devices convolving."""


@dataclass(frozen=True)
class Train:
    """The modes of a layer's weight that is a train, core by core."""

    outs: tuple[int, ...]  # how much of the outputs each core has
    ins: tuple[int, ...]  # and of the inputs
    shape: tuple[int, ...]  # of the weight, without padding
    middle: int = 0  # the bond with all outputs on one side, inputs and taps on the other; the only one to cut then
    inputs_first: bool = False  # whether the inputs are on the left of it

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """The bonds between factors, for every way to multiply."""
        bonds = (self.middle,) if self.middle else tuple(range(1, len(self.outs)))
        yield from dict.fromkeys([(), *((bond,) for bond in bonds), bonds])

    def sizes(self, bond: int) -> tuple[int, int, int, int]:
        """Outputs and inputs of the factor before a bond, outputs and inputs of the one behind it."""
        outs, ins = (self.outs[:bond], self.outs[bond:]), (self.ins[:bond], self.ins[bond:])
        return math.prod(outs[0]), math.prod(ins[0]), math.prod(outs[1]), math.prod(ins[1])

    def runs(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The first core of every factor and the one behind its last, in the order in which they act."""
        found = list(pairwise((0, *cuts, len(self.outs))))
        return found if self.inputs_first else found[::-1]


class Task(NamedTuple):
    """What is asked of a weight; the rows of a convolution are positions of its output."""

    rows: int
    itemsize: int = 4
    training: bool = True  # whether a backward pass follows
    merged: bool = False  # whether merged factors are available from an earlier call


class Cost(NamedTuple):
    """Predicted seconds and multiplications of one way to multiply, its cuts, and whether one kernel does it."""

    seconds: float
    operations: float
    cuts: tuple[int, ...] = ()
    fused: bool = False


Product = tuple[int, int, int, int]  # (slices, n, k, columns): (n, k) times (k, columns) for each of so many slices


@lru_cache(maxsize=4096)
def cheapest(train: Train, ranks: tuple[int, ...], task: Task, machine: Machine) -> Cost:
    """The way predicted to be fastest; `ranks` has ones at both ends."""
    ways = [cost(train, ranks, cuts, task, machine) for cuts in train.cuts()]
    if machine.fused and not train.middle:
        bonds = [bond for bond in range(1, len(train.outs)) if max(train.sizes(bond)) <= LARGEST_TILE]
        ways += [fused(train, ranks, bond, task, machine) for bond in bonds]
    return min(ways)


def cost(train: Train, ranks: tuple[int, ...], cuts: tuple[int, ...], task: Task, machine: Machine) -> Cost:
    """What it takes to multiply by the factors between the bonds `cuts`."""
    products: list[Product] = []
    copies: list[int] = []
    ins, done, twice = math.prod(train.ins), 1, 2 if task.training else 1
    left, runs = ins, train.runs(cuts)
    for first, last in runs:
        before, after = (first, last) if train.inputs_first else (last, first)
        m, j = math.prod(train.outs[first:last]), math.prod(train.ins[first:last])
        left //= j
        n, k = ranks[after] * m, j * ranks[before]
        products += () if task.merged else _merges(train, ranks, first, last)
        products.append((left, n, k, done * task.rows))
        done *= m
        if task.training and left > 1:
            copies.append(left * n * k)  # gradients of the slices are written and added up
    if train.middle:
        return _cost(products, copies, task, machine, cuts)
    if not cuts:  # outputs and inputs are brought apart
        return _cost(products, [0 if task.merged else ins * done * twice], task, machine)
    copies += [(ins + done) * task.rows] * twice  # the batch becomes the last axis and back
    return _cost(products, copies, task, machine, cuts, links=len(runs))


def fused(train: Train, ranks: tuple[int, ...], bond: int, task: Task, machine: Machine) -> Cost:
    """What the kernels take for the two factors on both sides of a bond."""
    merges = [*_merges(train, ranks, 0, bond), *_merges(train, ranks, bond, len(train.outs))]
    merging = _cost([] if task.merged else merges, [], task, machine)
    o1, i1, o2, i2 = map(tile, train.sizes(bond))
    passes = 4 if task.training else 1  # the kernel that sums gradients computes both products again
    done = passes * task.rows * ranks[bond] * (i1 * i2 * o2 + o1 * i1 * o2)
    moved = task.itemsize * task.rows * (math.prod(train.ins) + math.prod(train.outs)) * (3 if task.training else 1)
    launches = 12 if task.training else 2  # of kernels, copies, and sums of partial gradients
    seconds = launches * machine.launch + max(2.0 * done / machine.fused, moved / machine.bandwidth)
    return Cost(merging.seconds + seconds, merging.operations + done, (bond,), fused=True)


def tile(size: int) -> int:
    """Rows or columns of the tile of a kernel that holds so many: a power of two, as matrix units take them."""
    return max(16, 1 << (size - 1).bit_length())


def dense_cost(outputs: int, inputs: int, task: Task, machine: Machine) -> Cost:
    """What the dense layer would take: a product, or a convolution whose `inputs` are channels times taps."""
    return _cost([(1, outputs, inputs, task.rows)], [], task, machine)


def _merges(train: Train, ranks: tuple[int, ...], first: int, last: int) -> Iterator[Product]:
    """Merge cores first to last - 1 in halves, at the middle bond if it is one of theirs."""
    if last - first > 1:
        half = train.middle if first < train.middle < last else first + (last - first + 1) // 2
        sizes = [math.prod(train.outs[a:b] + train.ins[a:b]) for a, b in ((first, half), (half, last))]
        yield 1, ranks[first] * sizes[0], ranks[half], sizes[1] * ranks[last]
        yield from _merges(train, ranks, first, half)
        yield from _merges(train, ranks, half, last)


def _cost(
    products: list[Product], copies: list[int], task: Task, machine: Machine, cuts: tuple[int, ...] = (), links: int = 0
) -> Cost:
    """Seconds and multiplications of products, each with its backward pass, and of copies of so many numbers."""
    seconds = links * machine.link
    for slices, n, k, columns in products:
        rows = math.ceil(n / machine.block) * machine.block
        share = math.prod(size / (size + machine.half) for size in (rows, k, columns))
        moved = task.itemsize * (slices * (k + rows) * columns + rows * k)
        work = 2.0 * slices * rows * k * columns / (machine.rate * share)
        seconds += machine.launch + max(work, moved / machine.bandwidth)
    passes = 3 if task.training else 1  # products of the same size that each product of the forward pass stands for
    seconds = passes * seconds + sum(machine.launch + 2 * task.itemsize * size / machine.bandwidth for size in copies)
    return Cost(seconds, passes * sum(map(math.prod, products)), cuts)
