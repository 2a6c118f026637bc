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
    """What someone may want to know about a result later."""
    commit, dirty = source_version()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "bayestrain": bayestrain.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "platform": platform.platform(), "cpu": _cpu_name(), "threads": torch.get_num_threads(), "gpu": gpu,
        "device": gpu or device.type, "commit": commit, "dirty": dirty,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def record_environment(folder: RunFolder, device: torch.device, command: str, *, resume: bool) -> dict[str, Any]:
    """Write ``environment.json``; a run that is resumed keeps what its `earlier` parts ran on."""
    now: dict[str, Any] = {**describe_environment(device), "command": command, "earlier": []}
    if resume and (folder.path / "environment.json").exists():
        before = read_json(folder.path / "environment.json", "earlier", "command")
        now |= {"command": before["command"], "earlier": [*before.pop("earlier"), before]}
    folder.write("environment.json", now)
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
    """As Linux calls it; elsewhere the architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
