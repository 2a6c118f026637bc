"""Kill, starve and damage what trains, saves, exports, fetches and serves: ``make test-faults``.

    python tests/trust/faults.py [--faults 600] [--seed 0] [--jobs save ..] [--kinds kill ..]

The promise: no finished checkpoint or model is lost or half-written, and damage is named. After each fault the job
runs again without one and must end in the bits of an undisturbed run. Writes results/trust/faults.json.
"""

import argparse
import contextlib
import functools
import gzip
import hashlib
import http.client
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

for place in ("", "tests", "tests/app", "tests/trust"):
    sys.path.insert(0, str(Path(__file__).parents[2] / place))

import torch  # noqa: E402
import uvicorn  # noqa: E402
from readers import X, Y, dense, settings, small, trained  # noqa: E402
from trust_kit import record  # noqa: E402

from bayestrain import export, fit, load, save  # noqa: E402
from bayestrain.app.cli.serve import application  # noqa: E402
from bayestrain.app.report.read import read_run  # noqa: E402
from bayestrain.errors import BayesTrainError  # noqa: E402
from bayestrain.train import RunFolder  # noqa: E402
from bayestrain.train.run import load_run, train_run  # noqa: E402
from paper.fetch import File, fetch  # noqa: E402

UNPRIVILEGED, LIBRARY = 65534, next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
EXPECTED = (BayesTrainError, OSError, MemoryError)
Tell = Callable[[str], object]


@dataclass
class Job:
    """Something that writes into a folder, which `prepare` fills before, and what has to be true afterwards."""

    run: Callable[[Path, Tell], object]
    check: Callable[[Path, list[str]], object]
    prepare: Callable[[Path], object] = field(default=lambda _: None)
    kinds: tuple[str, ...] = ("kill", "disk", "memory", "handles", "permissions", "damage", "two", "clock")


def tensors(model: torch.nn.Module) -> list[Any]:
    return [(name, value.tolist()) for name, value in model.state_dict().items()]


def begun(folder: Path, tell: Tell) -> dict[str, Any]:
    """Whether to resume, and what tells of every epoch, whose checkpoint is finished then."""
    torch.manual_seed(0)
    names = ("result.json", "checkpoint.pt", "checkpoint-previous.pt")
    callback = SimpleNamespace(on_epoch=lambda row: tell(f"epoch {row['epoch']}"))
    return {"resume": any((folder / name).exists() for name in names), "callbacks": [callback]}


def train(folder: Path, tell: Tell) -> None:
    options = {**begun(folder, tell), "epochs": 5, "finetune_epochs": 2, "batch_size": 6, "progress": False}
    result = fit(small(), (X, Y), folder=folder, **options)
    save(result.model, folder / "model")
    tell("done")


def train_posterior(folder: Path, tell: Tell) -> None:
    train_run(settings(epochs=2, batch_size=20), folder, **begun(folder, tell))
    tell("done")


def reached(folder: Path, told: list[str]) -> None:
    """The checkpoint of the last epoch that was told of is there."""
    epochs = [int(line.removeprefix("epoch ")) for line in told if line.startswith("epoch")]
    if epochs and not (folder / "result.json").exists():
        with RunFolder(folder, resume=True) as opened:
            state, note = opened.load_checkpoint()
        assert state["epoch"] >= epochs[-1], f"epoch {epochs[-1]} was finished, {state['epoch']} is there {note}"


def model_of(folder: Path) -> list[Any]:
    return tensors(load(folder, dense()))


@functools.cache
def versions() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(3)
    return small(), small("cp")


def check_saved(folder: Path, told: list[str]) -> None:
    old, new = map(tensors, versions())
    found = model_of(folder)
    assert found == new or (found == old and "done" not in told), "neither the old model nor the new one"


def check_exported(folder: Path, told: list[str]) -> None:
    with torch.no_grad():
        old, new = (model(X) for model in versions())
        found = torch.export.load(folder / "model.pt2").module()(X)
    near = [torch.allclose(found, each, atol=1e-5) for each in (old, new)]
    assert near[1] or (near[0] and "done" not in told), "neither the old file nor the new one"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@functools.cache
def published() -> tuple[list[File], list[dict[str, str]]]:
    """Two files on a server of this process."""
    folder, files = Path(tempfile.mkdtemp()), []
    for name in ("one", "two"):
        content = random.Random(name).randbytes(60_000)
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        files.append(File(name, len(content), hashlib.sha256(content).hexdigest()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return files, [{"mirror": f"http://127.0.0.1:{server.server_port}/"}]


def fetched(folder: Path, tell: Tell) -> None:
    fetch(published()[0], folder, published()[1])
    tell("done")


def check_fetched(folder: Path, told: list[str]) -> None:
    for file in published()[0]:
        if "damage" not in told and (folder / file.name).exists():
            file.read(folder)
        assert "done" not in told or "damage" in told or (folder / file.name).exists()


def listener(folder: Path) -> Path:
    return folder / ".socket"


def served(folder: Path, tell: Tell) -> None:
    app = application(folder / "run", "cpu")
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(listener(folder)))
    own.listen(16)
    tell("serving")
    uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False)).run(sockets=[own])


def ask(folder: Path) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("localhost", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(20)
    connection.sock.connect(str(listener(folder)))
    body = json.dumps({"inputs": [[0.1 * k for k in range(64)]]})
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read()


@functools.cache
def finished_run() -> tuple[Path, Any]:
    folder = trained(Path(tempfile.mkdtemp()))
    return folder, load_run(folder).predict(torch.zeros(1, 1, 8, 8)).mean.tolist()


def prepare_served(folder: Path) -> None:
    shutil.copytree(finished_run()[0], folder / "run", dirs_exist_ok=True)


def check_served(folder: Path, _: list[str]) -> None:
    source, expected = finished_run()
    for file in source.iterdir():
        assert (folder / "run" / file.name).read_bytes() == file.read_bytes(), f"{file.name} has changed"
    assert load_run(folder / "run").predict(torch.zeros(1, 1, 8, 8)).mean.tolist() == expected


JOBS = {
    "train": Job(train, reached),
    "posterior": Job(train_posterior, reached),
    "save": Job(lambda folder, tell: (save(versions()[1], folder), tell("done")), check_saved,
                lambda folder: save(versions()[0], folder)),
    "export": Job(
        lambda folder, tell: (export(versions()[1], folder / "model.pt2", "pt2", example=X), tell("done")),
        check_exported, lambda folder: export(versions()[0], folder / "model.pt2", "pt2", example=X),
        kinds=("kill", "disk", "memory", "handles", "permissions"),
    ),
    "fetch": Job(fetched, check_fetched, kinds=("kill", "disk", "handles", "permissions", "damage", "two")),
    "serve": Job(served, check_served, prepare_served, kinds=("kill", "disk", "handles")),
}  # fmt: skip
FINAL = {"train": "model/model.safetensors", "posterior": "posterior.safetensors", "save": "model.safetensors"}


def start(job: Job, folder: Path, before: Callable[[], object] = lambda: None) -> tuple[int, int]:
    """Fork a process that runs the job; its number, and the pipe on which it tells what it has finished."""
    reading, writing = os.pipe()
    if process := os.fork():
        os.close(writing)
        return process, reading
    code = 0
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        before()
        job.run(folder, lambda text: os.write(writing, f"{text}\n".encode()))
    except BaseException as error:
        text = str(error).replace("\n", " ")
        bad_alloc = isinstance(error, RuntimeError) and ("memory" in text or "bad_alloc" in text)
        known = isinstance(error, EXPECTED) or bad_alloc
        with contextlib.suppress(BaseException):
            where = "" if known else " | ".join(traceback.format_exc().splitlines()[-4:])
            kind = "refused" if known else "UNEXPECTED"
            os.write(writing, f"{kind} {type(error).__name__}: {text[:300]} {where}\n".encode())
        code = 3 if known else 4
    finally:
        os._exit(code)


def finish(process: int, reading: int, timeout: float = 120.0) -> tuple[int, list[str]]:
    """The end of a job, which is killed if it hangs: its status, and what it told."""
    hung = threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
    hung.start()
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().decode(errors="replace").splitlines()
    _, status = os.waitpid(process, 0)
    assert hung.is_alive(), "it hung"
    hung.cancel()
    return os.waitstatus_to_exitcode(status), lines


def flipped(folder: Path, draw: random.Random) -> str:
    """Damage one file of a folder: cut, a bit flipped, or swapped with another of its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    kind = draw.choice(("cut", "flip", "flip", "swap"))
    if kind == "cut":
        content = content[: draw.randrange(len(content))]
    elif kind == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        other = draw.choice(files)
        content, own = bytearray(other.read_bytes()), bytes(content)
        other.write_bytes(own)
    file.write_bytes(content)
    return f"{kind} {file.name}"


class Faults:
    """Draws faults for a job and judges what is left; `ends` counts how the jobs ended."""

    def __init__(self, name: str, seconds: float, expected: bytes) -> None:
        self.name, self.job, self.seconds, self.expected = name, JOBS[name], seconds, expected
        self.ends: Counter[str] = Counter()

    def before(self, kind: str, folder: Path, draw: random.Random) -> Callable[[], object]:
        """What happens to the process before it starts its job."""
        if kind == "disk":
            limit = draw.randrange({"serve": 4_000, "save": 8_000}.get(self.name, 60_000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # inherited; as Python does
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if kind == "memory":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = size + draw.randrange(3 << 20)
            return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if kind == "handles":
            limit = len(list(Path("/proc/self/fd").iterdir())) + draw.randrange(8) + 4 * (self.name == "serve")
            return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        if kind == "permissions":
            inside = [path for path in folder.rglob("*") if draw.random() < 0.5]
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
            for path in draw.choice(([folder], inside, [folder, *inside])):
                os.chown(path, 0, 0)
                path.chmod(draw.choice((0o555, 0o500, 0o444)) if path.is_dir() else draw.choice((0o444, 0o400)))

            def drop() -> None:
                os.setgroups([])
                os.setgid(UNPRIVILEGED)
                os.setuid(UNPRIVILEGED)

            return drop
        return lambda: None

    def strike(self, kind: str, draw: random.Random, base: Path) -> None:
        """One fault; raises `AssertionError` if the promise is broken."""
        with tempfile.TemporaryDirectory(dir=base) as place, contextlib.ExitStack() as stack:
            folder = Path(place) / "folder"
            folder.mkdir()
            Path(place).chmod(0o755)
            if kind == "disk" and os.geteuid() == 0 and draw.random() < 0.5 and self.name not in ("export", "serve"):
                size = 4096 * draw.randrange(8, 70)
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
                stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
                try:
                    self.job.prepare(folder)
                except OSError:
                    self.ends["too small to begin"] += 1
                    return
                self._strike("disk", folder, draw, limited=True)
                subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
                self._after(folder, self.told)
                return
            self.job.prepare(folder)
            if kind == "permissions" and draw.random() < 0.5 and self.name in ("train", "posterior"):
                self._kill(folder, draw)  # so that there is something to protect
            self._strike(kind, folder, draw)
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, os.geteuid(), os.getegid())
                path.chmod(0o755)
            self._after(folder, self.told)

    def _kill(self, folder: Path, draw: random.Random) -> list[str]:
        process, pipe = start(self.job, folder)
        time.sleep(draw.uniform(0, 1.1 * self.seconds))
        if self.name == "serve":
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(folder)
        os.kill(process, signal.SIGKILL)
        return finish(process, pipe)[1]

    def _strike(self, kind: str, folder: Path, draw: random.Random, limited: bool = False) -> None:
        if kind == "kill":
            self.told = self._kill(folder, draw)
            self.ends["killed" if "done" not in self.told else "finished"] += 1
            return
        if kind == "clock":
            self.told = self._with_jumping_clock(folder, draw)
            return
        if kind == "two":
            both = [start(self.job, folder), start(self.job, folder)]
            ends = [finish(*each) for each in both]
            self.told = [line for _, told in ends for line in told if not line.startswith("epoch")]
            assert any(code == 0 for code, _ in ends), self.told
        else:
            process, pipe = start(self.job, folder, (lambda: None) if limited else self.before(kind, folder, draw))
            if self.name == "serve":
                self._use(process, folder, kind)
            code, self.told = finish(process, pipe)
            ends = [(code, self.told)]
        assert not any(line.startswith("UNEXPECTED") for line in self.told), self.told
        if kind != "memory" and self.name != "serve":  # where C++ may abort
            assert all(code in (0, 3) for code, _ in ends), (ends, self.told)
        for code, told in ends:
            last = told[-1].split(":")[0] if told and code else ""
            self.ends["finished" if code == 0 else last if last.startswith("refused") else f"died with {code}"] += 1
        if kind == "damage":
            what = flipped(folder, draw)
            try:
                self._read(folder)
            except BayesTrainError as error:
                self.ends["named"] += 1
                if str(folder) not in str(error):
                    raise AssertionError(f"the message does not name the file: {error}") from error
                raise Named(what) from error
            self.told = ["damage"]

    def _use(self, process: int, folder: Path, kind: str) -> None:
        """Ask a server that lacks something; each answer is right, or says that it cannot."""
        until = time.monotonic() + 20
        while not listener(folder).exists() and time.monotonic() < until and not _ended(process):
            time.sleep(0.01)
        for _ in range(3):
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, answer = ask(folder)
                assert status in ((200, 503) if kind != "kill" else (200,)), (status, answer)
                assert status != 200 or "predictions" in json.loads(answer)
        os.kill(process, signal.SIGKILL)

    def _read(self, folder: Path) -> None:
        """Read what a finished job has left; what is read must be right."""
        if self.name == "train":
            assert model_of(folder / "model") == self.model, "damage changed the model silently"
            with RunFolder(folder, resume=True) as opened:
                opened.load_checkpoint()
        elif self.name == "posterior":
            read_run(folder)
            load_run(folder)
            assert (folder / FINAL[self.name]).read_bytes() == self.expected, "damage changed the posterior silently"
        elif self.name == "save":
            assert model_of(folder) == tensors(versions()[1]), "damage changed the model silently"

    def _after(self, folder: Path, told: list[str]) -> None:
        self.job.check(folder, told)
        if self.name == "serve":
            return
        process, pipe = start(self.job, folder)  # without a fault it finishes, in the same bits
        code, lines = finish(process, pipe)
        assert code == 0, lines
        self.job.check(folder, lines)
        if self.name in FINAL:
            assert (folder / FINAL[self.name]).read_bytes() == self.expected, "it ended in other bits"

    def _with_jumping_clock(self, folder: Path, draw: random.Random) -> list[str]:
        """The job in a process whose clock jumps by up to ten years each way, by libfaketime."""
        with tempfile.TemporaryDirectory() as place:
            clock = Path(place) / "clock"
            clock.write_text("+0d\n")
            environment = {**os.environ, "LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(clock),
                           "FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
            command = [sys.executable, __file__, "--child", self.name, str(folder)]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            while process.poll() is None:
                clock.write_text(f"{draw.randint(-3650, 3650):+d}d\n")
                time.sleep(0.05)
            lines = process.stdout.read().decode().splitlines()
        assert process.returncode == 0, lines[-5:]
        self.ends["finished"] += 1
        return lines

    @functools.cached_property
    def model(self) -> list[Any]:
        with tempfile.TemporaryDirectory() as place:
            train(Path(place), lambda _: None)
            return model_of(Path(place) / "model")


class Named(Exception):
    """The damage was named, which is all that can be asked."""


def _ended(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def undisturbed(name: str, base: Path) -> tuple[float, bytes]:
    """How long a job takes, and the file it ends with."""
    with tempfile.TemporaryDirectory(dir=base) as place:
        folder = Path(place) / "folder"
        folder.mkdir()
        JOBS[name].prepare(folder)
        seconds = []
        for turn in range(2):  # the first run imports
            own = folder / str(turn) if name not in ("export", "serve") else folder
            own.mkdir(exist_ok=True)
            began = time.monotonic()
            if name == "serve":
                process, pipe = start(JOBS[name], own)
                Faults(name, 1.0, b"")._use(process, own, "kill")
                finish(process, pipe)
                listener(own).unlink()
            else:
                JOBS[name].run(own, lambda _: None)
            seconds.append(time.monotonic() - began)
        return min(seconds), (own / FINAL[name]).read_bytes() if name in FINAL else b""


def campaign(names: list[str], kinds: list[str], number: int, seed: int, seconds: float = 1e9) -> dict[str, Any]:
    """Faults of all kinds for all jobs in turn; for each what happened, and every broken promise."""
    found: dict[str, Any] = {}
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        base.chmod(0o755)
        subjects = {name: Faults(name, *undisturbed(name, base)) for name in names}
        root = os.geteuid() == 0
        pairs = [(name, kind) for name in names for kind in JOBS[name].kinds
                 if kind in kinds and (kind != "permissions" or root) and (kind != "clock" or LIBRARY)]  # fmt: skip
        for turn in range(number):
            name, kind = pairs[turn % len(pairs)]
            if time.monotonic() > until:
                continue
            row = found.setdefault(f"{name}, {kind}", {"faults": 0, "broken": [], "ends": {}})
            subject = subjects[name]
            subject.ends.clear()
            row["faults"] += 1
            try:
                subject.strike(kind, random.Random(f"{seed} {turn}"), base)
            except Named:
                pass
            except Exception as error:
                row["broken"].append(f"turn {turn}: {type(error).__name__}: {str(error)[:600]}")
                print(name, kind, row["broken"][-1], file=sys.stderr, flush=True)
            row["ends"] = dict(Counter(row["ends"]) + subject.ends)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    kinds = sorted({kind for job in JOBS.values() for kind in job.kinds})
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--kinds", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--child", nargs=2, metavar=("JOB", "FOLDER"), help="run one job, as the clock's faults do")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        JOBS[given.child[0]].run(Path(given.child[1]), lambda text: print(text, flush=True))
        return
    found = campaign(given.jobs, given.kinds, given.faults, given.seed, given.seconds)
    for name, row in found.items():
        print(name, row, flush=True)
    if len(given.jobs) == len(JOBS) and given.kinds == kinds:
        record("faults", {"seed": given.seed, "faults": found})
    sys.exit(any(row["broken"] for row in found.values()))


if __name__ == "__main__":
    main()
