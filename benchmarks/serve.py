"""Load test of `bayestrain serve`: 10,000 requests from 32 connections, each answer compared with the serial one.

    python benchmarks/serve.py [RUN]

Without a run, a posterior of two small networks is trained first. Writes results/benchmarks/serve.json.
"""

import http.client
import json
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import local
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "app"), str(ROOT / "tests")]
import serve_kit as kit  # noqa: E402

from bayestrain import __version__  # noqa: E402
from bayestrain.files import write_json  # noqa: E402

REQUESTS, CONNECTIONS, PICTURES = 10_000, 32, 50


def measure(run: Path) -> dict[str, Any]:
    """Wrong answers, seconds of each request and memory of the server, for a run's pictures."""
    bodies, own = [kit.png(pixels) for pixels in kit.digits(PICTURES)], local()
    with kit.server(run) as (port, process):
        serial = [kit.ask(port, body, "image/png") for body in bodies]

        def one(number: int) -> tuple[bool, float]:
            if not hasattr(own, "connection"):
                own.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            started = time.perf_counter()
            own.connection.request("POST", "/predict", bodies[number % PICTURES], {"Content-Type": "image/png"})
            reply = own.connection.getresponse()
            found = reply.status, json.loads(reply.read())
            return found == serial[number % PICTURES], time.perf_counter() - started

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(one, range(500)))  # warm
            before, started = kit.memory(process), time.perf_counter()
            found = list(pool.map(one, range(REQUESTS)))
            seconds, after = time.perf_counter() - started, kit.memory(process)
    right, times = zip(*found, strict=True)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {
        "version": __version__, "cpu": platform.processor() or platform.machine(), "requests": REQUESTS,
        "connections": CONNECTIONS, "wrong": REQUESTS - sum(right), "per_second": REQUESTS / seconds,
        "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "memory_mb": [before / 2**20, after / 2**20],
    }  # fmt: skip


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        result = measure(Path(sys.argv[1]) if len(sys.argv) > 1 else kit.train(Path(folder) / "run"))
    print(json.dumps(result, indent=2))
    write_json(ROOT / "results" / "benchmarks" / "serve.json", result)
