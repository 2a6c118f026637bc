"""What `export.py` runs in a process that cannot import bayestrain: parity and latency of exported files.

    python benchmarks/elsewhere.py FOLDER ROUNDS

The folder holds small.onnx, small.pt2, dense.onnx and cases.pt, inputs with PyTorch's outputs. Prints JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Blocked:
    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "bayestrain":
            raise ImportError(name)


sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]

import onnxruntime  # type: ignore[import-untyped]  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

LONG, SHORT = 0.5, 0.005
"""Seconds: fewer rounds for longer passes, and how long one measurement takes at least."""

Run = Callable[[Tensor], dict[str, Tensor]]


def onnx(file: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (given,), outputs = session.get_inputs(), [own.name for own in session.get_outputs()]

    def run(x: Tensor) -> dict[str, Tensor]:
        return dict(zip(outputs, map(torch.from_numpy, session.run(None, {given.name: x.numpy()})), strict=True))

    return run


def pt2(file: Path) -> Run:
    program = torch.export.load(file).module()

    def run(x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            y = program(x)
        return y if isinstance(y, dict) else {"output_0": y}

    return run


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest, relative to the largest output."""
    assert found.keys() == expected.keys()
    largest = max(float(own.abs().max()) for own in expected.values())
    return max(float((found[name] - own).abs().max()) for name, own in expected.items()) / largest


def continued(run: Run, text: Tensor, length: int, context: int) -> Tensor:
    """What the sampling loop of a language model writes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = run(text[:, -context:])["output_0"][:, -1]
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return text


def timed(run: Run, x: Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run(x)
    return (time.perf_counter() - started) / calls


def latency(small: Run, dense: Run, x: Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds of alternating measurements, and their ratio."""
    once = max(timed(run, x, 1) for run in (small, dense) for _ in range(2))
    calls, rounds = max(1, round(SHORT / once)), rounds if once < LONG else max(rounds // 10, 3)
    times = [(timed(small, x, calls), timed(dense, x, calls)) for _ in range(rounds)]
    ours, theirs = (1e3 * statistics.median(own) for own in zip(*times, strict=True))
    return {"ms": ours, "dense_ms": theirs, "ratio": ours / theirs}


def main(folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    runs, dense = {"onnx": onnx(folder / "small.onnx"), "pt2": pt2(folder / "small.pt2")}, onnx(folder / "dense.onnx")
    found: dict[str, Any] = {"error": {kind: {} for kind in runs}, "latency": {}}
    for case in torch.load(folder / "cases.pt"):
        n, x = len(case["x"]), case["x"]
        for kind, run in runs.items():
            found["error"][kind][n] = difference(run(x), case["y"])
            if "text" in case:
                again = continued(run, x, case["text"].shape[1] - x.shape[1], case["context"])
                found.setdefault("samples the same", {})[kind] = torch.equal(again, case["text"])
        if case["timed"]:
            found["latency"][n] = latency(runs["onnx"], dense, x, rounds)
    assert "bayestrain" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
