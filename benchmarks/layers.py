"""Our layers against the dense ones: time of training and of inference, on a GPU memory too.

    python benchmarks/layers.py                    # linear layers and a convolution, on a CPU
    python benchmarks/layers.py --device cuda

Dense and ours alternate in one process; on a CPU a row is measured in several processes and the median counts. Beside
each timing outputs and gradients of every plan are compared with the full weight in double precision. Writes
``results/benchmarks/layers-DEVICE.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch
from record import arguments, claim, write
from rows import CPU_CONVOLUTIONS, CPU_ROWS, GPU_ROWS, Row, build, call, compare, small
from timing import autocast, cast, forced, interleaved, plan_names, precision, saves_memory, train_call
from torch import nn

PROCESSES = 5
"""Fresh ones, in which a row is measured on a CPU."""

LOW_MEMORY = "low_memory"
STEPS = 3
"""Whole training steps whose peak of memory is taken."""


def peak(row: Row, dense: bool, plan: str | None) -> dict[str, int]:
    """Bytes at the peak of some training steps: weights, gradients, Adam's state, input, output and their gradients."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    case = build(row, "cuda")
    module: nn.Module = case.dense if dense else case.layer
    x, gradient, layer = case.x, case.gradient, case.layer
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6)
    del case
    if dense:
        del layer
    step = train_call(cast(module, row.precision, "cuda"), list(module.parameters()), x, gradient)
    with thrifty(module, plan), precision(row.precision):
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            optimizer.step()
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated()
    return {"bytes": highest - before, "bytes_of_input": x.numel() * x.element_size()}


@contextmanager
def thrifty(layer: Any, how: str | None) -> Iterator[None]:
    """Where a layer can be asked to save memory, it is; else it is told the plan."""
    if how != LOW_MEMORY:
        with forced(layer, how):
            yield
        return
    layer.low_memory = True
    yield
    layer.low_memory = False


def low_memory_plans(row: Row) -> list[str]:
    """The ways to save memory that the layer has."""
    case = build(row, "cuda")
    if hasattr(case.layer, LOW_MEMORY):
        return [LOW_MEMORY]
    with autocast(row.precision, "cuda"):
        return [plan for plan in plan_names(case.layer, case.x) if saves_memory(plan)]


def memory(row: Row) -> dict[str, Any]:
    """Peaks of dense, of our own choice and of each low-memory plan, and how slow the best of those is."""
    dense, ours = peak(row, True, None), peak(row, False, None)
    saving = {plan: peak(row, False, plan) for plan in low_memory_plans(row)}
    found: dict[str, Any] = {
        "title": row.title,
        "dense": dense,
        "ours": ours,
        "low_memory": saving,
        "ratio": ours["bytes"] / dense["bytes"],
        "ratio_without_input": _without_input(ours, dense),
    }
    if saving:
        best = min(saving, key=lambda plan: saving[plan]["bytes"])
        found["low_memory_plan"] = best
        found["low_memory_ratio"] = saving[best]["bytes"] / dense["bytes"]
        found["low_memory_ratio_without_input"] = _without_input(saving[best], dense)
        found["low_memory_time"] = time_of_plan(row, best)
    return found


def _without_input(one: dict[str, int], other: dict[str, int]) -> float:
    return (one["bytes"] - one["bytes_of_input"]) / (other["bytes"] - other["bytes_of_input"])


def time_of_plan(row: Row, plan: str) -> dict[str, Any]:
    """The forced plan against dense."""
    case = build(row, "cuda")
    calls = {name: call(case, module) for name, module in (("dense", case.dense), ("ours", case.layer))}
    with thrifty(case.layer, plan), precision(row.precision):
        return interleaved(calls, rounds=11, device="cuda")["ours"]


def in_fresh_processes(row: Row, rounds: int, at_least: float) -> dict[str, Any]:
    """`compare` on a CPU in several processes, one after the other; the one with the median ratio, and all ratios.

    Where a process finds its memory decides how fast it copies: the same row is up to 1.6 times slower in some of them.
    """
    found = []
    for _ in range(PROCESSES):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(compare, row, "cpu", rounds, at_least).result())
    found.sort(key=lambda one: float(one["ratio"]))
    return {**found[len(found) // 2], "ratios": [one["ratio"] for one in found]}


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    rows = GPU_ROWS if options.device == "cuda" else (*CPU_ROWS, *CPU_CONVOLUTIONS)
    rounds, at_least = options.rounds, 2e-2
    if options.quick:
        rows, rounds, at_least = tuple(dict.fromkeys(map(small, rows))), min(rounds, 5), 1e-3
    measured, claims = [], []
    for row in rows:
        if options.device == "cpu" and not options.quick:
            found = in_fresh_processes(row, max(rounds // 3, 5), at_least)
        else:
            found = compare(row, options.device, rounds, at_least)
        measured.append(found)
        claims.append(claim(row.title, found["ratio"], row.target))
        if found["captured_ratio"] is not None:
            claims.append(claim(f"{row.title}, captured", found["captured_ratio"], row.target))
        print(f"{row.title}: {found['ratio']:.2f} of dense, plan {found['plan']}", flush=True)
    memories = []
    if options.device == "cuda":
        for row in rows:
            if row.inputs < 4096 and not options.quick:
                continue  # a few megabytes, less than the libraries' own workspaces
            found = memory(row)
            memories.append(found)
            claims.append(claim(f"peak memory, {row.title}", found["ratio"], 1.0))
            if "low_memory_ratio" in found:
                claims.append(claim(f"peak memory of a low-memory plan, {row.title}", found["low_memory_ratio"], 0.6))
    write("layers", options, claims, {"rows": measured, "memory": memories})


if __name__ == "__main__":
    main()
