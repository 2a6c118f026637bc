"""One published file: its name, its size and checksum, and how to find and read it on disk."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from bayestrain.errors import DataError


@dataclass(frozen=True)
class File:
    """A file of a data set. `size` and `sha256` are those of the uncompressed content.

    On disk the file may lie raw, under `name`, or compressed, under `name`.gz: the content decides, so a
    recompressed copy is as good as the published one.
    """

    name: str
    size: int
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """The path of the raw or else the compressed file in `folder`, if one is there. Reads nothing."""
        for path in (folder / self.name, folder / f"{self.name}.gz"):
            if path.is_file():
                return path
        return None

    def content(self, path: Path) -> bytes:
        """The uncompressed content of `path`, unchecked."""
        try:
            if path.suffix != ".gz":
                return path.read_bytes()
            with gzip.open(path) as stream:
                return stream.read(self.size + 1)  # one too many shows a longer file; no more is needed
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged or truncated: {error}. Get it anew") from error

    def read(self, path: Path) -> bytes:
        """The uncompressed content of `path`. Raises `DataError` if it is not the published file."""
        content = self.content(path)
        if len(content) < self.size:
            raise DataError(
                f"{path} is truncated: the published {self.name} has {self.size} bytes, this one {len(content)}. "
                "Get it anew"
            )
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            raise DataError(
                f"{path} is not the published {self.name}: the sha256 of its content must be {self.sha256}, "
                f"it is {sha256}. Get it anew"
            )
        return content
