"""The parts of a data set: training and test examples, and the clients that it has of its own."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedcover.data.examples import Examples
from fedcover.data.population import Population


@dataclass(frozen=True)
class Split:
    """The training and test examples of a data set; unpacks as ``train, test``.

    Args:
        train: The training examples.
        test: The test examples.
        clients: The natural clients of the training examples, such as writers; None if the data set has none.
        test_clients: The natural clients of the test examples. They are the same as ``clients``, or other ones that
            take no part in training, as the writers of ``mnist_writers``.

    >>> from fedcover.data import load
    >>> train, test = load("digits")
    >>> len(train), len(test)
    (1437, 360)
    >>> len(load("digits")[1])
    360
    """

    train: Examples
    test: Examples
    clients: Population | None = None
    test_clients: Population | None = None

    def __iter__(self) -> Iterator[Examples]:
        return iter((self.train, self.test))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Examples:
        return (self.train, self.test)[number]

    @property
    def provenance(self) -> str:
        """Sentence on the origin of the files and their verification."""
        return self.train.provenance
