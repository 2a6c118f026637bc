"""Finding and fetching files: real folders, a real web server on this machine, a real killed process."""

import gzip
import hashlib
import io
import shutil
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
from bayestrain.errors import DataError
from paper.fetch import File, Splits, cache_folder, cifar, fetch, load

MINI = Path(data.__file__).parent / "mnist_mini"
CONTENTS = {
    name: gzip.decompress((MINI / f"{name}.gz").read_bytes())
    for part in ("train", "t10k")
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
}
FILES = [File(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in CONTENTS.items()]
NAMES = sorted(file.name for file in FILES)
CLOSED = {"mirror": "http://127.0.0.1:9/"}  # the discard port: no server listens


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
        self.wfile.write(content if manner == "good" else content[: len(content) // 2])
        self.wfile.flush()
        if manner == "slow":
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
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_mirror_fills_the_cache_and_only_what_is_missing_or_damaged_is_fetched_again(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = served
    cache = tmp_path / "cache" / "mini"
    fetch(FILES, cache, [CLOSED, {"mirror": f"{url}/good/"}])
    assert names(cache) == NAMES  # raw files, and nothing temporary
    assert [file.read(cache) for file in FILES]
    fetch(FILES, cache, [])
    (cache / FILES[0].name).unlink()
    with (cache / FILES[1].name).open("r+b") as file:
        file.write(b"x")
    for file in FILES[2:]:
        (folder / f"{file.name}.gz").unlink()  # the mirror no longer has what is not asked for
    fetch(FILES, cache, [{"mirror": f"{url}/good/"}])
    assert [file.read(cache) for file in FILES]


def test_bad_mirrors_are_passed_over_and_named(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    (folder / f"{FILES[1].name}.gz").write_bytes(gzip.compress(bytes(FILES[1].size)))
    none = {"archive": f"{url}/good/none.tar.gz", "sha256": "0" * 64}
    with pytest.raises(DataError) as caught:
        fetch(FILES, tmp_path / "cache", [CLOSED, {"mirror": f"{url}/short/"}, {"mirror": f"{url}/good/"}, none])
    message = str(caught.value)
    for words in (f"lacks {FILES[0].name}, {FILES[1].name}", "mirror http://127.0.0.1:9/", "refused", f"{url}/short/",
                  f"its sha256 must be {FILES[1].sha256}", "404"):  # fmt: skip
        assert words in message
    assert names(tmp_path / "cache") == []


def test_a_killed_download_leaves_no_bad_file(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import sys, tempfile; from pathlib import Path; from paper.fetch import File, fetch; "
        f"tempfile.tempdir = sys.argv[3]; fetch({FILES}, Path(sys.argv[1]), [{{'mirror': sys.argv[2]}}])"
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", code, cache, f"{url}/slow/", scratch], cwd=root)
    try:
        deadline = time.monotonic() + 60
        while not any(path.is_file() and path.stat().st_size for path in scratch.rglob("*")):
            assert time.monotonic() < deadline, "the download never began"
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert names(cache) == []
    fetch(FILES, cache, [{"mirror": f"{url}/good/"}])
    assert names(cache) == NAMES


def packed(served: tuple[str, Path], name: str, *members: tuple[str, bytes], link: str = "") -> dict[str, str]:
    """Let the server have a tar archive, whose members may be links, and return it as a source."""
    with tarfile.open(served[1] / name, "w:gz") as tar:
        for member_name, content in members:
            member = tarfile.TarInfo(member_name)
            member.size, member.linkname = len(content), link
            member.type = tarfile.SYMTYPE if link else tarfile.REGTYPE
            tar.addfile(member, io.BytesIO(content))
    return described(served, name)


def described(served: tuple[str, Path], name: str) -> dict[str, str]:
    sha256 = hashlib.sha256((served[1] / name).read_bytes()).hexdigest()
    return {"archive": f"{served[0]}/good/{name}", "sha256": sha256}


def test_an_archive_is_unpacked_only_with_the_right_checksum(
    served: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [(f"somewhere/deep/{path.name}", path.read_bytes()) for path in MINI.iterdir()]
    source = packed(served, "mini.tar.gz", *members)
    fetch(FILES, tmp_path / "cache", [source])
    assert names(tmp_path / "cache") == NAMES
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("unpacked"))
    with pytest.raises(DataError, match=r"mini\.tar\.gz: SHA256 hash of downloaded file"):
        fetch(FILES, tmp_path / "other", [source | {"sha256": "0" * 64}])


def test_an_archive_gives_its_files_and_nothing_else(served: tuple[str, Path], tmp_path: Path) -> None:
    first, before = FILES[0].name, names(tmp_path)
    content = (MINI / f"{first}.gz").read_bytes()
    source = packed(served, "a.tar.gz", ("/etc/evil", b"x"), (f"../../{first}.gz", content), ("other", b"y"))
    fetch(FILES[:1], tmp_path / "a" / "b", [source])
    assert names(tmp_path / "a" / "b") == [first]
    assert names(tmp_path) == ["a", *before]
    link = packed(served, "link.tar.gz", (first, b""), link="/etc/passwd")
    with pytest.raises(DataError, match=f"has no {first}"):
        fetch(FILES[:1], tmp_path / "cache", [link])
    (served[1] / "cut.tar.gz").write_bytes((served[1] / "a.tar.gz").read_bytes()[:500_000])
    with pytest.raises(DataError, match=r"cut\.tar\.gz: "):
        fetch(FILES, tmp_path / "c", [described(served, "cut.tar.gz")])


def test_what_a_small_file_unpacks_to_is_limited(served: tuple[str, Path], tmp_path: Path) -> None:
    """3.1 MB unpacked to 3.2 GB before; here 0.2 MB would become 200 MB."""
    bomb = packed(served, "bomb.tar.gz", (FILES[0].name, bytes(200_000_000)))
    assert (served[1] / "bomb.tar.gz").stat().st_size < 400_000
    (tmp_path / f"{FILES[0].name}.gz").write_bytes(gzip.compress(bytes(100_000_000)))
    tracemalloc.start()
    with pytest.raises(DataError, match=f"{FILES[0].name} is larger than the published file"):
        fetch(FILES[:1], tmp_path / "cache", [bomb])
    with pytest.raises(DataError, match="is not the published file"):
        FILES[0].read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


def test_other_content_is_refused(tmp_path: Path) -> None:
    file = FILES[3]
    content, packed = file.read(MINI), (MINI / f"{file.name}.gz").read_bytes()
    raw, short = tmp_path / file.name, tmp_path / f"{file.name}.gz"
    for wrong in (content[:-1], content + b"!", content[:-1] + b"!"):
        raw.write_bytes(wrong)
        with pytest.raises(DataError, match="is not the published file: its sha256 must be b547e4"):
            file.read(tmp_path)
    raw.unlink()
    for damaged in (packed[:-400], b"no gzip"):
        short.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged: "):
            file.read(tmp_path)


def test_without_any_source_the_error_lists_files_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(DataError) as caught:
        load("cifar10")
    place = tmp_path / "cache" / "cifar10"
    for words in ("colour photographs: not on this machine", f"put them into {place}:",
                  "test_batch.bin (30730000 bytes, sha256 8e2eb146"):  # fmt: skip
        assert words in str(caught.value)


def test_unknown_names_and_a_cache_that_cannot_be_written(served: tuple[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'mnits': choose one of mnist, fashion-mnist, cifar10"):
        load("mnits")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written: .* Set the environment variable BAYESTRAIN_DATA"):
        fetch(FILES, tmp_path / "file" / "cache", [{"mirror": f"{served[0]}/good/"}])


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("BAYESTRAIN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "bayestrain"


def test_a_cifar_record_is_a_label_and_three_planes() -> None:
    record = bytes([7]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes(range(32)) * 32
    found, labels = cifar(record * 10_000)
    assert (found.shape, labels.dtype, labels.unique().tolist()) == ((10_000, 3, 32, 32), torch.int64, [7])
    assert found[9_999, 0].unique().tolist() == [10]
    assert found[0, 1].unique().tolist() == [20]
    assert found[5_000, 2, 13].tolist() == list(range(32))


def test_channels_are_normalised_each_by_its_own_numbers_in_the_images_precision() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.5, 3.0)
    digits = data.load("mnist-mini")
    splits = Splits("digits", digits.train, digits.test, digits.classes, mean, std)
    batch = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([(batch[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
        found = splits.normalize(batch.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        assert torch.equal(splits.normalize(batch[0].to(dtype)), found[0])
