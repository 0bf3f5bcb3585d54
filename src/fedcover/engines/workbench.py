"""Where one client is trained: scratch models, shrunk or not. Serial and the worker processes share it."""

from dataclasses import dataclass, replace

from torch import nn

from fedcover.aggregate import ClientUpdate
from fedcover.dropout import Stream, with_keyed_dropout
from fedcover.errors import ClientError
from fedcover.local import Job, train_client
from fedcover.network import trace
from fedcover.submodel import Shrinker


@dataclass
class _Scratch:
    original: nn.Module  # kept, so that its id cannot be taken by another
    model: nn.Module
    stream: Stream
    shrinker: Shrinker | None = None


class Workbench:
    """Trains jobs one at a time, keeping a scratch model (and a shrinker) for each model it has met."""

    def __init__(self, shrink: bool) -> None:
        self._shrink = shrink
        self._scratches: dict[int, _Scratch] = {}

    def train(self, job: Job) -> ClientUpdate:
        """The update of one client."""
        original = job.task.model
        if id(original) not in self._scratches:
            self._scratches[id(original)] = _Scratch(original, *with_keyed_dropout(original))
        scratch = self._scratches[id(original)]
        if not self._shrink or not job.mask:
            return train_client(scratch.model, scratch.stream, job)
        if scratch.shrinker is None:
            scratch.shrinker = Shrinker(trace(scratch.model, job.clients.examples.inputs[:2]))
        sub = scratch.shrinker.shrink(job.mask)
        small = train_client(sub.model, scratch.stream, replace(job, theta=sub.cut(job.theta), mask=sub.mask))
        return replace(small, theta=sub.restore(small.theta, job.theta), mask=job.mask)

    def clear(self) -> None:
        """Forget everything."""
        self._scratches.clear()


def failure(job: Job, why: str) -> ClientError:
    """The error that names the client, the round and the stage."""
    return ClientError(f"client {job.client.id} failed in round {job.this_round.index} while training: {why}")
