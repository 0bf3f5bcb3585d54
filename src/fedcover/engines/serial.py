"""One client after another, in this process, on one thread: the definition of every other engine."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedcover.aggregate import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.errors import ClientError
from fedcover.local import Job, Task, train_client


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread inside the block: small steps gain nothing from more, and results then do not
    depend on how many cores a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
