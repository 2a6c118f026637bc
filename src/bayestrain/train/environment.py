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
from bayestrain.errors import ConfigError
from bayestrain.files import write_json
from bayestrain.train.checkpoint import epochs_kept
from bayestrain.train.records import read_record


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Everything that may be asked of a result later."""
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


def note_environment(out: Path, device: torch.device, command: str) -> dict[str, Any]:
    """Write what the run in `out` runs on now, and of a resumed run what each `earlier` part ran on, up to which epoch.

    `started` and `command` stay those of the beginning. A part of which no checkpoint is left is none.
    """
    now = {**describe_environment(device), "command": command}
    file = out / "environment.json"
    if file.exists():
        advice = " Remove it, then go on with --resume."
        before = read_record(file, ("started", "command"), advice)
        earlier, reached = before.get("earlier", []), epochs_kept(out)
        try:
            earlier = [part for part in earlier if 0 < part["epochs"] <= reached]  # of the others nothing is left
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{file} is damaged: earlier is no list of parts.{advice}") from error
        part = {key: value for key, value in before.items() if key in now and key != "command"}
        part |= {"started": before.get("resumed", before["started"]), "epochs": reached}
        if reached > (earlier[-1]["epochs"] if earlier else 0):
            earlier = [*earlier, part]
        begun = {key: before[key] for key in ("started", "command")}
        now = {**now, **begun, "resumed": now["started"], "earlier": earlier}
    write_json(file, now)
    return now


def source_version() -> tuple[str | None, bool | None]:
    """The commit this package's source is at and whether it differs from it; None outside of a checkout."""
    here = Path(bayestrain.__file__).parent
    try:
        # Only a checkout of this project counts, not some repository that an installed copy happens to lie in.
        top = _git(here, "rev-parse", "--show-toplevel")
        if here != Path(top) / "src" / "bayestrain":
            return None, None
        changes = _git(here, "status", "--porcelain", "--", str(here))
        return _git(here, "rev-parse", "HEAD"), bool(changes)
    except (OSError, subprocess.SubprocessError):
        return None, None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: on the GPU by tensors, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # a killed run leaves no lock in a checkout
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return result.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
