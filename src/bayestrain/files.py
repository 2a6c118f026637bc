"""Writing files whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write the whole file or nothing: to a neighbour first, then moved into place."""
    data = content.encode() if isinstance(content, str) else content
    neighbour = path.with_name(f".{path.name}.partial")
    with neighbour.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    neighbour.replace(path)


def write_json(path: Path, content: object) -> None:
    """Indented JSON, written atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
