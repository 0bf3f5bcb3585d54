"""The serial engine: one client after another, in this process, on one thread. It defines every other engine."""

from collections.abc import Iterator, Sequence

from fedcover._threads import one_thread
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import ClientTrainer, failure
from fedcover.training.client import Job


class Serial(Engine):
    """The reference engine: it trains one client after another, on one thread.

    Args:
        shrink: Whether to build a physically smaller sub-model from each mask before training. It is faster where
            masks remove whole units. The result is the same up to rounding, except that dropout draws for fewer units:
            with dropout the results agree only in distribution.
        traced: Whether to trace a training step once and replay it. Use False for a model whose forward pass
            depends on more than its input, parameters and buffers; every step then goes through autograd.

    >>> Serial(shrink=True)
    serial
    """

    name = "serial"

    def __init__(self, shrink: bool = True, traced: bool = True) -> None:
        self.shrink, self.traced = shrink, traced
        self._trainer = ClientTrainer(shrink, traced)

    def __repr__(self) -> str:
        return "serial"

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Yield one update per job; each client is trained when its update is needed."""
        for job in jobs:
            try:
                with one_thread():
                    update = self._trainer.train(job)
            except Exception as error:
                raise failure(job, str(error) or type(error).__name__) from error
            yield update

    def close(self) -> None:
        """Release the scratch models."""
        self._trainer.clear()
