"""How to multiply by a tensor train: the ways there are, what each costs, and which is cheapest.

Integers and floats only. A way is a `Plan`; its cost is predicted from operations and bytes with the few constants of a
`Machine`. Linear layers either form the weight ("dense") or run a chain of products by merged cores ("right:2" merges
the cores on both sides of bond 2 and starts at the right end; "right:1,2,3" of four cores merges nothing);
convolutions either form the kernel ("kernel") or run the two-step form ("two-step").
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, islice, pairwise

from bayestrain.errors import ConfigError

MAX_CUTS = 64
"""Chains that are looked at per side; trains of very many cores have more."""

KEPT_WEIGHTS = 4.0
"""States between products are saved for the backward pass while they are at most so many times the dense weight, which
is what weight, gradient and an optimiser's two moments would take for a dense layer; else they are computed again."""

DENSE_BLOCKS = 32
"""The low-memory dense plan forms the weight in so many blocks."""


@dataclass(frozen=True)
class Machine:
    """What a kind of device does per second, as far as these layers are concerned.

    Args:
        rate: operations per second of large matrix products.
        bandwidth: bytes per second of a copy, read and write counted.
        reading: bytes per second that a product reads and writes.
        launch: seconds that any operation takes at least.
        link: seconds that every product of a chain takes beyond that.
        half: a product with a dimension of this size reaches half the rate.
        slice: seconds for each slice of a batched product.
        state: bytes of a chain's widest state in one block of the batch.
        thrifty_state: the same where blocks are there to save memory.
        batch_last_from: rows from which on a chain has the batch as its last axis.
        conv_rate, conv_half, conv_launch: as `rate`, `half` and `launch`, for convolutions.
        conv_block: convolutions compute their output channels in blocks of so many.
    """

    rate: float
    bandwidth: float
    reading: float
    launch: float
    link: float
    half: float
    slice: float
    state: int
    thrifty_state: int
    batch_last_from: int
    conv_rate: float
    conv_half: float
    conv_launch: float
    conv_block: int

    def faster(self, times: float) -> "Machine":
        """The same with so many times the rate: more threads, or a shorter number format."""
        return replace(self, rate=self.rate * times, conv_rate=self.conv_rate * times)


CPU_THREAD = Machine(9.5e10, 1.2e10, 4e10, 5e-6, 1.2e-5, 6.0, 3e-7, 1 << 20, 1 << 20, 16, 9.5e10, 4.0, 3e-5, 16)
"""One thread of a server's CPU (AMD EPYC), single precision."""

CUDA = Machine(3.3e14, 3.5e12, 3.5e12, 3e-6, 2e-6, 48.0, 2e-9, 32 << 20, 4 << 20, 1 << 62, 2e14, 32.0, 3e-6, 8)
"""An NVIDIA H200 with TF32, operations launched by a CUDA graph."""


@dataclass(frozen=True)
class Plan:
    """One way to run a layer. `name` is what `force_plan` takes."""

    kind: str
    side: str = ""
    cuts: tuple[int, ...] = ()
    recompute: bool = False
    block: int = 0
    batch_last: bool = False

    @property
    def name(self) -> str:
        """As ``dense``, ``right:2`` or ``left:1,2+recompute``."""
        chain = f"{self.side}:{','.join(map(str, self.cuts))}" if self.kind == "chain" else self.kind
        return chain + ("+recompute" if self.recompute else "")


@dataclass(frozen=True)
class Cost:
    """A plan with its predicted seconds, multiply-adds, and bytes saved for the backward pass."""

    plan: Plan
    seconds: float
    operations: float
    saved: float


@dataclass(frozen=True)
class Task:
    """What is asked of a layer: rows of the batch, bytes per number, and whether a backward pass follows.

    `formed` says that merged factors are at hand from an earlier call.
    """

    rows: int
    itemsize: int = 4
    training: bool = True
    formed: bool = False


class _Tally:
    """Adds up the cost of a plan."""

    def __init__(self, machine: Machine, itemsize: int) -> None:
        self.machine, self.itemsize = machine, itemsize
        self.seconds = self.operations = 0.0

    def product(self, batch: int, n: int, k: int, columns: int, times: float = 1.0) -> None:
        """`times` products of ``(n, k)`` with ``(k, columns)``, for each of `batch` slices."""
        machine = self.machine
        operations = 2.0 * batch * n * k * columns
        moved = self.itemsize * batch * (k * columns + n * columns) + self.itemsize * n * k
        share = math.prod(size / (size + machine.half) for size in (n, k, columns))
        slices = batch if min(n, columns) > 1 else 1
        self.seconds += times * (
            machine.launch + machine.slice * slices + max(operations / (machine.rate * share), moved / machine.reading)
        )
        self.operations += times * operations / 2

    def copy(self, numbers: float, times: float = 1.0) -> None:
        """`times` copies, or sums, of so many numbers."""
        moved = 2 * self.itemsize * numbers
        self.seconds += times * (self.machine.launch + moved / self.machine.bandwidth)


@dataclass(frozen=True)
class TrainShape:
    """Modes and ranks of a tensor-train matrix; `ranks` with the boundary ones."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    ranks: tuple[int, ...]

    def groups(self, cuts: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """``(rank, outputs, inputs, rank)`` of the factors between the cuts."""
        return [
            (self.ranks[a], math.prod(self.outs[a:b]), math.prod(self.ins[a:b]), self.ranks[b])
            for a, b in pairwise((0, *cuts, len(self.outs)))
        ]

    def form(self, tally: _Tally, first: int, last: int, times: float) -> None:
        """Merge cores first..last-1 in halves, as `tt.merge_matrix` does; ``times`` 3 for a backward pass as well."""
        if last - first == 1:
            return
        half = first + (last - first + 1) // 2
        self.form(tally, first, half, times)
        self.form(tally, half, last, times)
        (a, m, j, r), (_, n, k, b) = self._merged(first, half), self._merged(half, last)
        tally.product(1, a * m * j, r, n * k * b, times)
        tally.copy(a * m * j * n * k * b, 1 if times == 1 else 2)

    def _merged(self, first: int, last: int) -> tuple[int, int, int, int]:
        return (
            self.ranks[first], math.prod(self.outs[first:last]), math.prod(self.ins[first:last]), self.ranks[last]
        )  # fmt: skip


def linear_costs(shape: TrainShape, task: Task, machine: Machine) -> list[Cost]:
    """Every plan of a linear layer with its cost, cheapest first; low-memory plans (``+recompute``) among them."""
    return sorted(_linear_costs(shape, task, machine), key=lambda cost: cost.seconds)


def _linear_costs(shape: TrainShape, task: Task, machine: Machine) -> Iterator[Cost]:
    dense = _dense_cost(shape, task, machine)
    yield dense
    d = len(shape.outs)
    if task.training:
        # Blocks of the weight are formed twice, the input's gradient is read and written for each.
        again = _Tally(machine, task.itemsize)
        shape.form(again, 0, d, 1)
        again.copy(task.rows * math.prod(shape.ins), DENSE_BLOCKS)
        rows = math.prod(shape.outs[: middle(shape)])
        plan = Plan("dense", cuts=(middle(shape),), recompute=True, block=max(1, rows // DENSE_BLOCKS))
        yield Cost(plan, dense.seconds + again.seconds, dense.operations + again.operations, 0.0)
    cuts = chain.from_iterable(combinations(range(1, d), count) for count in range(1, d))
    few = dict.fromkeys([*islice(cuts, MAX_CUTS), tuple(range(1, d))])
    for side in ("left", "right"):
        for chosen in few:
            kept = _chain_cost(shape, task, machine, side, chosen, recompute=False)
            yield kept
            if task.training:
                yield _chain_cost(shape, task, machine, side, chosen, recompute=True)


def middle(shape: TrainShape) -> int:
    """The bond at which a weight is put together from two halves."""
    return (len(shape.outs) + 1) // 2


def _dense_cost(shape: TrainShape, task: Task, machine: Machine) -> Cost:
    tally = _Tally(machine, task.itemsize)
    passes = 3 if task.training else 1
    outputs, inputs = math.prod(shape.outs), math.prod(shape.ins)
    if not task.formed:
        shape.form(tally, 0, len(shape.outs), passes)
    tally.product(1, outputs, inputs, task.rows, passes)
    saved = task.itemsize * outputs * inputs if task.training else 0.0
    return Cost(Plan("dense"), tally.seconds, tally.operations, saved)


def _chain_cost(
    shape: TrainShape, task: Task, machine: Machine, side: str, cuts: tuple[int, ...], recompute: bool
) -> Cost:
    tally = _Tally(machine, task.itemsize)
    if not task.formed:
        for a, b in pairwise((0, *cuts, len(shape.outs))):
            shape.form(tally, a, b, 3 if task.training else 1)
            if side == "left":
                tally.copy(math.prod(shape.outs[a:b]) * math.prod(shape.ins[a:b]) * shape.ranks[a] * shape.ranks[b], 1)
    steps = _steps(shape, cuts, side)
    states = [batch * k * columns for batch, _, k, columns in steps]  # numbers per row, going into each product
    outputs, inputs = math.prod(shape.outs), math.prod(shape.ins)
    block = _block(max(*states[1:], outputs) * task.itemsize, task, machine, recompute)
    blocks = math.ceil(task.rows / block)
    last = task.rows >= machine.batch_last_from
    for index, (batch, n, k, columns) in enumerate(steps):
        times = blocks * (3.0 + (recompute and index + 1 < len(steps)) if task.training else 1.0)
        if last:
            tally.product(batch, n, k, columns * block, times)
        elif columns == 1:
            tally.product(1, n, k, batch * block, times)
        else:
            tally.product(batch * block, n, k, columns, times)
        slices = batch if last else 1 if columns == 1 else batch * block
        if task.training and slices > 1:
            tally.copy(slices * n * k, blocks)  # their gradients are written and added up
    if last:
        transposed = outputs + (inputs if side == "left" else 0)
        tally.copy(transposed * block, blocks)
        if task.training:
            tally.copy((outputs + inputs) * block, blocks)
    tally.seconds += machine.link * len(steps) * blocks * (3 if task.training else 1)
    saved = sum(states[1:]) + (inputs if side == "left" and last else 0)
    saved_bytes = 0.0 if recompute or not task.training else float(saved * task.rows * task.itemsize)
    plan = Plan("chain", side, cuts, recompute, block, last)
    return Cost(plan, tally.seconds, tally.operations, saved_bytes)


def _block(state: int, task: Task, machine: Machine, recompute: bool) -> int:
    """Rows of the batch at a time: a power of two, at least 16, whose states of `state` bytes a row fit."""
    room = machine.thrifty_state if recompute else machine.state
    return min(task.rows, 1 << max(4, (room // state).bit_length() - 1))


def _steps(shape: TrainShape, cuts: Sequence[int], side: str) -> list[tuple[int, int, int, int]]:
    """``(slices, rows, inner size, columns for one row of the batch)`` of every product, in order (see `chain`)."""
    groups = shape.groups(cuts)
    steps = []
    done = 1
    if side == "right":
        left = math.prod(j for _, _, j, _ in groups)
        for a, m, j, b in reversed(groups):
            left //= j
            steps.append((left, a * m, j * b, done))
            done *= m
    else:
        left = math.prod(j for _, _, j, _ in groups)
        for a, m, j, b in groups:
            left //= j
            steps.append((done, m * b, a * j, left))
            done *= m
    return steps


def dense_cost(outputs: int, inputs: int, task: Task, machine: Machine, conv: bool = False) -> Cost:
    """What the dense layer itself would cost: a product, or a convolution with `inputs` taps in all."""
    tally = _Tally(_convolving(machine) if conv else machine, task.itemsize)
    tally.product(1, _blocks_of(machine, outputs) if conv else outputs, inputs, task.rows, 3 if task.training else 1)
    return Cost(Plan("dense layer"), tally.seconds, tally.operations, 0.0)


@dataclass(frozen=True)
class ConvShape:
    """Taps of the kernel, channel modes and ranks of a convolution's train; `ranks` with the boundary ones."""

    taps: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=8192)
def best_linear(
    shape: TrainShape, task: Task, machine: Machine, low_memory: bool = False, forced: str | None = None
) -> Plan:
    """The plan to take: the forced one, or the fastest that does not save too much for the backward pass."""
    costs = linear_costs(shape, task, machine)
    if forced is not None:
        return _named(costs, forced, task)
    limit = KEPT_WEIGHTS * 4 * math.prod(shape.outs) * math.prod(shape.ins)  # optimisers work in single precision
    for cost in costs:
        if cost.saved <= limit and (cost.plan.recompute or not (low_memory and task.training)):
            return cost.plan
    raise AssertionError("recomputing saves nothing, so there is always one")


def conv_costs(shape: ConvShape, task: Task, machine: Machine) -> list[Cost]:
    """The two plans of a convolution with their costs, cheapest first; rows of the task are positions of the output."""
    t, ins, outs, rank = shape.taps, math.prod(shape.ins), math.prod(shape.outs), shape.ranks[1 + len(shape.ins)]
    passes = 3 if task.training else 1
    conv = _convolving(machine)
    found = []
    for kind in ("kernel", "two-step"):
        tally, forming = _Tally(conv, task.itemsize), _Tally(machine, task.itemsize)
        if not task.formed:
            sizes = (t, *shape.ins, *shape.outs)
            cut = 1 + len(shape.ins)
            _merge(forming, sizes[:cut], shape.ranks[: cut + 1], passes)
            _merge(forming, sizes[cut:], shape.ranks[cut:], passes)
        if kind == "kernel":
            if not task.formed:
                forming.product(1, outs, rank, t * ins, passes)
            tally.product(1, _blocks_of(machine, outs), t * ins, task.rows, passes)
            saved = task.itemsize * outs * t * ins
        else:
            tally.product(1, _blocks_of(machine, rank), t * ins, task.rows, passes)
            tally.product(1, _blocks_of(machine, outs), rank, task.rows, passes)
            saved = task.itemsize * rank * task.rows
        found.append(
            Cost(
                Plan(kind), tally.seconds + forming.seconds, tally.operations + forming.operations,
                float(saved if task.training else 0),
            )
        )  # fmt: skip
    return sorted(found, key=lambda cost: cost.seconds)


def _blocks_of(machine: Machine, channels: int) -> int:
    return math.ceil(channels / machine.conv_block) * machine.conv_block


def _convolving(machine: Machine) -> Machine:
    return replace(machine, rate=machine.conv_rate, half=machine.conv_half, launch=machine.conv_launch)


def _merge(tally: _Tally, sizes: Sequence[int], ranks: Sequence[int], times: float) -> None:
    """Merge flat cores in halves, as `tt.merge` does."""
    if len(sizes) == 1:
        return
    half = (len(sizes) + 1) // 2
    _merge(tally, sizes[:half], ranks[: half + 1], times)
    _merge(tally, sizes[half:], ranks[half:], times)
    tally.product(1, ranks[0] * math.prod(sizes[:half]), ranks[half], math.prod(sizes[half:]) * ranks[-1], times)


@lru_cache(maxsize=8192)
def best_conv(shape: ConvShape, task: Task, machine: Machine, forced: str | None = None) -> Plan:
    """The forced plan, or the faster of the two."""
    costs = conv_costs(shape, task, machine)
    return costs[0].plan if forced is None else _named(costs, forced, task)


def _named(costs: Iterable[Cost], name: str, task: Task) -> Plan:
    """The plan of that name; without a backward pass there is nothing to recompute."""
    known = {cost.plan.name: cost.plan for cost in costs}
    wanted = name if task.training else name.removesuffix("+recompute")
    if wanted not in known:
        raise ConfigError(f"There is no plan {name!r} for this layer. It has {', '.join(sorted(known))}.")
    return known[wanted]
