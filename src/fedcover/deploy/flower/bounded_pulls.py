"""Bounds on the time for which Flower waits for a reply that was announced but not uploaded, and on its size.

A node announces a reply before it uploads it. Flower's grid then waits for the upload, up to two hours with pauses of
up to ten seconds, and loads all of it, whatever its size. It offers no settings for that: ``HttpGrid.pull_messages``
calls ``pull_objects`` with its defaults. Here that name is replaced in the module of the grid. Pulls outside
``bounded`` are unchanged.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_objects
from flwr.superlink.grid import http_grid

PAUSE = 1.0
"""The longest pause between two attempts to pull an object, in seconds."""


@dataclass
class PullLimit:
    """The end of a pull, which may be moved while the pull runs, and the size limit of what it loads."""

    until: float = math.inf
    """By the monotonic clock."""
    size: float = math.inf
    """In bytes."""
    loaded: int = 0
    """Bytes so far."""
    message: str = ""
    """The id of the message that is pulled, once the pull has begun."""

    @property
    def exceeded(self) -> bool:
        """Whether more was sent than allowed."""
        return self.loaded > self.size


_bound: ContextVar[PullLimit | None] = ContextVar("bound", default=None)


@contextmanager
def bounded(bound: PullLimit) -> Iterator[None]:
    """End pulls of this thread at a bound; Flower then reports the reply as unavailable."""
    token = _bound.set(bound)
    try:
        yield
    finally:
        _bound.reset(token)


def pull_within_bound(
    object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any
) -> dict[str, bytes]:
    """Pull objects as Flower does, but no longer and no more than the bound of this thread allows."""
    if (bound := _bound.get()) is None:
        return pull_objects(object_ids, pull_object_fn, **options)

    bound.message = object_ids[-1]  # an object comes after its parts

    def pull(object_id: str) -> bytes:
        if time.monotonic() > bound.until:
            raise ObjectPullError(object_id, "it was not uploaded in time")
        content = pull_object_fn(object_id)
        bound.loaded += len(content)
        if bound.exceeded:
            raise ObjectPullError(object_id, f"the reply has more than {bound.size:.0f} bytes")
        return content

    return pull_objects(object_ids, pull, max_time=None, max_tries_per_object=None, backoff_cap=PAUSE)


http_grid.pull_objects = pull_within_bound  # type: ignore[attr-defined]
