"""Weights of one equation padded with zeros, which changes nothing, and stacked: aligned and materialised together."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayestrain.formats.align import aligning_gauges, change_gauge, tree_grams
from bayestrain.formats.equation import Equation
from bayestrain.nn import FactorizedWeight, TensorLayer
from bayestrain.nn.precision import own_precision
from bayestrain.perf import trains
from bayestrain.perf.planner import Train


def cores_of(weight: FactorizedWeight) -> list[Tensor]:
    """The current cores of a weight; reading them one by one as attributes would be slow."""
    own: Any = weight.cores._parameters
    return list(own.values()) if len(own) == len(weight.equation.cores) else list(weight.cores)


class Stacks:
    """How the cores of weights, as they are shaped now, are stacked and taken apart again."""

    def __init__(self, weights: Mapping[Any, FactorizedWeight]) -> None:
        self.weights, self.equation = weights, next(iter(weights.values())).equation
        cores = self._cores()
        self.shapes = [[core.shape for core in own] for own in cores]
        self.stacked = [(len(own), *map(max, zip(*own, strict=True))) for own in self.shapes]
        self.sizes, places = [math.prod(shape) for shape in self.stacked], []
        for shapes, index in zip(self.shapes, self._split(torch.arange(sum(self.sizes))), strict=True):
            places += [cell.flatten() for cell in _cells(index, shapes)]
        self.places = torch.cat(places).to(cores[0][0].device)

    def __call__(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The stacked cores, perhaps in another type; differentiable."""
        flat = torch.cat([core.reshape(-1) for own in self._cores() for core in own]).to(dtype)
        return self._split(flat.new_zeros(sum(self.sizes)).index_copy(0, self.places, flat))

    def apart(self, stacks: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
        """The cores of every weight from such stacks."""
        cells = [_cells(stack, shapes) for stack, shapes in zip(stacks, self.shapes, strict=True)]
        return dict(zip(self.weights, map(list, zip(*cells, strict=True)), strict=True))

    def _cores(self) -> list[tuple[Tensor, ...]]:
        """The first core of every weight, then the second, and so on."""
        return list(zip(*map(cores_of, self.weights.values()), strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.stacked, strict=True)]


def stacks_of(weights: Mapping[str, FactorizedWeight]) -> list[Stacks]:
    """The weights, stacked by their equations."""
    found: dict[Equation, dict[str, FactorizedWeight]] = {}
    for name, own in weights.items():
        found.setdefault(own.equation, {})[name] = own
    return list(map(Stacks, found.values()))


def align_trees(trees: Sequence[Stacks]) -> dict[str, list[Tensor]]:
    """The cores of every weight as `formats.align.align` returns them, in double precision.

    All bonds turn at once: a change of gauge at one leaves the Gram matrices of all others as they are.
    """
    found, change = [own(torch.float64) for own in trees], torch.vmap(change_gauge, (None, 0, None, 0, 0))
    bonds = [(number, bond) for number, own in enumerate(trees) for bond in own.equation.bonds]
    equations = [own.equation for own in trees]
    of_trees = map(torch.vmap(tree_grams, (None, 0)), equations, found)
    grams = [sides for own in of_trees for sides in own.values()]
    counts, ranks = zip(*(left.shape[:2] for left, _ in grams), strict=True)
    sides = ([F.pad(own, (0, max(ranks) - own.shape[-1]) * 2) for own in side] for side in zip(*grams, strict=True))
    left, right = map(torch.cat, sides)
    gauges, inverses = (own.split(counts) for own in aligning_gauges(left, right))
    for (number, bond), rank, gauge, inverse in zip(bonds, ranks, gauges, inverses, strict=True):
        turn, back = gauge[:, :rank, :rank], inverse[:, :rank, :rank]
        found[number] = change(equations[number], found[number], bond, turn, back)
    return {name: cores for own, stack in zip(trees, found, strict=True) for name, cores in own.apart(stack).items()}


def _cells(stack: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """The layers of a stack without their padding."""
    return [layer[tuple(map(slice, shape))] for layer, shape in zip(stack, shapes, strict=True)]


# --- materialising together -------------------------------------------------------------------------------------------


class Together:
    """The layers of a step, and the weights that are ready for those yet to run.

    A deep network of small factorised layers spends its time on a GPU launching operations on tiny cores. The first
    step inside of ``with together():`` notes layers; in the next ones the first layer to run that uses its whole weight
    materialises those of all layers with the same modes.
    """

    def __init__(self) -> None:
        self._noted: dict[object, dict[TensorLayer, FactorizedWeight]] = {}
        """Layers that use their whole weight, by what must be the same for all that are stacked."""
        self._stacks: dict[object, Stacks] = {}
        self._ready: dict[TensorLayer, tuple[list[Tensor], Tensor]] = {}  # cores, and the weight they make

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)
            self._ready.clear()
            if not self._stacks:
                self._stacks = {kind: Stacks(alike) for kind, alike in self._noted.items() if len(alike) > 1}

    def weight(self, layer: TensorLayer, train: Train, cores: Collection[Tensor]) -> Tensor | None:
        """The layer's weight, if it is made together with others."""
        like = next(iter(cores))
        kind = layer.factorized.layout, like.device, like.dtype
        if not self._stacks:
            self._noted.setdefault(kind, {})[layer] = layer.factorized
        stacks = self._stacks.get(kind)
        if stacks is None or layer not in stacks.weights:
            return None
        # A second use makes its own, and particles put other cores in the place of those a weight was made of.
        own, made = self._ready.pop(layer, ([], None))
        if made is not None and all(a is b for a, b in zip(own, cores, strict=True)):
            return made
        with own_precision(like):
            weights = torch.vmap(trains.dense, (None, 0))(train, stacks()).unbind()
        for (other, factorized), weight in zip(stacks.weights.items(), weights, strict=True):
            self._ready[other] = cores_of(factorized), weight
        return self._ready.pop(layer)[1]


_ACTIVE: ContextVar[Together | None] = ContextVar("together", default=None)


def weight_together(*layer: Any) -> Tensor | None:
    """`Together.weight` of this step, if it makes weights together."""
    active = _ACTIVE.get()
    # Checkpointed parts run again in the backward pass and must then do the same as before.
    if active is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return active.weight(*layer)
