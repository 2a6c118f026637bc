"""Writing files whole or not at all, and reading them with care."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from bayestrain.errors import DataError, WriteError

CHECKSUMS = "checksums.json"  # the SHA-256 of all other files of a finished run


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write the whole file or nothing: to a file of an unpredictable name, moved into place. No link is followed."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")
    try:
        file = temporary.open("xb")  # refuses a name that is taken
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:  # which names the temporary file, or none
        raise WriteError(error.errno, error.strerror, str(path)) from error
    with contextlib.suppress(OSError):  # where a folder can be opened, the new name lasts through a power cut
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into one that names what cannot be written."""
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror, str(error.filename2 or error.filename or path)) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread writes into a folder through this function."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network drives have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: Path) -> None:
    """Raise `DataError` if a file of a finished run has changed; a folder without `CHECKSUMS` is not checked."""
    own = folder / CHECKSUMS
    with reading(own):
        known = dict(json.loads(own.read_text(encoding="utf-8"))) if own.exists() else {}
    for file in folder.iterdir() if known else ():
        with reading(file, f"Restore it. To use the run as it is now, delete {own}; to change its config, copy that."):
            if file.name in known and file.is_file() and checksum(file) != known[file.name]:
                raise ValueError("its checksum does not match")


@contextlib.contextmanager
def reading(path: Path, advice: str = "Restore it, or delete it to leave out what it holds.") -> Iterator[None]:
    """Turn whatever goes wrong with the content of `path` into an error that names it."""
    try:
        yield  # deep JSON raises RecursionError, a RuntimeError, and a huge integer OverflowError
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError
    ) as error:  # fmt: skip
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged or does not belong here: {reason}. {advice}") from error


def write_json(path: Path, content: object) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")
