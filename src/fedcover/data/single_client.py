"""The population on a client's own device: this client only, under its position in the federation."""

import torch
from torch import Tensor

from fedcover.data.examples import as_examples
from fedcover.data.population import Population
from fedcover.errors import InputError


class SingleClientPopulation(Population):
    """One client with all of the examples, in their order.

    Args:
        client: The client's position in the federation. Asking for any other client raises InputError.
        data: The client's examples, or what ``as_examples`` accepts.
        number: The number by which users identify the client; the position by default.

    >>> population = SingleClientPopulation(7, (torch.zeros(3, 2), [0, 1, 1]))
    >>> population.size(7), population.indices(7).tolist(), population.classes_of(7)
    (3, [0, 1, 2], (0, 1))
    """

    def __init__(self, client: int, data: object, number: int | None = None) -> None:
        examples = as_examples(data)
        super().__init__(examples, [torch.arange(len(examples))])
        self.client, self.number = client, client if number is None else number

    def indices(self, client: int) -> Tensor:
        """Return the indices of all examples."""
        self._check(client)
        return super().indices(0)

    def size(self, client: int) -> int:
        """Return the number of examples."""
        self._check(client)
        return super().size(0)

    def number_of(self, client: int) -> int:
        """Return the number by which users identify the client."""
        self._check(client)
        return self.number

    def _check(self, client: int) -> None:
        if client != self.client:
            raise InputError(f"only the examples of client {self.client} are here; got client {client}")
