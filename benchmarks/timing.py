"""Times of several functions in one process, compared round by round, and errors against double precision.

A round calls every function in turn, in random order, each often enough to last some milliseconds. A ratio is the
median over rounds of the quotient of two times of the same round: what slows the machine for a while slows both.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayestrain.layers import TTLayer

Forward = Callable[[Tensor], Tensor]

TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "bf16": 5e-2, "float64": 1e-10}
"""Largest relative error (norms) that an output or a gradient may have in each precision."""


def once(call: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds of one call, from `repeats` of them in a row."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def repeats_for(call: Callable[[], object], at_least: float, device: str) -> int:
    """How many calls last `at_least` seconds; warms up on the way. 0: one call and no warming up."""
    if at_least == 0:
        return 1
    once(call, 2, device)
    repeats = 1
    while True:
        took = once(call, repeats, device) * repeats
        if took >= at_least or repeats >= 1 << 16:
            return repeats
        repeats = min(max(repeats + 1, int(repeats * 1.2 * at_least / max(took, 1e-9))), repeats * 10)


def measure_rounds(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 31,
    at_least: float = 5e-3,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of every call in every round."""
    repeats = {name: repeats_for(call, at_least, device) for name, call in calls.items()}
    order, shuffle = list(calls), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()  # a collection would fall on one of them
    try:
        for _ in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                times[name].append(once(calls[name], repeats[name], device))
    finally:
        gc.enable()
    return times


def summarise(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, Any]]:
    """Median seconds of every call, and the median of its ratio to the baseline, with quartiles."""
    found = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times[baseline], strict=True)]
        found[name] = {
            "seconds": statistics.median(values),
            "seconds_quartiles": quartiles(values),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "rounds": len(values),
        }
    return found


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, baseline: str | None = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """`measure_rounds` and `summarise`; the first call is the baseline if none is named."""
    return summarise(measure_rounds(calls, **options), next(iter(calls)) if baseline is None else baseline)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Products in float32 or tf32; with "bf16" those that `cast` does not lower are in float32."""
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def autocast(kind: str, device: str) -> AbstractContextManager[object]:
    """Lowers products to bf16 for the kind "bf16"."""
    return torch.autocast(device, torch.bfloat16) if kind == "bf16" else nullcontext()


def cast(layer: Forward, kind: str, device: str) -> Forward:
    """The layer under `autocast`, entered anew for each call: else lowered weights would be kept from call to call."""
    if kind != "bf16":
        return layer

    def forward(x: Tensor) -> Tensor:
        with autocast(kind, device):
            return layer(x)

    return forward


@contextmanager
def forced(layer: TTLayer, plan: str | None) -> Iterator[None]:
    """The layer takes this plan, whatever it would choose; with None its own choice."""
    layer.force_plan(plan)
    try:
        yield
    finally:
        layer.force_plan(None)


def train_call(layer: Forward, parameters: Sequence[Tensor], x: Tensor, gradient: Tensor) -> Any:
    """Forward and backward, gradients made anew each time."""

    def call() -> Tensor:
        for tensor in (x, *parameters):
            tensor.grad = None
        y = layer(x)
        y.backward(gradient.to(y.dtype))
        return y

    return call


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph: what the device needs, without the time to launch it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda: (graph.replay(), call)  # holds what the graph works on


def infer_call(layer: Forward, x: Tensor) -> Any:
    """Forward alone; call it where gradients are off."""
    return lambda: layer(x)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``||found - exact|| / ||exact||``."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def reference(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of a TT or dense layer from its full weight, in double precision."""
    exact: Any = copy.deepcopy(layer).double()
    x = x.detach().double().requires_grad_()
    if hasattr(exact, "kernel_size"):
        y = F.conv2d(x, exact.weight, exact.bias, exact.stride, exact.padding, exact.dilation)
    else:
        y = F.linear(x, exact.weight, exact.bias)
    y.backward(gradient.double())
    return {"output": y.detach(), "input": x.grad, **{n: p.grad for n, p in exact.named_parameters()}}


def check(layer: nn.Module, x: Tensor, gradient: Tensor, kind: str, device: str, exact: dict[str, Tensor]) -> float:
    """Largest relative error of the output, and of every gradient if it trains; raises where it is too large."""
    parameters, forward = dict(layer.named_parameters()), cast(layer, kind, device)
    if torch.is_grad_enabled():
        y = train_call(forward, list(parameters.values()), x, gradient)()
        found = {"output": y.detach(), **{name: p.grad for name, p in parameters.items()}}
        if x.grad is not None:
            found["input"] = x.grad
    else:
        found = {"output": forward(x)}
    errors = {name: relative_error(value, exact[name]) for name, value in found.items()}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < TOLERANCE[kind], f"{worst} is wrong by {errors[worst]:.1e} in {kind} on {device}"
    return errors[worst]


def check_plans(layer: TTLayer, x: Tensor, gradient: Tensor, kind: str, device: str) -> dict[str, float]:
    """`check` for the layer's own choice and for every plan it could take."""
    exact = reference_with_grad(layer, x, gradient)
    errors = {}
    with autocast(kind, device):
        plans = layer.plans(x)
    for plan in [None, *plans]:
        with forced(layer, plan), precision(kind):
            errors[plan or "own choice"] = check(layer, x, gradient, kind, device, exact)
    return errors


def reference_with_grad(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """`reference`, also where gradients are off."""
    with torch.enable_grad():
        return reference(layer, x, gradient)
