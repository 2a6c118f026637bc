"""Embeddings and encoders beside dense ones on a CPU: time over dense, and memory while training.

    python benchmarks/layers.py [--threads 2] [--rounds 15]

One thread is measured by the processor's time, so that other processes do not count; several by the clock. Writes
``results/benchmarks/layers.json`` and the page beside it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from old_and_new import RESULTS, compare, described, environment, page
from torch import nn

import bayestrain as bt

ROWS, DIM, INDICES = 1_000_000, 256, 4_096
ENCODERS = (
    (768, 3072, 6, 12, (("split", 32), ("paired", 4), ("paired", 30))),
    (256, 1024, 2, 4, (("split", 4), ("split", 32), ("paired", 4), ("paired", 32))),
)
BATCH, TOKENS = 8, 128
STEPS = 3
Call = Callable[[], object]


def table(rank: int) -> nn.Module:
    """An embedding, dense if the rank is 0."""
    return bt.TensorEmbedding(ROWS, DIM, max_rank=rank) if rank else nn.Embedding(ROWS, DIM)


def lookups(layer: nn.Module, training: bool) -> Call:
    """A pass for indices that change, and the gradients of the parameters."""
    index = iter(lambda: torch.randint(ROWS, (INDICES,)), None)

    def run() -> None:
        layer.zero_grad()
        with torch.set_grad_enabled(training):
            y = layer(next(index))
        if training:
            y.sum().backward()

    return run


def encoder(d: int, f: int, layers: int, heads: int, layout: str = "", rank: int = 0) -> nn.Module:
    """PyTorch's encoder, all of whose linear layers are factorised unless the rank is 0."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d, heads, f, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    if rank:
        bt.tensorize_(model, bt.TensorizeConfig(rank, layout=layout))
    return model


def passes(model: nn.Module, d: int, training: bool) -> Call:
    """A training step with AdamW, or a pass in evaluation mode."""
    x, optimizer = torch.randn(BATCH, TOKENS, d), torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            model(x)

    model.train(training)
    return step if training else infer


def rows() -> Iterator[tuple[str, Call, Call, int]]:
    """Each row's name, ours, its dense twin and how many calls make a measurement."""
    dense_table = table(0)
    for rank in (16, 30):
        name = f"embedding 1,000,000 x 256, rank {rank}, 4,096 indices"
        yield f"{name}, look-up", lookups(table(rank), False), lookups(dense_table, False), 20
    for rank in (16, 30):
        name = f"embedding 1,000,000 x 256, rank {rank}, 4,096 indices"
        yield f"{name}, with gradients", lookups(table(rank), True), lookups(dense_table, True), 1
    del dense_table
    for *sizes, ways in ENCODERS:
        for layout, rank in ways:
            for training in (False, True):
                name = f"{sizes[2]} encoders {sizes[0]}-{sizes[1]}, {layout}, rank {rank}, 8x128 tokens"
                calls = (passes(encoder(*sizes, *way), sizes[0], training) for way in ((layout, rank), ()))
                yield f"{name}, {'a training step' if training else 'inference'}", *calls, 1  # type: ignore[misc]


def memory(rank: int) -> int:
    """By how many bytes the peak memory of a process grows that builds and trains an embedding with Adam."""
    code = f"import layers; layers.train_table({rank})"
    folder = RESULTS.parents[1] / "benchmarks"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=folder)
    return int(done.stdout)


def train_table(rank: int) -> None:
    """Print by how many bytes the peak grows; a small table trains first, so that libraries are loaded."""
    for build in (lambda: bt.TensorEmbedding(100, 8, max_rank=2), lambda: table(rank)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        layer: Any = build()
        optimizer = torch.optim.Adam(layer.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            layer(torch.randint(layer.num_embeddings, (min(layer.num_embeddings, INDICES),))).square().sum().backward()
            optimizer.step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    report: dict[str, Any] = {
        "command": f"python benchmarks/layers.py --threads {options.threads} --rounds {options.rounds}",
        "environment": {**environment("cpu"), "threads": options.threads}, "rows": [], "memory": [],
    }  # fmt: skip
    dense_bytes = 4 * 4 * ROWS * DIM  # weight, gradient and two moments
    for rank in (16, 30):
        bytes_ = memory(rank)
        report["memory"].append({"rank": rank, "bytes": bytes_, "dense_bytes": dense_bytes})
        print(f"rank {rank}: {bytes_ / 2**20:.1f} MiB, {bytes_ / dense_bytes:.2%} of dense")

    def timed(call: Call, calls: int) -> float:
        started = clock()
        for _ in range(calls):
            call()
        return (clock() - started) / calls

    for name, ours, dense, calls in rows():
        measure = {"new": lambda f=ours, n=calls: timed(f, n), "dense": lambda f=dense, n=calls: timed(f, n)}
        for warm in measure.values():
            warm()
        report["rows"].append({"row": name, **compare(measure, options.rounds)})
        print(described(report["rows"][-1]), flush=True)
        (RESULTS / "layers.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "README.md").write_text(page(RESULTS))


if __name__ == "__main__":
    main()
