"""What a run ran on: versions, hardware, commit."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import bayestrain
from bayestrain.train.folder import RunFolder, read_json


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Everything that someone may ask about a result later."""
    commit, dirty = source_version()
    return {
        "bayestrain": bayestrain.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": commit,
        "dirty": dirty,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def record_environment(folder: RunFolder, device: torch.device, command: str, epochs: int) -> dict[str, Any]:
    """Write ``environment.json``; a run that is resumed after `epochs` epochs keeps what its `earlier` parts ran on.

    `started` and `command` stay those of the first part. A part that left no epoch behind does not count.
    """
    now: dict[str, Any] = {**describe_environment(device), "command": command, "earlier": []}
    file = folder.path / "environment.json"
    if file.exists() and epochs:
        before = read_json(file, "started", "command", "earlier")
        part = {key: value for key, value in before.items() if key not in ("command", "earlier", "resumed")}
        part |= {"started": before.get("resumed", before["started"]), "epochs": epochs}
        earlier = [{**one, "epochs": min(one["epochs"], epochs)} for one in before["earlier"]]
        if not earlier or earlier[-1]["epochs"] < epochs:
            earlier.append(part)
        now |= {"resumed": now["started"], "earlier": earlier, **{key: before[key] for key in ("started", "command")}}
    folder.write_json("environment.json", now)
    return now


def source_version() -> tuple[str | None, bool | None]:
    """The commit of this package's source and whether it was changed since; None outside of a checkout."""
    here = Path(bayestrain.__file__).parent
    try:
        # Only a checkout of this project counts, not some repository that contains an installed copy.
        if here != Path(_git(here, "rev-parse", "--show-toplevel")) / "src" / "bayestrain":
            return None, None
        return _git(here, "rev-parse", "HEAD"), bool(_git(here, "status", "--porcelain", "--", str(here)))
    except (OSError, subprocess.SubprocessError):
        return None, None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: on a GPU by tensors, otherwise by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # a killed run leaves no lock behind
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
