"""Gains of tensors for SGD: a tensor with gain g is trained as g theta, with the step size times g^2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.engines.vectorized.batch_table import to_device
from fedcover.engines.vectorized.stacks import column, first_rows
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import PLAIN


class Gains:
    """The gains of all tensors of all clients; none if no client has any.

    Args:
        theta: The stacks of all parameters.
        trained: The names of the tensors that are trained.
        wanted: Whether there are gains.
    """

    def __init__(self, theta: Params, trained: Sequence[str], wanted: bool) -> None:
        self._trained = frozenset(trained)
        first = next(iter(theta.values()))
        wide = any(stack.dtype == torch.float64 for stack in theta.values())
        dtype = torch.float64 if wide else torch.float32
        # Frozen tensors have gains in forward passes too.
        self._all = torch.ones(len(theta) if wanted else 0, len(first), dtype=dtype, device=first.device)
        self.of: dict[str, Tensor] = dict(zip(theta, self._all, strict=True)) if wanted else {}
        self._values: list[list[float]] = []
        self._changing: list[str] = []  # tensors with gains other than 1
        self._frozen: Params = {}

    def load(self, theta: Params, jobs: Sequence[Job]) -> bool:
        """Multiply clients' tensors by their gains; return whether these are others than before."""
        values = [[(job.options or PLAIN).gains.get(name, 1.0) for job in jobs] for name in self.of]
        changed = values != self._values
        if changed:
            self._values = values
            self._all.copy_(to_device(values, self._all.device, self._all.dtype))
            self._changing = [n for n, row in zip(self.of, values, strict=True) if any(gain != 1.0 for gain in row)]
        # Multiplying by a gain and dividing by it may round, but tensors that are not trained must not change.
        self._frozen = {name: theta[name].clone() for name in self._changing if name not in self._trained}
        for name in self._changing:
            theta[name].mul_(column(self.of[name], theta[name]))
        return changed

    def divided(self, theta: Params, clients: int) -> dict[str, Tensor]:
        """Return copies of the tensors of the first clients, without their gains."""
        copies = first_rows(theta, clients)
        for name in self._changing:
            copies[name].div_(column(self.of[name][:clients], copies[name]))
        return copies | first_rows(self._frozen, clients)
