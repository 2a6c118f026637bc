"""Training steps beside dense ones on a GPU, in every way that people run them: eager, compiled, as a CUDA graph.

    python benchmarks/gpu.py [--rounds 7] [--only TEXT]

A ratio is the median over rounds of the quotient of two neighbouring measurements, each some calls between two events.
Where tensorly-torch is installed, its layers at the same ranks stand beside ours. Writes after every row
``results/benchmarks/gpu.json``, and the page ``GPU.md`` beside it.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from layers import encoder
from old_and_new import RESULTS, _ratio, environment
from rows import BATCH, posterior, tensorized
from torch import Tensor, nn

import bayestrain as bt

Call = Callable[[], object]
MODES = ("captured", "eager", "compiled", "reduce-overhead")
PRECISIONS = ("tf32", "bf16")
D, WIDE, DEPTH, HEADS, RANK = 768, 3072, 6, 12, 32


def captured(step: Call) -> Call:
    """The step as a CUDA graph, which reads the tensors that the step holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: Call = step) -> None:
        graph.replay()

    return replay


def training(model: nn.Module, x: Tensor, precision: str, mode: str, prior: Any = None) -> Call:
    """A training step with AdamW, and with a prior if there is one."""
    model, x = model.cuda().train(), x.cuda()
    prior = None if prior is None else prior(model)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-4, device="cuda"), fused=True, capturable=True)
    kinds: dict[str, Any] = {"compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    run = torch.compile(model, fullgraph=True, dynamic=False, **kinds[mode]) if mode in kinds else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = run(x).square().mean()
        if prior is not None:
            loss = loss + prior.loss()
        loss.backward()
        optimizer.step()
        if prior is not None:
            prior.step()

    for _ in range(3):
        step()
    return captured(step) if mode == "captured" else step


def passes(model: nn.Module, x: Tensor, precision: str, mode: str) -> Call:
    """Both passes of a layer."""
    model, x = model.cuda().train(), x.cuda().requires_grad_()
    tensors, autocast = [x, *model.parameters()], partial(torch.autocast, "cuda", torch.bfloat16)
    with autocast(enabled=precision == "bf16"):
        gradient = torch.randn_like(model(x))

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        with autocast(enabled=precision == "bf16"):
            y = model(x)
        y.backward(gradient)

    for _ in range(3):
        step()
    return captured(step) if mode == "captured" else step


def peak(call: Call) -> int:
    """The most memory during a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def linear(size: int, rank: int) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Ours, the dense layer, and tensorly-torch's with the same modes and rank, where it is installed."""
    ours = partial(bt.TensorLinear, size, size, layout="paired", max_rank=rank)
    yield "ours", ours
    yield "dense", partial(nn.Linear, size, size)
    if find_spec("tltorch") is not None:
        import tltorch

        made = ours(device="meta")
        for way in ("reconstructed", "factorized"):
            yield (
                f"tensorly-torch, {way}",
                partial(tltorch.FactorizedLinear, made.in_modes, made.out_modes, factorization="blocktt", rank=rank,
                        implementation=way),
            )  # fmt: skip


def rows(only: str) -> Iterator[tuple[str, dict[str, Callable[[], Call]]]]:
    """Every row: what it times, by name; each is built when its turn comes."""
    # Alignments, one step in a hundred or so, are never captured.
    prior = partial(bt.RankPrior, num_data=100_000, terms_per_datum=128 * D, align_every=0)
    found: dict[str, dict[str, Callable[[], Call]]] = {}
    for size, rank in ((4096, 4), (8192, 8)):
        for precision in PRECISIONS:
            for mode in ("eager", "captured"):
                x = partial(torch.randn, 4096, size)
                found[f"{size}x{size}, rank {rank}, batch 4096, {mode}, {precision}"] = {
                    name: lambda make=make, x=x, p=precision, m=mode: passes(make(), x(), p, m)
                    for name, make in linear(size, rank)
                }
    for tokens in ((128, 128), (32, 128)):
        for precision in PRECISIONS:
            for mode in MODES:
                title = (
                    f"6 encoders {D}-{WIDE}, split, rank {RANK}, {tokens[0]}x{tokens[1]} tokens, {mode}, {precision}"
                )
                x = partial(torch.randn, *tokens, D)
                build = partial(encoder, D, WIDE, DEPTH, HEADS)
                calls = {
                    "ours": lambda x=x, b=build, p=precision, m=mode: training(b("split", RANK), x(), p, m),
                    "dense": lambda x=x, b=build, p=precision, m=mode: training(b(), x(), p, m),
                }
                if mode == "captured":
                    calls["ours with prior"] = lambda x=x, b=build, p=precision: training(
                        b("split", RANK), x(), p, "captured", prior
                    )
                found[title] = calls
    ins, outs = (7, 4, 7, 4), (5, 5, 5, 5)
    small = partial(bt.TensorLinear, 784, 625, in_modes=ins, out_modes=outs, max_rank=20)
    found["784x625, rank 20, batch 128, captured, tf32"] = {
        name: lambda make=make: passes(make(), torch.randn(128, 784), "tf32", "captured")
        for name, make in (("ours", small), ("dense", partial(nn.Linear, 784, 625)))
    }
    for name, calls in found.items():
        if only in name:
            yield name, calls


def compare(calls: dict[str, Callable[[], Call]], rounds: int, at_least: float = 0.03) -> dict[str, Any]:
    """Milliseconds round by round, memory, and ratios to dense."""
    made = {name: build() for name, build in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    counts = {name: max(2, round(at_least * 1e3 / milliseconds(call, 3))) for name, call in made.items()}
    for _ in range(rounds):
        for name, call in made.items():
            times[name].append(milliseconds(call, counts[name]))
    found: dict[str, Any] = {"rounds": rounds, "ms": {name: statistics.median(own) for name, own in times.items()}}
    for name in set(made) - {"dense"}:
        ratios = [own / dense for own, dense in zip(times[name], times["dense"], strict=True)]
        first, middle, third = statistics.quantiles(ratios, n=4, method="inclusive")
        found.setdefault("over_dense", {})[name] = {"median": middle, "quartiles": [first, third]}
    return found


def milliseconds(call: Call, count: int) -> float:
    """The mean of so many calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def memory() -> Iterator[dict[str, Any]]:
    """Peak memory of an eager step, without and with activation checkpointing in both networks."""
    for checkpointing in (False, True):
        found = {}
        for name, way in (("ours", ("split", RANK)), ("dense", ())):
            model = encoder(D, WIDE, DEPTH, HEADS, *way)
            if checkpointing:
                for layer in model.layers:
                    layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
            torch.cuda.empty_cache()
            found[name] = peak(training(model, torch.randn(128, 128, D), "tf32", "eager"))
            del model
        yield {"checkpointing": checkpointing, **found, "ratio": found["ours"] / found["dense"]}


def particles() -> Iterator[dict[str, Any]]:
    """A step of n particles of the MNIST network, per particle, over a step of one network with AdamW."""
    x, y = torch.rand(BATCH, 1, 28, 28, device="cuda"), torch.randint(0, 10, (BATCH,), device="cuda")
    one = training(tensorized("mnist_mlp", 20), x, "tf32", "eager", partial(bt.RankPrior, num_data=57_000))
    for number in (20, 100):
        group = posterior(number)
        for _ in range(200):
            group.step(x, y)
        ratios = [milliseconds(partial(group.step, x, y), 50) / number / milliseconds(one, 50) for _ in range(5)]
        yield {"particles": number, "per particle over one network": statistics.median(ratios)}


def page(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = report["environment"]
    text = (
        f"# Speed on a GPU\n\n`make bench-gpu` writes this page. {about['gpu']}; torch {about['torch']}; commit "
        f"{about['commit'][:10]}; {about['started'][:10]}; `{report['command']}`.\n\nA row is a training step with "
        "AdamW, or of a single layer both passes; sizes of batches are sequences x "
        "tokens. Ratios are medians over rounds, with quartiles.\n\n"
        "| row | dense, ms | ours, ms | of dense | others of dense |\n| --- | --: | --: | --: | --- |\n"
    )
    for line in report["rows"]:
        ratios = line["over_dense"]
        others = "; ".join(f"{name} {own['median']:.2f}" for name, own in sorted(ratios.items()) if name != "ours")
        cells = line["row"], f"{line['ms']['dense']:.3g}", f"{line['ms']['ours']:.3g}", _ratio(ratios["ours"]), others
        text += f"| {' | '.join(cells)} |\n"
    if report["memory"]:
        text += "\n| peak memory of a step, 128x128 tokens, TF32 | of dense |\n| --- | --: |\n"
    for line in report["memory"]:
        kind = "both with activation checkpointing" if line["checkpointing"] else "as it is"
        text += f"| {kind} | {line['ratio']:.2f} |\n"
    if report["particles"]:
        text += "\n| particles of the MNIST network | time of a particle's step, of one network's |\n| --- | --: |\n"
    for line in report["particles"]:
        text += f"| {line['particles']} | {line['per particle over one network']:.3f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    options = parser.parse_args()
    if options.page:
        (options.results / "GPU.md").write_text(page(json.loads((options.results / "gpu.json").read_text())))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    report: dict[str, Any] = {
        "command": f"python benchmarks/gpu.py --rounds {options.rounds}", "rows": [], "memory": [], "particles": [],
        "environment": environment("cuda"),
    }  # fmt: skip
    if options.commit:
        report["environment"]["commit"] = options.commit
    options.results.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        (options.results / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.results / "GPU.md").write_text(page(report))

    for name, calls in rows(options.only):
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            report["rows"].append({"row": name, **compare(calls, options.rounds)})
        except Exception as error:  # a row that fails is reported, and the others go on
            print(f"{name}: failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        line = report["rows"][-1]
        shares = ", ".join(f"{key} {own['median']:.3f}" for key, own in line["over_dense"].items())
        print(f"{name}: {line['ms']['dense']:.3f} ms dense; {shares}", flush=True)
        save()
    if not options.only:
        for part, found in (("memory", memory()), ("particles", particles())):
            for line in found:
                report[part].append(line)
                print(line, flush=True)
                save()


if __name__ == "__main__":
    main()
