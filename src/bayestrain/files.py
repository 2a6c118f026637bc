"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of writing to `path` name it, which that of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write the whole file or nothing: to a neighbour first, then moved into place."""
    data = content.encode() if isinstance(content, str) else content
    neighbour = path.with_name(f".{path.name}.partial")
    try:
        with naming(path), neighbour.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        neighbour.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            neighbour.unlink()
        raise


def write_json(path: Path, content: object) -> None:
    """Indented JSON, written atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
