"""Make the data set "mnist-mini" that ships with BayesTrain from the official MNIST files.

    python -m tools.make_mnist_mini [--mnist FOLDER] [--into FOLDER]

Takes the first 1,000 digits of each class from the official training files and the first 200 of each class
from the official test files, keeps them in file order, and writes them as four idx files, gzip level 9
without time or name. There is no randomness: the idx content is the same everywhere, and so are the .gz
bytes wherever Python is built on classic zlib. Prints the checksums.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import struct
from collections import Counter
from pathlib import Path

from bayestrain.app import data
from paper.fetch import SPECS, get

PIXELS = 28 * 28
PER_CLASS = (1_000, 200)  # of the training and of the test files
PACKAGE = Path(data.__file__).parent / "mnist_mini"


def first_of_each_class(labels: bytes, per_class: int) -> list[int]:
    """The positions of the first `per_class` labels of every class, in order."""
    seen: Counter[int] = Counter()
    chosen = []
    for position, label in enumerate(labels):
        if seen[label] < per_class:
            chosen.append(position)
        seen[label] += 1
    return chosen


def make(found: Path, into: Path) -> list[Path]:
    """Write the four files into `into` and return their paths."""
    files = SPECS["mnist"].files
    contents = {file.name: file.read(found) for file in files}
    names = [file.name for file in files]  # training images and labels, test images and labels
    written = []
    for images_name, labels_name, per_class in zip(names[::2], names[1::2], PER_CLASS, strict=True):
        labels = contents[labels_name][8:]  # after an idx header of one dimension
        images = contents[images_name][16:]  # after an idx header of three dimensions
        chosen = first_of_each_class(labels, per_class)
        few_images = b"".join(images[i * PIXELS : (i + 1) * PIXELS] for i in chosen)
        few_labels = bytes(labels[i] for i in chosen)
        for name, content in (
            (images_name, struct.pack(">4I", 0x803, len(chosen), 28, 28) + few_images),
            (labels_name, struct.pack(">2I", 0x801, len(chosen)) + few_labels),
        ):
            path = into / f"{name}.gz"
            with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as compressed:
                compressed.write(content)
            sha256 = hashlib.sha256(content).hexdigest()
            print(f'{{ name = "{name}", size = {len(content)}, sha256 = "{sha256}" }},')
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Make mnist-mini from the official MNIST files.")
    parser.add_argument("--mnist", type=Path, help="folder of the official files (default: fetch them)")
    parser.add_argument("--into", type=Path, default=PACKAGE, help="default: the package")
    arguments = parser.parse_args()
    for path in make(arguments.mnist or get("mnist"), arguments.into):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name} ({path.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
