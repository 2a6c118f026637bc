"""A run of digits and a server process for it, and requests to that."""

import http.client
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from processes import ENVIRONMENT, python

from bayestrain import data

CLI = ["-W", "error", "-m", "bayestrain"]


def train(folder: Path) -> Path:
    """A posterior of two small networks, trained for an epoch or two."""
    short = [f"fit.{key}" for key in ("epochs=2", "finetune_epochs=1", "batch_size=250")]
    settings = [word for each in short for word in ("--set", each)]
    python(*CLI, "train", "--particles", "2", "--out", folder, *settings)
    return folder


@contextmanager
def server(run: Path) -> Iterator[tuple[int, int]]:
    """The port and process number of `bayestrain serve RUN`; nothing may be on its stderr at the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", *CLI, "serve", str(run), "--port", "0"], env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
    assert found, (line, process.communicate(timeout=60))
    try:
        yield int(found[1]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors


def ask(port: int, body: Any, kind: str = "application/json", query: str = "", **options: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", f"/predict{query}", body, {"Content-Type": kind}, **options)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def digits(number: int) -> list[Any]:
    """Test digits as uint8 (28, 28) arrays."""
    return list(data.load("mnist-mini").test.images[:number, 0].numpy())


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def memory(process: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[0]) << 10
