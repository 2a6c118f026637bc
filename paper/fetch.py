"""The data sets of catalog.toml: finding their files on this machine, and downloading missing ones into the cache.

python -m paper.fetch mnist cifar10
"""

import gzip
import hashlib
import logging
import os
import sys
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayestrain.app.data import Images
from bayestrain.app.data.images import idx
from bayestrain.errors import DataError
from bayestrain.files import write_atomically

Source = Mapping[str, str]
"""``{"mirror": url}``, a folder with a .gz of every file, or ``{"archive": url, "sha256": ..}``, one tar file."""


@dataclass(frozen=True)
class File:
    """A published file, on disk raw as `name`, or as `name`.gz; `size` and `sha256` are those of the raw content."""

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
    files: list[File]
    classes: list[str]
    mean: list[float]
    std: list[float]
    licence: str
    citation: str
    homepage: str
    sources: Sequence[Source]

    @property
    def home(self) -> Path:
        """Where the files are in the cache."""
        return cache_folder() / self.name


SPECS = {
    name: Spec(name, **entry | {"files": [File(**file) for file in entry["files"]]})
    for name, entry in tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")).items()
}
"""All data sets by name."""


def cache_folder() -> Path:
    """The folder of fetched data sets: `BAYESTRAIN_DATA`, or "bayestrain" in the user's cache folder."""
    if chosen := os.environ.get("BAYESTRAIN_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayestrain"


def get(name: str) -> Path:
    """Make sure that the data set `name` is on this machine with the right checksums, and return its folder."""
    contents(name)
    return SPECS[name].home


@dataclass(frozen=True)
class Splits:
    """A data set, with the mean and deviation of its training pixels in [0, 1], per channel."""

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalize(self, images: Tensor) -> Tensor:
        """(images - mean) / std per channel, for a float batch (N, C, H, W) or one image (C, H, W)."""
        mean, std = (images.new_tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return (images - mean) / std


def load(name: str) -> Splits:
    """Load "mnist", "fashion-mnist" or "cifar10", which is fetched at first use."""
    files, spec = contents(name), SPECS[name]
    if name == "cifar10":
        train, test = Images(*cifar(b"".join(files[:-1]))), Images(*cifar(files[-1]))
    else:
        x, y, x_test, y_test = (idx(content) for content in files)
        train, test = Images(x[:, None], y.long()), Images(x_test[:, None], y_test.long())
    return Splits(name, train, test, tuple(spec.classes), tuple(spec.mean), tuple(spec.std))


def cifar(content: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of CIFAR-10 files: records of a label byte and the three planes of a 32x32 image."""
    if not content or len(content) % 3073:
        raise DataError(f"CIFAR-10 has records of 3,073 bytes, not {len(content)} bytes in all.")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def contents(name: str) -> list[bytes]:
    """The checked contents of the files of the data set `name`, which is fetched if necessary."""
    if name not in SPECS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(SPECS)}")
    spec = SPECS[name]
    try:
        return fetch(spec.files, spec.home, spec.sources)
    except DataError as error:
        files = "\n".join(f"  {file.name} ({file.size} bytes, sha256 {file.sha256})" for file in spec.files)
        raise DataError(
            f"{spec.title}: not on this machine.\n{error}\nDownload these files, raw or as .gz, from {spec.homepage} "
            f"and put them into {spec.home}:\n{files}"
        ) from error


def fetch(files: Sequence[File], folder: Path, sources: Sequence[Source]) -> list[bytes]:
    """The contents of `files` in `folder`; missing or damaged ones come from the first source that has them all."""
    found: dict[str, bytes] = {}
    for file in files:
        try:
            found[file.name] = file.read(folder)
        except DataError:
            continue
    missing, failures = [file for file in files if file.name not in found], []
    for source in sources if missing else ():
        kind, place = next(iter(source.items()))
        print(f"fetching {len(missing)} files from {kind} {place}", file=sys.stderr)
        try:
            found |= _delivered(source, missing)
            break
        except (DataError, OSError, ValueError, tarfile.TarError, EOFError, zlib.error) as error:
            failures.append(f"  {kind} {place}: {error}")
    if len(found) < len(files):
        tried = "\n".join(failures) or "  (there are none)"
        raise DataError(f"{folder} lacks {', '.join(file.name for file in missing)}. Sources tried:\n{tried}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            write_atomically(folder / file.name, found[file.name])
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror}. Set the environment variable BAYESTRAIN_DATA to a writable "
            "folder with enough room"
        ) from error
    return [found[file.name] for file in files]


def _delivered(source: Source, files: Sequence[File]) -> dict[str, bytes]:
    """The contents of files from a source, checked in a temporary folder, so that the cache never has a bad file.

    pooch compares the checksum of an archive before it is unpacked.
    """
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:

        def download(url: str, sha256: str | None) -> str:
            client = pooch.HTTPDownloader(timeout=15)
            return str(pooch.retrieve(url, sha256, fname=url.rpartition("/")[2], path=temporary, downloader=client))

        if "archive" in source:
            sizes = {name: file.size for file in files for name in (file.name, f"{file.name}.gz")}
            with tarfile.open(download(source["archive"], source["sha256"])) as tar:
                for member in tar:
                    name = Path(member.name).name
                    if name in sizes and member.isreg() and (stream := tar.extractfile(member)) is not None:
                        if member.size > sizes[name]:
                            raise DataError(f"{name} is larger than the published file")
                        (Path(temporary) / name).write_bytes(stream.read())
        else:
            for file in files:
                download(f"{source['mirror']}{file.name}.gz", None)
        return {file.name: file.read(Path(temporary)) for file in files}


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(get(wanted))
