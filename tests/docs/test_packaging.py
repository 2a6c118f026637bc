"""The wheel has everything the README needs, every dependency is pinned, and importing the package is light."""

import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import python

import bayestrain as bt
from bayestrain.files import checksum
from tools import lock

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Names and versions of a requirements file."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)}


def test_the_lock_has_the_hashes_of_all_pins_but_torch() -> None:
    text = lock.LOCK.read_text()
    assert pins(text) == {normal(name): version.split()[0] for name, version in lock.pins().items()}, "run `make lock`"
    assert {*pins((ROOT / "constraints.txt").read_text())} - {*pins(text)} == {"torch"}
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    versions = pins((ROOT / "constraints.txt").read_text())
    names = {normal(re.split(r"[\[<>=~;]", one)[0].strip()) for one in wanted} - {project["name"]}  # its own extras
    assert names <= set(versions)


@pytest.mark.slow
def test_wheel_and_source_are_built_to_the_same_bytes_again(tmp_path: Path) -> None:
    """From two copies, whose files have other times and come in another order."""
    found = []
    for place, when in (("one", 10**9), ("two", 1_500_000_000)):
        copy = tmp_path / place
        files = ["pyproject.toml", "README.md", "LICENSE", *sorted(each.name for each in ROOT.glob("src"))]
        copy.mkdir()
        for name in files if place == "one" else reversed(files):
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
        for path in copy.rglob("*"):
            os.utime(path, (when, when))
        dated = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
        python("-m", "build", "--no-isolation", "--outdir", tmp_path / f"{place}-dist", copy, env=dated)
        found.append({path.name: checksum(path) for path in (tmp_path / f"{place}-dist").iterdir()})
    assert len(found[0]) == 2
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_runs_the_readmes_code(tmp_path: Path) -> None:
    """Built, installed without dependencies, and run away from the checkout; dependencies are this environment's.

    All blocks of code are one script, as a reader would paste them, and warnings are errors.
    """
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("bayestrain-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "src" / "bayestrain").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert path.relative_to(ROOT / "src").as_posix() in files

    python("-m", "venv", "--without-pip", tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    python("-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after ours on the path
    code = "\n".join(BLOCK.findall((ROOT / "README.md").read_text()))
    (tmp_path / "readme.py").write_text(f"{code}\nassert bt.__file__.startswith({str(own)!r}), bt.__file__\n")
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": outside, "capture_output": True, "text": True}
    done = subprocess.run([programs / "python", "-W", "error", "readme.py"], check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    (accuracy,) = re.findall(r"test accuracy (0\.\d+)", done.stdout)
    assert float(accuracy) > 0.9
    assert (tmp_path / "small" / "model.safetensors").stat().st_size < 100_000  # the dense network has 2 MB
    said = subprocess.run([programs / "bayestrain", "--help"], check=True, **options)
    assert "train" in said.stdout


def test_the_public_names_and_that_importing_them_imports_no_torch() -> None:
    assert len(bt.__all__) == 21
    assert bt.__all__ == sorted(bt.__all__)
    for name in bt.__all__:
        assert getattr(bt, name) is getattr(bt, name)
    assert {*bt.__all__, "data", "posterior", "__version__"} <= {*dir(bt)}
    from bayestrain import data  # a shortcut

    assert data.__name__ == "bayestrain.app.data"
    assert bt.posterior.Regression.__name__ == "Regression"
    with pytest.raises(AttributeError, match="nothing"):
        bt.nothing  # noqa: B018
    used = "bayestrain.formats; assert 'torch' in sys.modules"
    python("-c", f"import sys, bayestrain, bayestrain.app.report; assert 'torch' not in sys.modules; {used}")
