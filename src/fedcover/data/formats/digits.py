"""The 8 x 8 digits that ship with fedcover, so that a first run needs no network.

The 1,797 examples are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0.
The file ``digits.csv.gz`` is the copy that scikit-learn distributes: 64 pixels in 0..16, then the label.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcover.errors import InputError

FOLDER = Path(__file__).parent
FILE = "digits.csv"
CREDIT = "shipped with fedcover: UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak; CC BY 4.0)"


def parse_digits(raw: bytes, where: str) -> tuple[NDArray[np.uint8], ...]:
    """Return training images, training labels, test images and test labels; the split is fixed.

    In the order of the labels every fifth example is a test example: 1,437 for training and 360 for
    testing, with equal proportions of digits. Both parts keep the order of the file.

    >>> from fedcover.data.copies import read_bytes
    >>> train, _, test, _ = parse_digits(read_bytes(FOLDER / (FILE + ".gz")), FILE)
    >>> train.shape, test.shape
    ((1437, 1, 8, 8), (360, 1, 8, 8))
    """
    try:
        rows = np.loadtxt(raw.decode("ascii").splitlines(), delimiter=",", dtype=np.uint8, ndmin=2)
    except ValueError as error:
        raise InputError(f"{where} is not the file of this release ({error}); install fedcover again") from error
    images, labels = rows[:, :64].reshape(-1, 1, 8, 8), rows[:, 64]
    test = np.zeros(len(labels), dtype=bool)
    test[np.argsort(labels, kind="stable")[::5]] = True
    return images[~test], labels[~test], images[test], labels[test]
