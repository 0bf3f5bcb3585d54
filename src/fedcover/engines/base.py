"""The interface of an engine: jobs in, updates out, in the order of the jobs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from fedcover.aggregation.base import ClientUpdate
from fedcover.training.client import Job


class Engine(ABC):
    """The base class of engines, which train the jobs of a round.

    ``Serial`` is the reference. Every other engine must agree with it: bit for bit if ``exact`` is True, up to
    rounding otherwise. A new engine implements ``train``, sets ``name`` and overrides the attributes below where
    their defaults do not describe it.

    An engine starts its workers when they are first needed, and a run closes the engine at its end. To share an
    engine between runs, use it as a context manager: ``with Processes() as engine: ...``.
    """

    name: str
    """The name of the engine in settings and run folders."""
    exact: bool = True
    """True if the results are bit-identical to those of ``Serial``."""
    trains_one_by_one: bool = True
    """True if each client is trained on its own, not as a row of a batch; the trait ``one_by_one`` requires it."""
    shrink: bool = False
    """True if sub-models are made physically smaller before they are trained, which changes the last bits."""
    traced: bool = True
    """False if every step goes through autograd, which may change the last bits."""
    precision: str = "fp32"
    """How forward and backward passes compute: ``fp32``, ``tf32`` or ``bf16``."""
    device: torch.device = torch.device("cpu")
    """The device of the whole round: theta and masks are moved to it, and updates are on it."""
    together: int = 1
    """The number of updates that are best averaged at once."""
    ahead: int = 1
    """The number of calls of ``train`` that may run at once; with 2, one trains while the next is planned."""
    workers: int = 1
    """The number of CPU cores that it uses at once; the evaluation of a round uses as many."""
    keep_open: bool = False
    """True inside a ``with`` block: runs then do not close the engine."""

    def groups(self, clients: int) -> int:
        """Return the number of groups in which runs are trained that have this many clients in a round together."""
        return self.ahead

    def playing(self) -> AbstractContextManager[object]:
        """Return the context in which rounds are played with this engine."""
        return nullcontext()

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Yield one update per job, in the order of the jobs.

        Args:
            jobs: The jobs of a round. They may belong to different federations.

        Raises:
            ClientError: If the training of a client fails; the message names the client and the round.
        """

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release workers and memory; the engine starts them again if it is used again."""

    def __enter__(self) -> "Engine":
        self.keep_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_open = False
        self.close()
