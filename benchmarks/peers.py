"""Our linear layer against those of tensorly-torch and torchTT, and the dense one, in one process.

    make bench-peers                                    # makes their environment, then runs this
    python benchmarks/peers.py --device cuda            # with the peers' packages on the PYTHONPATH

All layers have the same modes, ranks and cores, so they compute the same, which is checked in double precision. They
are timed in turns. A peer that cannot be imported is left out, and the file says so. Writes
``results/benchmarks/peers-DEVICE.json``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from record import arguments, claim, write
from rows import CPU_ROWS, LARGE, LEARNED, LINEAR, Case, Row, build, call, small
from timing import autocast, check, check_plans, interleaved, precision, reference_with_grad
from torch import Tensor, nn

import bayestrain as bt

PACKAGES = ("torch", "tensorly", "tensorly-torch", "torchTT", "opt_einsum", "numpy", "scipy")
FACTOR = 2.0
"""How many times faster than the best implementation of a peer every row should be on a CPU."""


class TensorlyLinear(nn.Module):
    """tensorly-torch's layer with our cores, as its parameters `cores.K` and `bias`."""

    def __init__(self, ours: bt.TTLinear, implementation: str) -> None:
        import tltorch

        super().__init__()
        self.layer = tltorch.FactorizedLinear(
            tuple(ours.in_modes), tuple(ours.out_modes), bias=True, factorization="blocktt", rank=tuple(ours.ranks),
            implementation=implementation, device=ours.cores[0].device,
        )  # fmt: skip
        take_over(list(self.layer.weight.factors), self.layer.bias, ours)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class TorchTTLinear(nn.Module):
    """torchTT's layer with our cores; its input and output are tensors with one dimension per mode."""

    def __init__(self, ours: bt.TTLinear) -> None:
        import torchtt.nn

        super().__init__()
        layer = torchtt.nn.LinearLayerTT(list(ours.in_modes), list(ours.out_modes), list(ours.ranks))
        self.layer = layer.to(ours.cores[0].device)
        self.in_modes = ours.in_modes
        take_over(list(self.layer.cores), self.layer.bias, ours)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.reshape(-1, *self.in_modes))
        return y.flatten(1)


@torch.no_grad()
def take_over(cores: Sequence[Tensor], bias: Tensor, ours: bt.TTLinear) -> None:
    """Our cores and bias into theirs."""
    for own, core in zip(cores, ours.cores, strict=True):
        own.copy_(core)
    assert ours.bias is not None
    bias.copy_(ours.bias.view_as(bias))


PEERS: dict[str, Callable[[bt.TTLinear], nn.Module]] = {
    "tensorly-torch, reconstructed": lambda ours: TensorlyLinear(ours, "reconstructed"),
    "tensorly-torch, factorised": lambda ours: TensorlyLinear(ours, "factorized"),
    "torchTT": TorchTTLinear,
}


def available() -> tuple[dict[str, Callable[[bt.TTLinear], nn.Module]], dict[str, str]]:
    """The peers that are there, and why the others are not."""
    found, missing = {}, {}
    for name, make in PEERS.items():
        try:
            make(bt.TTLinear(4, 4, in_modes=(2, 2), out_modes=(2, 2), max_rank=2))
            found[name] = make
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def check_peer(case: Case, peer: nn.Module, device: str) -> float:
    """Its output and, training, the gradients of input, cores and bias against the full weight in double precision."""
    ours = reference_with_grad(case.layer, case.x, case.gradient)
    names = [*(f"cores.{k}" for k in range(len(case.layer.cores))), "bias"]
    cores = [(name, p) for name, p in peer.named_parameters() if not name.endswith("bias")]
    bias = [(name, p) for name, p in peer.named_parameters() if name.endswith("bias")]
    exact = {"output": ours["output"], "input": ours["input"]}
    for own, (name, parameter) in zip(names, [*cores, *bias], strict=True):
        exact[name] = ours[own].view_as(parameter)
    with precision(case.row.precision):
        return check(peer, case.x, case.gradient, case.row.precision, device, exact)


def measure(row: Row, peers: dict[str, Any], device: str, rounds: int, at_least: float) -> dict[str, Any]:
    """Dense, ours and all peers in turns."""
    case = build(row, device)
    assert isinstance(case.layer, bt.TTLinear)
    made = {name: make(case.layer).train(row.training) for name, make in peers.items()}
    with torch.set_grad_enabled(row.training):
        errors = {"ours": max(check_plans(case.layer, case.x, case.gradient, row.precision, device).values())}
        errors |= {name: check_peer(case, peer, device) for name, peer in made.items()}
        with autocast(row.precision, device):
            plan = case.layer.plan_for(case.x).name
        with precision(row.precision):
            modules = {"ours": case.layer, "dense": case.dense, **made}
            calls = {name: call(case, module) for name, module in modules.items()}
            times = interleaved(calls, rounds=rounds, at_least=at_least, device=device, baseline="ours")
    best = min((times[name]["ratio"] for name in made), default=None)
    return {
        "title": row.title, **asdict(row), "plan": plan, "times": times, "errors": errors,
        "best_peer_over_ours": best, "ours_over_dense": 1 / times["dense"]["ratio"],
    }  # fmt: skip


def main() -> None:
    options = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore", module=r"torchtt|tensorly|tltorch")
    peers, missing = available()
    for name, why in missing.items():
        print(f"{name} is left out: {why}")
    rows: tuple[Row, ...] = CPU_ROWS
    if options.device == "cuda":
        large = [replace(LARGE, rank=rank, precision=kind) for kind in ("tf32", "bf16") for rank in (16, 4)]
        rows = (*large, replace(LINEAR, precision="tf32"), replace(LEARNED, precision="tf32"))
    rounds, at_least = options.rounds, 2e-2
    if options.quick:
        rows, rounds, at_least = tuple(map(small, rows[::3])), min(rounds, 5), 1e-3
    measured, claims = [], []
    factor = 1.0 if options.device == "cuda" else FACTOR
    for row in rows:
        found = measure(row, peers, options.device, rounds, at_least)
        measured.append(found)
        for name in peers:
            times = found["times"][name]["ratio"]
            claims.append(claim(f"{name}, {row.title}", times, factor, ">=", "times as slow as ours"))
    write("peers", options, claims, {"rows": measured, "left_out": missing}, PACKAGES)


if __name__ == "__main__":
    main()
