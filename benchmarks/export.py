"""Exported files beside dense ones: size, operations, agreement with PyTorch, and latency in onnxruntime.

    python benchmarks/export.py --text input.txt      # Tiny Shakespeare, for the GPT; without it, that row is left out
    python benchmarks/export.py --page                # only write the page of results again

The networks are recorded ones of the paper at the ranks they learned, and records/gpt.py's after a few steps, cut to an
eighth. Everything but the export itself happens in a process that cannot import bayestrain (`elsewhere.py`). Writes
``results/benchmarks/export.json`` and, beside it, ``EXPORT.md``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayestrain as bt
from bayestrain.files import write_json
from bayestrain.posterior import around
from bayestrain.train.environment import describe_environment
from paper import networks
from records.gpt import GPT

ROOT = Path(__file__).parents[1]
RESULTS, RECORDED = ROOT / "results" / "benchmarks", ROOT / "paper" / "results"
BATCHES, TIMED = (1, 7, 256), (1, 256)
LENGTH, STEPS, RATIO = 32, 20, 8
"""Of the GPT: characters of an input, steps of training, and how many times smaller."""

INTRODUCTION = """# Exported files

`make bench-export TEXT=input.txt` writes this page. Every row is the ONNX file of one model at its learned ranks beside
that of the dense network, written by `bt.export`. "Limit" is 1.15 times the parameters' bytes, 16 kB, and 0.5 kB for
each operation; of the MNIST network at most 40 kB. Errors are the largest difference from PyTorch relative to the
largest output, over batches of 1, 7 and 256, in a process that cannot import bayestrain. Latency is the median of
alternating runs in onnxruntime on one thread, and its ratio to that of the dense file.
"""


def recorded(folder: str, build: Callable[[], nn.Module]) -> nn.Module:
    """A network of the paper's at the ranks it learned."""
    source = RECORDED / folder
    about = json.loads((source / "model.json").read_text())
    if about["version"] == 1:  # what the description said when most of them were recorded
        about |= {"version": 2, "weights": {own.pop("module"): own for own in about["weights"].values()}}
    with TemporaryDirectory() as place:
        write_json(Path(place, "model.json"), about)
        Path(place, "model.safetensors").symlink_to(source / "model.safetensors")
        return bt.load(place, into=build())  # type: ignore[no-any-return]


def gpt(codes: Tensor, symbols: int) -> GPT:
    """The GPT of records/gpt.py, trained for a few steps with the prior and cut."""
    torch.manual_seed(0)
    model = GPT(symbols, dropout=0.0)
    size = bt.count_parameters(model)
    whole = {n: ((m.in_features,), (m.out_features,)) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    whole.pop("head")
    config = bt.TensorizeConfig(128, layout="split", modes=whole)
    bt.tensorize_(model, config, lambda _, name: name != "head")
    prior, optimizer = bt.RankPrior(model, len(codes)), torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        starts = torch.randint(len(codes) - model.context, (4, 1))
        rows = codes[starts + torch.arange(model.context + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) + prior.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        prior.step()
    bt.compact_(model, parameters=size // RATIO)
    prior.remove_()
    return model.eval()


def rows(text: Path | None) -> Iterator[tuple[str, Any, Any, Callable[[int], Tensor], dict[str, Any]]]:
    """Name, model, its dense twin, inputs of a batch, and more about a row."""
    digits = next(iter(bt.data.load("mnist-mini").test.batches(max(BATCHES), shuffle=False)))[0]
    small, dense = recorded("mnist/again/seed-0", networks.mnist_mlp), networks.mnist_mlp().eval()
    yield "MNIST network", small, dense, lambda n: digits[:n], {"limit": 40_000}
    for n in (5, 20):
        found, other = (bt.Posterior(around(net, n), 6000) for net in (small, dense))
        yield f"posterior of {n} MNIST networks", found, other, lambda n: digits[:n], {}
    pictures = torch.randn(max(BATCHES), 3, 32, 32)
    small, dense = recorded("cifar10-cnn/x32-again/seed-0", networks.cifar10_cnn), networks.cifar10_cnn().eval()
    yield "CNN", small, dense, lambda n: pictures[:n], {}
    small, dense = recorded("cifar10-resnet110/x11-again/seed-0", networks.resnet110), networks.resnet110().eval()
    yield "ResNet-110", small, dense, lambda n: pictures[:n], {}
    if text is not None:
        known = text.read_text(encoding="utf-8")
        number = {symbol: n for n, symbol in enumerate(sorted(set(known)))}
        codes = torch.tensor([number[symbol] for symbol in known])
        windows = codes[: max(BATCHES) * LENGTH].view(-1, LENGTH)
        dense = GPT(len(number)).eval()
        more = {"dynamic": {0: "batch", 1: "length"}}
        yield "character GPT", gpt(codes, len(number)), dense, lambda n: windows[:n], more


def measured(name: str, model: Any, dense: Any, inputs: Any, more: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One row of the results."""
    many, dynamic = isinstance(model, bt.Posterior), more.get("dynamic", {0: "batch"})
    cases, example = [], inputs(3)
    with TemporaryDirectory() as place, torch.no_grad():
        folder = Path(place)
        for n in BATCHES:
            x = inputs(n)
            if many:
                found = model.predict(x)
                y = {key: getattr(found, key) for key in ("mean", "total", "aleatoric", "epistemic")}
            else:
                y = {"output_0": model(x)}
            cases.append({"x": x, "y": y, "timed": n in TIMED})
            if n == 1 and isinstance(model, GPT):
                text = model.sample(x, 100, torch.Generator().manual_seed(0))
                cases[-1] |= {"text": text, "context": model.context}
        torch.save(cases, folder / "cases.pt")
        report = bt.export(model, folder / "small.onnx", example=example, dynamic=dynamic)
        program = bt.export(model, folder / "small.pt2", "pt2", example=example, dynamic=dynamic)
        whole = bt.export(dense, folder / "dense.onnx", example=example, dynamic=dynamic)
        command = [sys.executable, str(Path(__file__).with_name("elsewhere.py")), str(folder), str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = len(model) * model.parameters_each if many else bt.count_parameters(model)
    full = len(dense) * dense.parameters_each if many else bt.count_parameters(dense)
    limit = min(more.get("limit", 10**12), 1.15 * 4 * size + 16_000 + 500 * report.nodes)
    return {
        "name": name, "parameters": size, "dense_parameters": full, "bytes": report.bytes, "dense_bytes": whole.bytes,
        "pt2_bytes": program.bytes, "nodes": report.nodes, "dense_nodes": whole.nodes, "limit": round(limit),
        **json.loads(done.stdout),
    }  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """The page of recorded results."""
    about = report["environment"]
    text = INTRODUCTION + f"\n{about['cpu']}, 1 thread; torch {about['torch']}; onnxruntime {report['onnxruntime']}; "
    text += f"commit {about['commit'][:10]}; {about['started'][:10]}; `{report['command']}`.\n"
    head = ["model", "parameters", "dense", "file, kB", "limit", "dense file", ".pt2", "operations", "dense",
            "largest error, ONNX", ".pt2", "batch 1, ms", "of dense", "batch 256, ms", "of dense"]  # fmt: skip
    text += f"\n| {' | '.join(head)} |\n| --- |{' --: |' * (len(head) - 1)}\n"
    for row in report["rows"]:
        kilobytes = [f"{row[key] / 1e3:,.1f}" for key in ("bytes", "limit", "dense_bytes", "pt2_bytes")]
        errors = [f"{max(row['error'][kind].values()):.1e}" for kind in ("onnx", "pt2")]
        times = [f"{own[key]:.{digits}}" for own in row["latency"].values() for key, digits in
                 (("ms", "3g"), ("ratio", "2f"))]  # fmt: skip
        cells = [row["name"], f"{row['parameters']:,}", f"{row['dense_parameters']:,}", *kilobytes, str(row["nodes"]),
                 str(row["dense_nodes"]), *errors, *times]  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    large = [row["name"] for row in report["rows"] if row["bytes"] > row["limit"]]
    slow = [f"{row['name']} at batch {n} ({own['ratio']:.2f})" for row in report["rows"]
            for n, own in row["latency"].items() if own["ratio"] > 1]  # fmt: skip
    text += f"\nLarger than the limit: {', '.join(large) or 'none'}. Slower than dense: {', '.join(slow) or 'none'}.\n"
    for row in report["rows"]:
        if "samples the same" in row:
            said = "the same 100" if all(row["samples the same"].values()) else "other"
            text += (
                f"\nThe sampling loop around the files of the {row['name']} writes {said} characters as in PyTorch.\n"
            )
    return text


def main() -> None:
    import onnxruntime  # type: ignore[import-untyped]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="Tiny Shakespeare")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page")
    options = parser.parse_args()
    file = options.results / "export.json"
    if not options.page:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        report: dict[str, Any] = {"command": "python benchmarks/export.py --text input.txt",
                                  "onnxruntime": onnxruntime.__version__, "rows": [],
                                  "environment": describe_environment(torch.device("cpu"))}  # fmt: skip
        for name, *row in rows(options.text):
            if options.only in name:
                report["rows"].append(measured(name, *row, options.rounds))
                print(json.dumps(report["rows"][-1], indent=1), flush=True)
        write_json(file, report)
    (options.results / "EXPORT.md").write_text(page(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
