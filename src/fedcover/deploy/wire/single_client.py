"""The population as one client sees it: itself alone, under its own number."""

import torch
from torch import Tensor

from fedcover.data import Population, as_examples
from fedcover.errors import InputError


class Own(Population):
    """One client's own examples, in their order; to ask for another client is an error."""

    def __init__(self, client: int, data: object, name: int | None = None) -> None:
        examples = as_examples(data)
        super().__init__(examples, [torch.arange(len(examples))])
        self.client, self.name = client, client if name is None else name

    def indices(self, client: int) -> Tensor:
        """All of the examples."""
        self._check(client)
        return super().indices(0)

    def size(self, client: int) -> int:
        """How many there are."""
        self._check(client)
        return super().size(0)

    def number_of(self, client: int) -> int:
        """The number by which it is known."""
        self._check(client)
        return self.name

    def _check(self, client: int) -> None:
        if client != self.client:
            raise InputError(f"here are the examples of client {self.client} alone; got {client}; ask that client")


def only(client: int, data: object, name: int | None = None) -> Own:
    """The population of one client, which has all the examples given; people may know it by another number.

    >>> alone = only(7, (torch.zeros(3, 2), [0, 1, 1]))
    >>> alone.size(7), alone.indices(7).tolist(), alone.classes_of(7)
    (3, [0, 1, 2], (0, 1))
    """
    return Own(client, data, name)
