"""What a run ran on: versions, hardware, commit."""

import platform
import re
import resource
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import bayestrain
from bayestrain.train.folder import RunFolder, read_json


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What someone may want to know about a result later; commit and dirty are None outside of a checkout."""
    here, cpuinfo = Path(bayestrain.__file__).parent, Path("/proc/cpuinfo")
    commit = dirty = None
    if (here.parents[1] / ".git").exists():  # not of a repository that contains an installed copy
        git = ["git", "--no-optional-locks", "-C", str(here)]  # a killed run leaves no lock behind
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        with suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run([*git, "rev-parse", "HEAD"], **options).stdout.strip()
            dirty = bool(subprocess.run([*git, "status", "--porcelain", "--", str(here)], **options).stdout)
    cpu = re.search(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.is_file() else "")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "bayestrain": bayestrain.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "platform": platform.platform(), "cpu": cpu[1] if cpu else platform.machine(),
        "threads": torch.get_num_threads(), "gpu": gpu, "device": gpu or device.type, "commit": commit, "dirty": dirty,
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


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: on a GPU by tensors, otherwise by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
