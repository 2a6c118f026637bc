"""The data sets BayesTrain knows, read from catalog.toml: their files, checksums, sources, licences and citations."""

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

    On disk the file is raw, under `name`, or compressed, under `name`.gz. Only the content is compared, so that a
    recompressed copy is as good as the published one.
    """

    name: str
    size: int
    sha256: str

    def find(self, folder: Path) -> Path | None:
        """The path of the raw or else of the compressed file in `folder`, without reading it."""
        return next((path for path in (folder / self.name, folder / f"{self.name}.gz") if path.is_file()), None)

    def read(self, path: Path) -> bytes:
        """The uncompressed content of `path`, or a `DataError` if that is not the published file."""
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                content = stream.read(self.size + 1)  # one more byte reveals a longer file
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged or truncated: {error}. Download it again") from error
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            fault = f"truncated to {len(content)} bytes" if len(content) < self.size else "not the published file"
            raise DataError(
                f"{path} is {fault}: the content of {self.name} must have {self.size} bytes and the sha256 "
                f"{self.sha256}, not {sha256}. Download it again"
            )
        return content


@dataclass(frozen=True)
class Spec:
    """Everything fixed about a data set; catalog.toml says what the fields mean."""

    name: str
    title: str
    format: str
    files: tuple[File, ...]
    train_size: int
    test_size: int
    shape: tuple[int, ...]
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
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        specs[name] = Spec(name=name, files=files, **fields)
    return specs


SPECS = _read()


def find_spec(name: str) -> Spec:
    """The data set called `name`."""
    if name not in SPECS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
