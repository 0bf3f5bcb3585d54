"""What an engine is: jobs in, updates out, in the order of the jobs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from fedcover.aggregate import ClientUpdate
from fedcover.local import Job, Task


class Engine(ABC):
    """Trains a round's jobs. ``Serial`` is the definition; every other engine must agree with it."""

    name: str

    @abstractmethod
    def train(self, task: Task, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """One update for each job, in the order of the jobs."""
