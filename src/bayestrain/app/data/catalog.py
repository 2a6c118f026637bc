"""The data sets BayesTrain knows, read from catalog.toml, and the check of their files."""

from __future__ import annotations

import gzip
import hashlib
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayestrain.errors import DataError


@dataclass(frozen=True)
class File:
    """A published file; `size` and `sha256` are those of the uncompressed content.

    On disk the file is raw, under `name`, or compressed, under `name`.gz. Only the content is compared, so a
    recompressed copy is as good as the published one.
    """

    name: str
    size: int
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """The path of the raw or else of the compressed file in `folder`, without reading it."""
        return next((path for path in (folder / self.name, folder / f"{self.name}.gz") if path.is_file()), None)

    def read(self, folder: Path) -> bytes:
        """The uncompressed content of the file in `folder`; a `DataError` if it is missing or another one."""
        path = self.find(folder)
        if path is None:
            raise DataError(f"{folder} has no {self.name}")
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                content = stream.read(self.size + 1)  # one more byte reveals a longer file, whatever it unpacks to
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}. Remove it, and fetch it again") from error
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            fault = f"truncated to {len(content)} bytes" if len(content) < self.size else "not the published file"
            raise DataError(
                f"{path} is {fault}: its content must have {self.size} bytes and the sha256 {self.sha256}, not "
                f"{sha256}. Remove it, and fetch it again"
            )
        return content


@dataclass(frozen=True)
class Spec:
    """What is fixed about a data set; catalog.toml says what the fields mean."""

    name: str
    title: str
    files: tuple[File, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    citation: str
    homepage: str
    sources: tuple[dict[str, Any], ...] = ()
    subfolders: tuple[str, ...] = ()
    embedded: str = ""


def _read() -> dict[str, Spec]:
    specs = {}
    for name, entry in tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")).items():
        files = tuple(File(**file) for file in entry.pop("files"))
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
        specs[name] = Spec(name=name, files=files, **fields)
    return specs


SPECS = _read()
"""All data sets by name."""
