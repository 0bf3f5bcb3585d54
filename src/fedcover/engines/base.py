"""What an engine is: jobs in, updates out, in the order of the jobs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.training.client import Job


class Engine(ABC):
    """Trains a round's jobs. ``Serial`` is the definition; every other engine must agree with it."""

    name: str
    exact: bool = True
    """Whether its results are those of ``Serial``, bit for bit."""
    device: torch.device = torch.device("cpu")
    """Where it wants theta and masks, and leaves updates: the whole round is played there."""
    together: int = 1
    """How many updates are best averaged at once."""
    ahead: int = 1
    """How many calls of ``train`` may be under way at once: with 2, one trains while another is planned."""
    held: bool = False
    """Whether somebody keeps it open with ``with``: runs then leave it as it is, ready for the next."""

    def playing(self) -> AbstractContextManager[object]:
        """What must hold while rounds are played with this engine."""
        return nullcontext()

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """One update for each job, in the order of the jobs; the jobs may be of different federations."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Let go of workers and memory; the engine starts anew if it is used again."""

    def __enter__(self) -> "Engine":
        self.held = True
        return self

    def __exit__(self, *_: object) -> None:
        self.held = False
        self.close()
