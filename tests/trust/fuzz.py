"""Feed damaged inputs to every reader: ``make fuzz``. Only `BayesTrainError` may come out, within 5 s and 1 GB.

    python tests/trust/fuzz.py [--inputs 1000000] [--seed 0] [--readers "config" ..] [--seconds 600]

Input number k of a reader depends on nothing but the seed and k, so that any failure can be repeated:
``--readers config --only 1234``. Writes results/trust/fuzz.json.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

for place in ("", "tests", "tests/app", "tests/trust"):
    sys.path.insert(0, str(Path(__file__).parents[2] / place))

import torch  # noqa: E402
from readers import READERS, SLOW, Reader  # noqa: E402
from trust_kit import record  # noqa: E402

from bayestrain.errors import BayesTrainError  # noqa: E402

# Seconds of the processor, so that a busy machine does not matter; after ten times as many, a process is ended.
SECONDS, BYTES, CHUNK = 5.0, 1 << 30, 500
RAM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


class TooSlow(BaseException):
    """An input took longer than it may."""


def attack(name: str, reader: Reader, seed: int, numbers: range, current: Any = None) -> dict[str, Any]:
    """Feed these inputs; how many were read, refused, and ended otherwise, which are described."""
    found: Counter[str] = Counter()
    odd: dict[str, list[Any]] = {}
    slowest = 0.0

    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    try:
        for number in numbers:
            draw = random.Random(f"{seed} {name} {number}")
            given = reader.damage(draw.choice(reader.seeds), draw, reader.seeds)
            if current is not None:
                current.value = number
                faulthandler.dump_traceback_later(10 * SECONDS, exit=True)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            started = time.process_time()
            try:
                with warnings.catch_warnings(action="ignore"):
                    reader.read(given)
                found["read"] += 1
            except BayesTrainError:
                found["refused"] += 1
            except BaseException as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                if isinstance(error, KeyboardInterrupt):
                    raise
                found["unexpected"] += 1
                last = traceback.extract_tb(error.__traceback__)[-1]
                odd.setdefault(f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}", []).append(
                    (number, str(error)[:200])
                )
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest = max(slowest, time.process_time() - started)
    finally:
        signal.signal(signal.SIGPROF, before)
        faulthandler.cancel_dump_traceback_later()
    return {**dict.fromkeys(("read", "refused", "unexpected"), 0), **found, "slowest": slowest, "odd": odd}


def worker(name: str, seed: int, tasks: Any, results: Any, current: Any) -> None:
    """Attacks one reader within its own process, whose memory may grow by a gigabyte."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=RAM) as folder, Path(os.devnull).open("w") as silence:
        os.dup2(silence.fileno(), 2)  # libtiff's own
        with contextlib.redirect_stdout(silence):
            reader = READERS[name](Path(folder))
        attack(name, reader, seed, range(3))  # what is imported on first use does not count
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
        while (numbers := tasks.get()) is not None:
            results.put(attack(name, reader, seed, numbers, current))


def campaign(name: str, seed: int, inputs: int, deadline: float) -> dict[str, Any]:
    """All inputs of one reader; a process that dies is an unexpected end, and the next continues behind it."""
    total = Counter(dict.fromkeys(("read", "refused", "unexpected"), 0))
    odd: dict[str, list[Any]] = {}
    slowest, start, begun = 0.0, 0, time.monotonic()
    context = multiprocessing.get_context("spawn")
    while start < inputs and time.monotonic() < deadline:
        tasks, results, current = context.Queue(), context.Queue(), context.Value("q", -1)
        process = context.Process(target=worker, args=(name, seed, tasks, results, current))
        process.start()
        while start < inputs and process.is_alive() and time.monotonic() < deadline:
            tasks.put(range(start, min(start + CHUNK, inputs)))
            part = None
            while part is None and (process.is_alive() or not results.empty()):
                with contextlib.suppress(Exception):
                    part = results.get(timeout=0.5)
            if part is None:
                odd.setdefault(f"the process died with code {process.exitcode}", []).append((current.value, ""))
                total["unexpected"] += 1
                start = max(current.value, start) + 1
                break
            total.update({key: part[key] for key in ("read", "refused", "unexpected")})
            slowest, start = max(slowest, part["slowest"]), min(start + CHUNK, inputs)
            for key, cases in part["odd"].items():
                odd[key] = [*odd.get(key, []), *cases]
        tasks.put(None)
        process.join(20)
        if process.is_alive():
            process.kill()
    seconds = time.monotonic() - begun
    return {"inputs": sum(total.values()), **total, "slowest_seconds": round(slowest, 3), "seconds": round(seconds, 1),
            "odd": {key: {"number": len(cases), "first": cases[0]} for key, cases in odd.items()}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all readers together")
    parser.add_argument("--seconds", type=float, default=1e9, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--only", type=int, help="repeat one input, and show its traceback")
    given = parser.parse_args()
    if given.only is not None:
        with tempfile.TemporaryDirectory(dir=RAM) as folder:
            reader = READERS[given.readers[0]](Path(folder))
            draw = random.Random(f"{given.seed} {given.readers[0]} {given.only}")
            damaged = reader.damage(draw.choice(reader.seeds), draw, reader.seeds)
            print(repr(damaged)[:3000])
            reader.read(damaged)
        return
    share = sum(1 / SLOW.get(name, 1) for name in given.readers)
    tables, begun = {}, time.monotonic()
    for place, name in enumerate(given.readers):
        left = given.seconds - (time.monotonic() - begun)
        deadline = time.monotonic() + left / (len(given.readers) - place)
        inputs = max(1, round(given.inputs / share / SLOW.get(name, 1)))
        tables[name] = campaign(name, given.seed, inputs, deadline)
        print(name, tables[name], flush=True)
    if set(given.readers) == set(READERS):
        record("fuzz", {"seed": given.seed, "readers": tables})
    sys.exit(any(table.get("unexpected") for table in tables.values()))


if __name__ == "__main__":
    main()
