"""One client after another, in this process, on one thread: the definition of every other engine."""

import copy
from collections.abc import Iterator, Sequence

from fedcover.aggregate import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.errors import ClientError
from fedcover.local import Job, Task, train_client
from fedcover.threads import one_thread


class Serial(Engine):
    """The reference engine."""

    name = "serial"

    def train(self, task: Task, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """One client after another."""
        scratch = copy.deepcopy(task.model)
        for job in jobs:
            try:
                with one_thread():
                    update = train_client(scratch, task.loss, job)
            except Exception as error:
                raise ClientError(
                    f"client {job.client.id} failed in round {job.this_round.index} while training: {error}"
                ) from error
            yield update
