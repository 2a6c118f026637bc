"""What tests of inference methods share: every method with its options, densities, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bayestrain.infer import METHODS, Method

F64 = torch.float64
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=0.05),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=0.05, momentum=0.9),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=0.05),
    "rmsprop": lambda tensors: torch.optim.RMSprop(tensors, lr=0.05),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "svgd": ("svgd", {}),
    "ensemble": ("ensemble", {}),
    "map": ("map", {}),
    "sgld": ("sgld", {"lr": 0.05, "seed": 3}),
    "preconditioned sgld": ("sgld", {"lr": 0.05, "seed": 3, "memory": 0.9}),
}
every_case = pytest.mark.parametrize("case", CASES)
OPTIMISED = [case for case, (name, _) in CASES.items() if name != "sgld"]
"""Those that take an optimiser; SGLD is one."""


def make(case: str, density: Any, start: dict[str, Tensor], optimizer: str = "adam", **options: Any) -> Method:
    name, own = CASES[case]
    kind: Any = METHODS[name]
    if name == "sgld":
        return kind(density, start, **{**own, **options})  # type: ignore[no-any-return]
    return kind(density, start, OPTIMIZERS[optimizer], **{**own, **options})  # type: ignore[no-any-return]


def number(case: str) -> int:
    return 1 if case == "map" else 5


def start_of(case: str, shift: float = 3.0) -> dict[str, Tensor]:
    n = number(case)
    return {"w": shift + torch.randn(n, 3, 2, dtype=F64), "b": shift + torch.randn(n, dtype=F64)}


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 3, dtype=F64), torch.randn(4, 2, dtype=F64)) for _ in range(count)]


def density(p: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = batch
    misfit: Tensor = (y - x @ p["w"] - p["b"][:, None, None]).square().sum((1, 2))
    return -0.5 * misfit - 0.5 * p["w"].square().sum((1, 2)) - 0.5 * p["b"].square()


def bowl(p: dict[str, Tensor], batch: Any) -> Tensor:  # noqa: ARG001
    return -0.5 * p["w"].square().sum((1, 2)) - 0.5 * p["b"].square()


def assert_same(method: Method, other: Method) -> None:
    """Bit for bit."""
    for name, tensor in method.particles.items():
        assert torch.equal(tensor, other.particles[name]), name
    for name, tensor in method.carried.items():
        assert torch.equal(tensor, other.carried[name]), name
