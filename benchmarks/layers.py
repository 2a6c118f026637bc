"""Our layers against the dense ones: time of training and of inference, on a GPU memory too.

    python benchmarks/layers.py                    # linear layers and a convolution, on a CPU
    python benchmarks/layers.py --device cuda

Dense and ours alternate in one process; on a CPU a row is measured in several processes and the median counts. Beside
each timing outputs and gradients of every plan are compared with the full weight in double precision. Writes
``results/benchmarks/layers-DEVICE.json``.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from record import arguments, claim, write
from rows import CPU_CONVOLUTIONS, CPU_ROWS, GPU_ROWS, Row, build, call, compare, small
from timing import cast, interleaved, precision, train_call
from torch import nn

PROCESSES = 5
"""Fresh ones, in which a row is measured on a CPU."""

STEPS = 3
"""Whole training steps whose peak of memory is taken."""


def peak(row: Row, dense: bool, low_memory: bool = False) -> dict[str, int]:
    """Bytes at the peak of some training steps: weights, gradients, Adam's state, input, output and their gradients."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    case = build(row, "cuda")
    module: nn.Module = case.dense if dense else case.layer
    case.layer.low_memory = low_memory
    x, gradient = case.x, case.gradient
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-6)
    del case  # and the other layer
    step = train_call(cast(module, row.precision, "cuda"), list(module.parameters()), x, gradient)
    with precision(row.precision):
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            step()
            optimizer.step()
        torch.cuda.synchronize()
        highest = torch.cuda.max_memory_allocated()
    return {"bytes": highest - before, "bytes_of_input": x.numel() * x.element_size()}


def memory(row: Row) -> dict[str, Any]:
    """Peaks of dense, of our own choice and of the layer told to save memory, and how slow that is."""
    dense, ours, saving = peak(row, dense=True), peak(row, dense=False), peak(row, dense=False, low_memory=True)
    return {
        "title": row.title,
        "dense": dense,
        "ours": ours,
        "low_memory": saving,
        "ratio": ours["bytes"] / dense["bytes"],
        "ratio_without_input": _without_input(ours, dense),
        "low_memory_ratio": saving["bytes"] / dense["bytes"],
        "low_memory_ratio_without_input": _without_input(saving, dense),
        "low_memory_time": low_memory_time(row),
    }


def _without_input(one: dict[str, int], other: dict[str, int]) -> float:
    return (one["bytes"] - one["bytes_of_input"]) / (other["bytes"] - other["bytes_of_input"])


def low_memory_time(row: Row) -> dict[str, Any]:
    """The layer told to save memory against dense."""
    case = build(row, "cuda")
    case.layer.low_memory = True
    calls = {name: call(case, module) for name, module in (("dense", case.dense), ("ours", case.layer))}
    with precision(row.precision):
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
            claims.append(claim(f"peak memory of a low-memory plan, {row.title}", found["low_memory_ratio"], 0.6))
    write("layers", options, claims, {"rows": measured, "memory": memories})


if __name__ == "__main__":
    main()
