"""Run all tests under coverage.py and record the parts of lines and branches they reach: ``make coverage``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trust"))
CORE = ("formats", "infer", "nn", "prior", "compact", "compress", "posterior", "io", "train", "files.py", "errors.py")


def main() -> None:
    """Arguments are pytest's, such as ``tests/formats``."""
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "COVERAGE_FILE": f"{place}/data", "COVERAGE_CORE": "ctrace"}
        tests = [sys.executable, "-m", "coverage", "run", "--branch", "--source=bayestrain", "-m", "pytest", "-q"]
        subprocess.run([*tests, *sys.argv[1:]], cwd=ROOT, env=environment, check=True)
        report = [sys.executable, "-m", "coverage", "json", "-q", "-o", f"{place}/found.json"]
        subprocess.run(report, cwd=ROOT, env=environment, check=True)
        found = json.loads(Path(f"{place}/found.json").read_text())
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, about in found["files"].items():
        room, own = path.partition("bayestrain/")[2].split("/")[0], about["summary"]
        keys = ("covered_lines", "num_statements", "covered_branches", "num_branches")
        for place in (room, *(["core"] if room in CORE else [])):
            sums[place] = [a + own[key] for a, key in zip(sums[place], keys, strict=True)]
    from trust_kit import record

    rooms = {room: {"lines": a / max(b, 1), "branches": c / max(d, 1)} for room, (a, b, c, d) in sorted(sums.items())}
    record("coverage", {"rooms": rooms})
    print(json.dumps(rooms["core"]))


if __name__ == "__main__":
    main()
