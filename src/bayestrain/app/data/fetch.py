"""The data sets of catalog.toml: finding their files on this machine, and downloading missing ones into the cache.

Downloads go to a temporary folder, are checked there, and only then enter the cache, so a killed process leaves no bad
file in it.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayestrain.errors import DataError
from bayestrain.files import write_atomically

LARGEST = 64 * 2**20
"""Bytes of a file inside an archive; the largest one of all data sets has 47 MB."""
SILENCE_SECONDS = 15

Source = Mapping[str, str]
"""``{"mirror": url}``, a folder with a .gz of every file, or ``{"archive": url, "sha256": ..}``, one tar file."""

log = logging.getLogger(__name__)


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
            raise DataError(f"{path} is damaged: {error}") from error
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.sha256:
            raise DataError(f"{path} is not the published file: its sha256 must be {self.sha256}, not {sha256}")
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
    sources: tuple[dict[str, str], ...] = ()
    embedded: str = ""


def _read(name: str, entry: dict[str, Any]) -> Spec:
    files = tuple(File(**file) for file in entry.pop("files"))
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
    return Spec(name=name, files=files, **fields)


CATALOG = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
SPECS = {name: _read(name, entry) for name, entry in CATALOG.items()}
"""All data sets by name."""


def cache_folder() -> Path:
    """The folder of fetched data sets: `BAYESTRAIN_DATA`, or "bayestrain" in the user's cache folder."""
    if chosen := os.environ.get("BAYESTRAIN_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayestrain"


def find_spec(name: str) -> Spec:
    """The data set called `name`."""
    if name not in SPECS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(SPECS)}")
    return SPECS[name]


def home(spec: Spec) -> Path:
    """Where the files of a data set are unless the user names a folder: in the package, or in the cache."""
    return Path(__file__).parent / spec.embedded if spec.embedded else cache_folder() / spec.name


def get(name: str) -> Path:
    """Make sure that the data set `name` is on this machine with the right checksums, and return its folder."""
    spec = find_spec(name)
    place = home(spec)
    try:
        fetch(spec.files, place, spec.sources)
    except DataError as error:
        files = "\n".join(f"  {file.name} ({file.size} bytes, sha256 {file.sha256})" for file in spec.files)
        raise DataError(
            f"{spec.title}: not on this machine.\n{error}\nDownload these files, raw or as .gz, from {spec.homepage} "
            f"and put them into {place}:\n{files}"
        ) from error
    return place


def fetch(files: Sequence[File], folder: Path, sources: Sequence[Source]) -> None:
    """Make `folder` hold all of `files` intact: missing ones come from the first source that has them all."""
    missing = []
    for file in files:
        try:
            file.read(folder)
        except DataError as error:
            missing.append(file)
            log.debug("%s", error)
    if not missing:
        return
    failures = []
    for source in sources:
        kind, place = next(iter(source.items()))
        log.info("fetching %d files from %s %s", len(missing), kind, place)
        with tempfile.TemporaryDirectory() as temporary:
            try:
                _deliver(source, [file.name for file in missing], Path(temporary))
                contents = {file.name: file.read(Path(temporary)) for file in missing}
            except (DataError, OSError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
                failures.append(f"  {kind} {place}: {error}")
                continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                write_atomically(folder / name, content)
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written: {error.strerror}. Set the environment variable BAYESTRAIN_DATA to a "
                "writable folder with enough room"
            ) from error
        return
    tried = "\n".join(failures) or "  (there are none)"
    raise DataError(f"{folder} lacks {', '.join(file.name for file in missing)}. Sources tried:\n{tried}")


def _deliver(source: Source, names: Sequence[str], into: Path) -> None:
    """Put each of `names` into the folder `into`, raw or as .gz; pooch compares the checksum of an archive first."""
    import pooch

    def download(url: str, sha256: str | None) -> str:
        client = pooch.HTTPDownloader(timeout=SILENCE_SECONDS)
        return str(pooch.retrieve(url, sha256, fname=url.rpartition("/")[2], path=into, downloader=client))

    pooch.get_logger().setLevel(logging.WARNING)
    if "mirror" in source:
        for name in names:
            download(f"{source['mirror']}{name}.gz", None)
        return
    wanted = {*names, *(f"{name}.gz" for name in names)}
    with tarfile.open(download(source["archive"], source["sha256"])) as tar:
        for member in tar:
            name = Path(member.name).name
            if name in wanted and member.isreg() and (stream := tar.extractfile(member)) is not None:
                if member.size > LARGEST:
                    raise DataError(f"{name} is larger than the published file can be")
                (into / name).write_bytes(stream.read())
