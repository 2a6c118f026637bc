"""The layers that are timed: their shapes, how they are built, and one comparison with the dense layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from timing import (
    autocast,
    captured,
    cast,
    check,
    check_plans,
    infer_call,
    interleaved,
    precision,
    reference_with_grad,
    train_call,
)
from torch import Tensor, nn

import bayestrain as bt

MNIST_MODES = ((7, 4, 7, 4), (5, 5, 5, 5))


@dataclass(frozen=True)
class Row:
    """One layer at one batch size: trained (forward and backward) or asked (forward in evaluation mode)."""

    inputs: int
    outputs: int
    rank: int | tuple[int, ...]
    """Of a convolution the middle bond's; its other bonds are full."""
    batch: int
    training: bool = True
    modes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    side: int = 0
    """Of a convolution's images; 0 is a linear layer."""
    kernel: int = 3
    precision: str = "float32"
    input_gradient: bool = True
    """False for the first layer of a network, whose input needs no gradient."""
    target: float | None = None

    @property
    def title(self) -> str:
        """The row in words."""
        rank = "ranks " + " ".join(map(str, self.rank)) if isinstance(self.rank, tuple) else f"rank {self.rank}"
        shape = f"{self.inputs}x{self.outputs}"
        if self.side:
            shape = f"conv {self.kernel}x{self.kernel} {self.inputs}->{self.outputs} on {self.side}x{self.side}"
            rank = f"middle bond {self.rank}"
        parts = [shape, rank, f"batch {self.batch}", "training" if self.training else "inference"]
        if self.precision != "float32":
            parts.append(self.precision)
        if self.training and not self.input_gradient:
            parts.append("first layer")
        return ", ".join(parts)


LINEAR = Row(784, 625, 20, 128, modes=MNIST_MODES)
LEARNED = replace(LINEAR, rank=(4, 2, 3))
CONV = Row(128, 128, 16, 8, side=32)
LARGE = Row(4096, 4096, 16, 4096, modes=((8, 8, 8, 8), (8, 8, 8, 8)))

CPU_ROWS = (
    replace(LINEAR, target=1.5),
    replace(LINEAR, target=1.5, input_gradient=False),
    replace(LEARNED, target=0.6),
    replace(LEARNED, target=0.6, input_gradient=False),
    replace(LEARNED, batch=1024, target=0.5),
    replace(LEARNED, batch=1024, target=0.5, input_gradient=False),
    replace(LEARNED, batch=1, training=False, target=1.3),
    replace(LINEAR, batch=1, training=False),
    replace(LEARNED, batch=128, training=False),
)
CPU_CONVOLUTIONS = (replace(CONV, target=0.5), replace(CONV, training=False, target=0.4))
GPU_ROWS = tuple(
    replace(row, precision=kind)
    for kind in ("tf32", "bf16")
    for row in (
        replace(LARGE, target=1.6),
        replace(LARGE, rank=4, target=0.8),
        Row(8192, 8192, 8, 4096, modes=((8, 8, 8, 16), (16, 8, 8, 8)), target=0.5),
        LINEAR,
    )
)


def small(row: Row) -> Row:
    """The same row at a size that takes no time, for `--quick`."""
    if row.side:
        return replace(row, inputs=32, outputs=32, rank=4, batch=2, side=8)
    if row.inputs > 784:
        return replace(row, inputs=256, outputs=256, modes=None, batch=64)
    return replace(row, batch=min(row.batch, 32))


@dataclass(frozen=True)
class Case:
    """A row made real."""

    row: Row
    dense: nn.Module
    layer: bt.TTLinear | bt.TTConv2d
    x: Tensor
    gradient: Tensor


def build(row: Row, device: str, seed: int = 0) -> Case:
    """Both layers with the same weight, an input and a gradient of the output."""
    torch.manual_seed(seed)
    ins, outs = row.modes or (None, None)
    options: dict[str, Any] = {"max_rank": row.rank, "in_modes": ins, "out_modes": outs}
    layer: bt.TTLinear | bt.TTConv2d
    if row.side:
        template = bt.TTConv2d(row.inputs, row.outputs, row.kernel, device="meta", **(options | {"max_rank": 10**9}))
        inner: list[Any] = list(template.ranks[1:-1])
        inner[template.middle_bond - 1] = row.rank
        options["max_rank"] = inner
        layer = bt.TTConv2d(row.inputs, row.outputs, row.kernel, padding=row.kernel // 2, **options)
        shape: tuple[int, ...] = (row.batch, row.inputs, row.side, row.side)
    else:
        layer = bt.TTLinear(row.inputs, row.outputs, **options)
        shape = (row.batch, row.inputs)
    layer = layer.to(device)
    x = torch.randn(shape, device=device)
    if row.side and device == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
    dense = layer.to_dense()
    with torch.no_grad():
        gradient = torch.randn_like(dense(x[:1])).expand(row.batch, *[-1] * (x.ndim - 1)).contiguous()
        gradient = torch.randn_like(gradient)
    x.requires_grad_(row.training and row.input_gradient)
    for module in (dense, layer):
        module.train(row.training)
    return Case(row, dense, layer, x, gradient)


def call(case: Case, module: nn.Module) -> Callable[[], Tensor]:
    """What is timed: a training step without optimiser, or a forward pass."""
    forward = cast(module, case.row.precision, case.x.device.type)
    made: Callable[[], Tensor] = infer_call(forward, case.x)
    if case.row.training:
        made = train_call(forward, list(module.parameters()), case.x, case.gradient)
    return made


def compare(row: Row, device: str, rounds: int, at_least: float = 5e-3) -> dict[str, Any]:
    """Errors of all plans, then times of dense and ours, in turns."""
    case = build(row, device)
    modules: dict[str, nn.Module] = {"dense": case.dense, "ours": case.layer}
    with torch.set_grad_enabled(row.training):
        errors = check_plans(case.layer, case.x, case.gradient, row.precision, device)
        exact = reference_with_grad(case.dense, case.x, case.gradient)
        with precision(row.precision), autocast(row.precision, device):
            plan = case.layer.plan_for(case.x).name
        with precision(row.precision):
            dense_error = check(case.dense, case.x, case.gradient, row.precision, device, exact)
            calls = {name: call(case, module) for name, module in modules.items()}
            times = interleaved(calls, rounds=rounds, at_least=at_least, device=device)
            replayed = None
            if device == "cuda":
                graphs = {name: captured(made) for name, made in calls.items()}
                replayed = interleaved(graphs, rounds=rounds, at_least=at_least, device=device)
    del exact
    return {
        "title": row.title,
        **asdict(row),
        "ranks": list(case.layer.ranks),
        "parameters": case.layer.parameters_left,
        "dense_parameters": case.layer.dense_parameters,
        "plan": plan,
        "times": times,
        "ratio": times["ours"]["ratio"],
        "captured_times": replayed,
        "captured_ratio": replayed["ours"]["ratio"] if replayed else None,
        "largest_error_of_plans": errors,
        "error_of_dense": dense_error,
    }


def multiplications(row: Row) -> int:
    """Of the dense layer's forward pass."""
    return math.prod((row.batch, row.inputs, row.outputs)) * (row.kernel**2 * row.side**2 if row.side else 1)
