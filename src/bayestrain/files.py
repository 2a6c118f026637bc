"""Writing files whole or not at all."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of writing to `path` name it, which that of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes | str, before: Path | None = None) -> None:
    """Write the whole file or nothing: to a temporary file beside it, then moved into place.

    The temporary name is unpredictable and must not exist yet, so a planted symlink is never followed.
    If `path` itself is a symlink, the link is replaced and its target stays as it is. The file that is replaced is
    kept as `before`, if that is given.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")
    with naming(path):
        file = temporary.open("xb")  # refuses a name that is taken
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if before is not None and path.exists():
                before.unlink(missing_ok=True)
                try:
                    before.hardlink_to(path)  # so that there is a file at `path` at any time
                except OSError:  # the file system has no hard links
                    path.replace(before)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    with contextlib.suppress(OSError):  # where a folder can be opened, the new name lasts through a power cut
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    """Write indented JSON atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")
