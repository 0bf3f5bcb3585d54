"""One client after another, in this process, on one thread: the definition of every other engine."""

from collections.abc import Iterator, Sequence

from fedcover._threads import one_thread
from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import ClientTrainer, failure
from fedcover.training.client import Job


class Serial(Engine):
    """The reference engine. With ``shrink`` sub-models are made physically smaller before they are trained.

    Steps are traced once and replayed; ``traced=False`` leaves them to autograd, for a model whose forward
    pass depends on more than its input and parameters.
    """

    name = "serial"

    def __init__(self, shrink: bool = False, traced: bool = True) -> None:
        self._bench = ClientTrainer(shrink, traced)

    def __repr__(self) -> str:
        return "serial"

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """One client after another."""
        for job in jobs:
            try:
                with one_thread():
                    update = self._bench.train(job)
            except Exception as error:
                raise failure(job, str(error) or type(error).__name__) from error
            yield update

    def close(self) -> None:
        """Forget the scratch models."""
        self._bench.clear()
