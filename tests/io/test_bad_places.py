"""Bad places and bad files: a clear error, nothing overwritten or half-written, nothing executed."""

import json
import os
import resource
import secrets
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from edits import edit
from processes import python
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bayestrain as bt
from bayestrain.errors import BayesTrainError, ConfigError, DataError, WriteError
from bayestrain.files import write_atomically

X = torch.randn(4, 30)


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(30, 600), nn.ReLU(), nn.Linear(600, 4))
    bt.tensorize_(net, bt.TensorizeConfig(max_rank=8))
    return net


def saved(folder: Path) -> None:
    bt.save(network(), folder)


def exported(folder: Path) -> None:
    bt.export(network(), folder / "model.pt2", "pt2", example=X)


WRITERS: tuple[Callable[[Path], None], ...] = (saved, exported)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_keeps_what_was_there(write: Any, tmp_path: Path) -> None:
    """A limit on the size of files, which the kernel enforces as it does the end of a disk."""
    write(tmp_path)
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(WriteError, match=r"cannot be written: File too large\. Make room"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, was)
    assert contents(tmp_path) == before


def as_nobody(folder: Path, write: Callable[[Path], None]) -> str:
    """The error of a process that may not write into a folder; root may write anywhere, so it changes its user."""
    read, end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            write(folder)
            os.write(end, b"written")
        except BayesTrainError as error:
            os.write(end, str(error).encode())
        finally:
            os._exit(0)
    os.close(end)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read only", "closed"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_that_must_not_be_written_to(write: Any, mode: int) -> None:
    with TemporaryDirectory() as outer:  # pytest's own is closed to others
        Path(outer).chmod(0o755)
        folder = Path(outer, "folder")
        folder.mkdir()
        write(folder)
        before = contents(folder)
        folder.chmod(mode)
        said = as_nobody(folder, write)
        folder.chmod(0o755)
        assert "written: Permission denied" in said or "not writable" in said
        assert str(folder) in said
        assert contents(folder) == before


def test_what_is_in_the_way_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match="Not a directory"):
        bt.save(network(), tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match=r"saved into a folder, but .*file is a file\. Choose another name"):
        bt.save(network(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors", {"format": "pt"})  # as transformers does
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not of a model that save wrote"):
        bt.save(network(), tmp_path)
    assert contents(tmp_path) == before
    for text in ("mine", "[]", '{"kind": "mine"}'):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "model.json").write_text(text)
        with pytest.raises(ConfigError, match=r"model\.json is not of a model"):
            bt.save(network(), tmp_path / "other")
        assert contents(tmp_path / "other") == {"model.json": text.encode()}


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "README.md"])
@pytest.mark.parametrize("old", [False, True])
def test_a_folder_in_the_way_of_a_file_leaves_the_old_model(name: str, old: bool, tmp_path: Path) -> None:
    if old:
        bt.save(network(), tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is not of a model"):
        bt.save(network(), tmp_path)
    assert contents(tmp_path) == before


def test_an_interrupted_save_can_be_repeated_and_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    bt.save(network(), tmp_path)
    (tmp_path / "model.json").unlink()  # which is written last
    with pytest.raises(DataError, match=r"model\.json is missing"):
        bt.load(tmp_path)
    bt.save(network(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["bayestrain"] == "2"
    assert bt.load(tmp_path)(X).shape == (4, 4)
    bt.save(network(), tmp_path)
    for name in ("model.safetensors", "model.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)  # reading it would never end
        for into in (None, network()):
            with pytest.raises(DataError, match=name):
                bt.load(tmp_path, into)
        with pytest.raises(ConfigError, match=f"{name} is not of a model"):
            bt.save(network(), tmp_path)


@pytest.mark.parametrize("dangling", [False, True])
def test_planted_symlinks_are_never_followed(dangling: bool, tmp_path: Path) -> None:
    names, model = ("model.safetensors", "model.json", "README.md", "model.pt2"), network()
    bt.save(model, tmp_path / "out")
    for name in names:
        victim, link = tmp_path / f"victim-{name}", tmp_path / "out" / name
        if not dangling:
            victim.write_bytes(link.read_bytes() if link.exists() else b"mine")
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
    before = {name: own for name, own in contents(tmp_path).items() if name.startswith("victim")}
    bt.save(network(), tmp_path / "out")
    bt.export(model, tmp_path / "out" / "model.pt2", "pt2", example=X)
    assert not any((tmp_path / "out" / name).is_symlink() for name in names)
    assert {name: own for name, own in contents(tmp_path).items() if name.startswith("victim")} == before
    assert bt.load(tmp_path / "out")(X).shape == (4, 4)


def header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])
    change(about)
    text = json.dumps(about).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


CORE = "0.factorized.cores.0"
LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "shape": lambda about: about[CORE].update(shape=[10**13, 8]),
    "overflow": lambda about: about[CORE].update(shape=[2**63, 2**63]),
    "negative": lambda about: about[CORE].update(shape=[-1, 8]),
    "offsets": lambda about: about[CORE].update(data_offsets=[0, 10**15]),
    "overlap": lambda about: about["0.bias"].update(data_offsets=about[CORE]["data_offsets"]),
    "type": lambda about: about[CORE].update(dtype="F64"),
    "name": lambda about: about.update({"0.factorized.cores.9": about.pop(CORE)}),
}


@pytest.mark.parametrize("into", [None, network])
@pytest.mark.parametrize("lie", LIES)
def test_lying_headers_are_refused_before_memory_is_taken(lie: str, into: Any, tmp_path: Path) -> None:
    bt.save(network(), tmp_path)
    header(tmp_path / "model.safetensors", LIES[lie])
    edit(tmp_path / "model.json", drop="sha256")  # the checksum alone would show it
    fresh = into and into()
    before = fresh and [own.clone() for own in fresh.parameters()]
    with pytest.raises(DataError):
        bt.load(tmp_path, fresh)
    assert not fresh or all(map(torch.equal, fresh.parameters(), before))


HOSTILE = """
import sys
import torch, bayestrain as bt
bt.load(sys.argv[1])  # imports what loading needs
def refuse(event, args):
    if event in ("os.system", "subprocess.Popen", "exec", "compile", "pickle.find_class", "os.exec", "import"):
        raise SystemExit(f"{event}: {args}")
sys.addaudithook(refuse)
for folder in sys.argv[2:]:
    try:
        bt.load(folder)
    except bt.errors.BayesTrainError:
        print("refused")
"""


def test_nothing_is_executed(tmp_path: Path) -> None:
    """An audit hook of Python's ends the process at any import, compiled code, unpickled class or started process."""
    for name in ("good", "pickle", "class", "format"):
        bt.save(network(), tmp_path / name)
    torch.save({"weight": network()}, tmp_path / "pickle" / "model.safetensors")
    own = {"class": "subprocess.Popen", "settings": {"args": "touch pwned"}}
    edit(tmp_path / "class" / "model.json", "network children 0", **own)
    edit(tmp_path / "format" / "model.json", "weights 0.factorized", format="os.system")
    folders = [tmp_path / name for name in ("good", "pickle", "class", "format")]
    assert python("-c", HOSTILE, *folders, cwd=tmp_path).stdout == "refused\n" * 3
    assert not (tmp_path / "pwned").exists()


def test_even_a_guessed_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".result.json.guessed.partial").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        write_atomically(tmp_path / "result.json", "new")
    assert victim.read_text() == "mine"


def test_what_fails_leaves_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"result\.json cannot be written: No space left on device\. Make room"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_file_and_folder_are_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_atomically(tmp_path / "result.json", "new")
    assert kinds == [False, True]


def test_the_usual_permissions_are_given(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
