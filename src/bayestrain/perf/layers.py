"""The fast forward passes of linear layers and convolutions whose weight is a train."""

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from bayestrain.nn import FactorizedWeight, TensorConv2d, TensorLayer, TensorLinear
from bayestrain.nn.precision import autocasts, own_precision, product_dtype, transformed
from bayestrain.perf import planner, split, trains
from bayestrain.perf.planner import Cost, Machine, Task, Train
from bayestrain.perf.split import SplitLinear
from bayestrain.perf.stacks import weight_together

Made = TypeVar("Made")
Cores = Collection[Tensor]
Run = Callable[[Tensor], Tensor]
Kept = dict[object, Any]  # what inference made of the current cores, by name

MOST_KEPT = 256  # kinds of inputs for which a layer keeps how it runs them
FILTERS_ON_CUDA = 8  # its convolutions want a multiple; two thin ones get filters of zeros up to the next


def multiply(layer: TensorLayer, x: Tensor) -> Tensor | None:
    """The layer's output, or None where only the readable code applies."""
    train, cores = used(layer)
    if train is None or not x.numel() or not (x.dtype == next(iter(cores)).dtype or autocasts(x)):
        return None
    run_for = _convolution if train.inputs_first else _linear
    kept = _kept_for(layer, cores)
    if kept is None:
        return run_for(layer, x, train, cores, None)(x)
    kind = (x.shape, x.dtype, product_dtype(x), _channels_last(x))
    return _once(kept, kind, lambda: run_for(layer, x, train, cores, kept))(x)


def _linear(layer: Any, x: Tensor, train: Train, cores: Cores, kept: Kept | None) -> Run:
    """How to run inputs like this one, with everything merged that depends on the cores alone."""
    plan, dtype, bias = _plan(layer, x, train, cores, kept is not None)[0], product_dtype(x), layer.bias
    cuts, inside, outputs = plan.cuts, math.prod(train.ins), layer.out_features
    if not cuts:
        weight = _weight(layer, x, train, cores, kept)
        if x.ndim == 2 and x.device.type == "cpu" and weight.numel() >= x.numel() and transformed():
            # Many networks at once (`torch.vmap`) get the gradient of a large weight in its own order.
            return lambda x: _plus((weight @ x.mT).mT.contiguous(), bias)
        return lambda x: F.linear(x, weight, bias)
    if plan.fused:
        pair = _made(kept, ("pair", cuts), x, lambda: trains.pair(train, cores, cuts[0]))
        return lambda x: fused(x, pair, bias, train, cuts[0], dtype)
    if train.middle and kept is None and not (transformed() or x.is_nested):
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        apply: Any = SplitLinear.apply
        return lambda x: apply(rows, bias, train, *cores).reshape(*x.shape[:-1], outputs)
    if train.middle:
        inner, outer = _made(kept, cuts, x, lambda: trains.halves(train, cores))
        return lambda x: F.linear(F.linear(x, inner), outer, bias)
    chain = _made(kept, (cuts, dtype), x, lambda: trains.factors(train, cores, cuts, dtype))
    if x.ndim == 2 and x.dtype == dtype and (math.prod(train.outs), inside) == train.shape and not autocasts(x):
        return lambda x: trains.multiply(x, chain, bias)

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        with own_precision(rows):
            y = _plus(trains.multiply(F.pad(rows, (0, inside - rows.shape[1])), chain)[:, :outputs], bias)
        return y.reshape(*x.shape[:-1], outputs)

    return run


def fused(
    x: Tensor, pair: tuple[Tensor, Tensor], bias: Tensor | None, train: Train, bond: int, dtype: torch.dtype
) -> Tensor:
    """``(.., inputs) -> (.., outputs)`` by the kernels for the two factors on both sides of a bond."""
    from bayestrain.perf.kernels import product

    (a, b), (o1, i1, o2, i2), (outputs, inputs) = pair, train.sizes(bond), train.shape
    rows = x.reshape(1, -1, x.shape[-1]).to(dtype)
    rows = rows if inputs == i1 * i2 else F.pad(rows, (0, i1 * i2 - inputs))
    own = None if bias is None else bias[None]
    own = own if own is None or outputs == o1 * o2 else F.pad(own, (0, o1 * o2 - outputs))
    y = product(rows, a[None], b[None], own, [o1, i1, o2, i2], False)
    y = y if outputs == o1 * o2 else y[..., :outputs]
    return y.reshape(*x.shape[:-1], outputs)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _convolution(layer: Any, x: Tensor, train: Train, cores: Cores, kept: Kept | None) -> Run:
    """How to run inputs like this one: with the whole kernel, or two thin ones, in the memory format of the input."""
    if not _plan(layer, x, train, cores, kept is not None)[0].cuts:
        kernels = [_weight(layer, x, train, cores, kept)]
    else:
        first, second = _made(kept, "halves", x, lambda: trains.halves(train, cores))
        if x.is_cuda and (missing := -len(first) % FILTERS_ON_CUDA):
            first, second = F.pad(first, (0, 0, 0, missing)), F.pad(second, (0, missing))
        kernels = [trains.as_kernel(train, first), second[:, :, None, None]]
    if not _channels_last(x):
        # A 1x1 kernel is contiguous in both formats; only its strides distinguish them.
        kernels = [kernel.reshape(len(kernel), -1).view(kernel.shape) for kernel in kernels]
    return lambda x: layer.run(x, kernels)


def _channels_last(x: Tensor) -> bool:
    if x.ndim != 4 or transformed():
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def compiled(weight: FactorizedWeight, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """What `nn.linear.traced_product` returns, inside of ``torch.compile``; None where only the readable code applies.

    What it chooses does not depend on the number of rows, so that another batch needs no other code.
    """
    if torch.compiler.is_exporting() or not torch.compiler.is_compiling() or transformed():
        return None
    dtype = product_dtype(x)
    train, cores = trains.train_of.__wrapped__(weight.layout), list(weight.cores)  # a compiler ignores the cache
    if train is None or weight.format.name != "tt":
        return None
    ranks, dense = trains.ranks(cores), math.prod(train.shape)
    if train.middle:
        return split.plain(x.to(dtype), bias, train, cores) if ranks[train.middle] * sum(train.shape) < dense else None
    best, work = 0, dense * planner.CUDA.fused / planner.CUDA.rate
    for bond in range(1, len(train.outs)):
        o1, i1, o2, i2 = (planner.tile(size) for size in train.sizes(bond))
        own = ranks[bond] * i1 * o2 * (i2 + o1)
        if own < work and max(train.sizes(bond)) <= planner.LARGEST_TILE:
            best, work = bond, own
    if not (
        best and x.is_cuda and kernels_run(x.device.index) and dtype in (torch.float32, torch.bfloat16, torch.float16)
    ):
        return None
    with own_precision(x):
        pair = trains.pair(train, cores, best)
    return fused(x, pair, bias, train, best, dtype)


def expect(layer: TensorLayer, x: Tensor, training: bool) -> tuple[str, float, float, float] | None:
    """The plan for this input, its multiplications relative to dense, its seconds, and those of the dense layer.

    Predicted; None where there is no prediction.
    """
    train, cores = used(layer)
    if train is None:
        return None
    with torch.set_grad_enabled(training):
        found, task, machine = _plan(layer, x, train, cores, merged=not training)
    outputs, *inputs = layer.factorized.shape
    dense = planner.dense_cost(outputs, math.prod(inputs), task, machine)
    two = "two convolutions" if train.inputs_first else "two factors, one kernel" if found.fused else "two factors"
    kind = ("whole weight", two, "core by core")[min(len(found.cuts), 2)]
    return kind, found.operations / dense.operations, found.seconds, dense.seconds


# --- weights ----------------------------------------------------------------------------------------------------------


def used(layer: TensorLayer) -> tuple[Train | None, Cores]:
    """The train that is the layer's weight, and its current cores; None where the fast code does not apply."""
    weight: Any = layer._modules["factorized"]
    cores = weight._modules["cores"]._parameters.values()  # as attributes they would take longer to read
    known = isinstance(layer, TensorLinear | TensorConv2d) and type(weight) is FactorizedWeight
    if not known or weight.format.name != "tt" or len(cores) != len(weight.equation.cores):
        return None, cores  # parametrised cores, for one, are no parameters
    return trains.train_of(weight.layout), cores


def _plan(layer: TensorLayer, x: Tensor, train: Train, cores: Cores, merged: bool) -> tuple[Cost, Task, Machine]:
    """The way for this input that is predicted to be fastest, what the input asks of it, and the machine it is on."""
    conv, cuda, dtype = isinstance(layer, TensorConv2d), x.is_cuda, product_dtype(x)
    rows = x.numel() // layer.factorized.shape[1] // (math.prod(layer.stride) if conv else 1)  # type: ignore[arg-type]
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, layer.bias, *cores))
    tf32 = cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    task = Task(max(1, rows), dtype.itemsize, training, merged)
    machine = _machine(cuda, conv, dtype, tf32, 1 if cuda else torch.get_num_threads())
    if cuda and not torch.cuda.is_current_stream_capturing():
        machine = machine._replace(launch=planner.EAGER_LAUNCH)
    if cuda and (forward_ad._current_level >= 0 or not kernels_run(x.device.index)):
        machine = machine._replace(fused=0.0)
    return planner.cheapest(train, trains.ranks(cores), task, machine), task, machine


@lru_cache(maxsize=64)
def _machine(cuda: bool, conv: bool, dtype: torch.dtype, tf32: bool, threads: int) -> Machine:
    if cuda:
        machine = planner.CUDA_CONV if conv else planner.CUDA
        times = 2.0 if dtype in (torch.bfloat16, torch.half) else 1.0 if tf32 and dtype == torch.float32 else 0.15
    else:
        machine = planner.CPU_THREAD_CONV if conv else planner.CPU_THREAD
        times = threads * (0.5 if dtype == torch.float64 else 1.0)
    return machine._replace(rate=machine.rate * times, fused=machine.fused * times if times >= 1 else 0.0)


@lru_cache(maxsize=64)
def kernels_run(device: int) -> bool:
    """Whether `perf.kernels`, which are loaded when they are first used, run on this GPU."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return False
    gpu = torch.cuda.get_device_properties(device)
    return gpu.major >= 8 and getattr(gpu, "shared_memory_per_block_optin", 0) >= planner.SHARED_MEMORY


kernels_run._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `formats.algebra`


def _weight(layer: TensorLayer, x: Tensor, train: Train, cores: Cores, kept: Kept | None) -> Tensor:
    """The whole weight, in the precision of the cores: kept, materialised together with others, or by itself."""
    if kept is None and not transformed() and (weight := weight_together(layer, train, cores)) is not None:
        return weight
    return _made(kept, "whole weight", x, lambda: trains.dense(train, cores))


# --- what inference keeps ---------------------------------------------------------------------------------------------


_KEPT: WeakKeyDictionary[TensorLayer, tuple[object, Cores, Kept]] = WeakKeyDictionary()
"""Per layer the addresses and version counters of its cores, which show a change; these cores, so that no other tensor
comes to lie at their addresses; and what was made of them. Writing through ``core.data`` hides a change from the
counter, and so does a fused optimiser: a pass with gradients, and any call of ``train()`` or ``eval()``, forgets.
Threads that share a layer may make the same twice, but never mix what belongs to different cores."""


def forget(layer: TensorLayer) -> None:
    """Drop what inference keeps for a layer."""
    _KEPT.pop(layer, None)


def _kept_for(layer: TensorLayer, cores: Cores) -> Kept | None:
    """What may be used again and added to; None where nothing may be kept."""
    if layer.training or torch.is_grad_enabled() or transformed():
        forget(layer)
        return None
    if any(core.is_inference() for core in cores):  # made in inference mode, which counts no changes
        return None
    key = [(core.data_ptr(), core._version) for core in cores]
    known, _, kept = _KEPT.get(layer, (None, (), {}))
    if known != key:
        _, _, kept = _KEPT[layer] = key, [core.detach() for core in cores], {}
    return kept


def _once(kept: Kept, name: object, make: Callable[[], Made]) -> Made:
    found: Made | None = kept.get(name)
    if found is None:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        found = kept[name] = make()
    return found


def _made(kept: Kept | None, name: object, x: Tensor, make: Callable[[], Made]) -> Made:
    """What `make` returns without autocast, kept if that may be."""
    with own_precision(x):
        return make() if kept is None else _once(kept, name, make)
