"""The code of the how-to pages runs, each page as one script, as a reader would paste it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import serve_kit as kit
from typer.testing import CliRunner

from bayestrain.app.cli.app import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    outside = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_loops(tmp_path: Path) -> None:
    for library in ("pytorch_lightning", "transformers", "accelerate"):
        pytest.importorskip(library)
    blocks = BLOCK.findall((ROOT / "docs" / "loops.md").read_text())
    assert len(blocks) == 7
    found = re.findall(r"\{'.*?: \((\d+), (\d+)\), '.*?: \((\d+),\)\}", run("\n".join(blocks), tmp_path))
    assert len(found) == 3
    assert all(sum(map(int, ranks)) < 30 for ranks in found)  # they fell


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    text = (ROOT / "docs" / "serve.md").read_text()
    (block,) = BLOCK.findall(text)
    with kit.server(kit.train(tmp_path / "run")) as (port, _):
        printed = run(block.replace("localhost:8000", f"127.0.0.1:{port}"), tmp_path)
    assert re.match(r"\d 0\.\d+ between 0\.\d+ and 0\.\d+\nuncertainty: \d", printed)
    options = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert all(part in options for part in ("--port", "--host", "--device", "'bayestrain[serve]'"))
