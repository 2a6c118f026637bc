"""Materialise the weights of equally shaped layers together: a few large operations instead of thousands of small ones.

A deep network of small factorised layers spends its time on a GPU launching operations on tiny cores. In the steps of a
`Capture`, the first layer to run that uses its whole weight materialises those of all layers with the same modes. Ranks
may differ: cores are padded with zeros, which changes nothing.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from bayestrain.nn import TensorLayer
from bayestrain.nn.precision import own_precision
from bayestrain.perf import trains
from bayestrain.perf.planner import Train
from bayestrain.perf.stacks import Stacks, cores_of


class Together:
    """The layers of a step, and the weights that are ready for those yet to run.

    The first step inside of ``with together():`` notes layers, the next ones materialise their weights together.
    """

    def __init__(self) -> None:
        self._layers: dict[object, list[TensorLayer]] = {}
        """Those that use their whole weight, by what must be the same for all that are stacked."""
        self._noting = True
        self._ready: dict[TensorLayer, tuple[list[Tensor], Tensor]] = {}
        """The cores, and the weight they make."""
        self._stacks: dict[object, Stacks] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        token, self._noting = _ACTIVE.set(self), not self._layers
        try:
            yield
        finally:
            _ACTIVE.reset(token)
            self._ready.clear()

    def weight(self, layer: TensorLayer, train: Train, cores: Collection[Tensor]) -> Tensor | None:
        """The layer's weight, if it is made together with others."""
        like = next(iter(cores))
        kind = layer.factorized.layout, like.device, like.dtype
        alike = self._layers.setdefault(kind, [])
        if self._noting and layer not in alike:
            alike.append(layer)
        if self._noting or layer not in alike or len(alike) == 1:
            return None
        # A second use makes its own, and particles put other cores in the place of those a weight was made of.
        own, made = self._ready.pop(layer, ([], None))
        if made is not None and all(a is b for a, b in zip(own, cores, strict=True)):
            return made
        if kind not in self._stacks:
            self._stacks[kind] = Stacks({other: other.factorized for other in alike})
        with own_precision(like):
            weights = torch.vmap(trains.dense, (None, 0))(train, self._stacks[kind]()).unbind()
        self._ready |= {other: (cores_of(other.factorized), own) for other, own in zip(alike, weights, strict=True)}
        return self._ready.pop(layer)[1]


_ACTIVE: ContextVar[Together | None] = ContextVar("together", default=None)


def weight(*layer: Any) -> Tensor | None:
    """`Together.weight` of this step, if it makes weights together."""
    active = _ACTIVE.get()
    # Checkpointed parts run again in the backward pass and must then do the same as before.
    if active is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    return active.weight(*layer)
