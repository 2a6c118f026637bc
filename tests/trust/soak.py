"""Predict from 8 threads, again and again: every answer is the serial one, and memory and handles stay: ``make soak``.

    python tests/trust/soak.py [--predictions 100000] [--seconds 0]

Half of the answers are of a model, half of a posterior. It ends after both limits. Writes results/trust/soak.json.
"""

import argparse
import gc
import itertools
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / place) for place in ("tests/trust", "tests/app", "tests", "")]

import torch  # noqa: E402
from readers import posterior_fixed  # noqa: E402
from test_workers import THREADS, network  # noqa: E402
from trust_kit import record  # noqa: E402

INPUTS, ROUND = 20, 1_000


def held() -> dict[str, float]:
    gc.collect()
    kilobytes = int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    return {"megabytes": round(kilobytes / 1024, 1), "handles": len(list(Path("/proc/self/fd").iterdir()))}


def soak(predictions: int, seconds: float) -> dict[str, Any]:
    """Wrong answers, and what is held at up to 100 times in between."""
    model, posterior, wrong, done, curve = network(), posterior_fixed(), 0, 0, list[dict[str, float]]()
    draw = torch.Generator().manual_seed(0)
    rows = [(torch.randn(2, 1, 4, 4, generator=draw), torch.randn(2, 2, 4, 4, generator=draw)) for _ in range(INPUTS)]

    @torch.no_grad()
    def ask(k: int) -> torch.Tensor:
        x, z = rows[k // 2 % INPUTS]
        return posterior.predict(z).mean if k % 2 else model(x)

    serial, began, every = [ask(k) for k in range(2 * INPUTS)], time.monotonic(), 1
    with ThreadPoolExecutor(THREADS) as pool:
        for turn in itertools.count():
            if done >= predictions and time.monotonic() - began >= seconds:
                break
            answers = pool.map(ask, range(done, done + ROUND))
            right = [torch.equal(own, serial[k % len(serial)]) for k, own in enumerate(answers, done)]
            wrong, done = wrong + right.count(False), done + ROUND
            if turn % every == 0:
                curve.append({"seconds": round(time.monotonic() - began, 1), **held()})
            if len(curve) > 100:
                curve, every = curve[::2], 2 * every
    return {"threads": THREADS, "predictions": done, "wrong": wrong, "curve": curve}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=0.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record("soak", found := soak(given.predictions, given.seconds))
    sys.exit(bool(found["wrong"]))
