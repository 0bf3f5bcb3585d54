"""Pulling replies from a Flower grid, one request at a time.

A grid fetches all replies that it is asked for, and the server deletes them, before the first is parsed. One malformed
reply in a group would therefore cost the others, so each is asked for separately. A grid also waits for replies whose
upload is not complete; such a pull continues in its own thread, so that it does not hold back the others.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedcover.deploy.flower.bounded_pulls import PullLimit, bounded
from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.text import one_line

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, DecodeError, RecursionError, MemoryError)
"""What a grid raises on a malformed reply. A lost connection raises something else, which ends the run."""
PATIENCE = 0.25
"""Seconds for which the pull of a small reply is waited for."""
BYTES_PER_SECOND = 20e6
"""The least speed at which a complete reply is pulled; the server is on the same machine."""
OTHER_BYTES = 16 << 20
"""The size limit of what a reply has beyond its body: names, headers, and facts such as a million label counts."""
NO_REQUEST = "a reply to no pending request is ignored"


@dataclass(frozen=True)
class Answer:
    """What came back for a request: a reply, or the reason why it cannot count."""

    reply: Message | None
    fault: str = ""


class Pull:
    """The reply to one request.

    Args:
        grid: The grid.
        key: The request's message id.
        node: The node to which it went.
        until: When the server stops accepting its reply, by the monotonic clock.
        reply_bytes: The size limit of the body of its reply.
    """

    def __init__(self, grid: Grid, key: str, node: int, until: float, reply_bytes: int = 0) -> None:
        self._grid, self._key, self._node = grid, key, node
        self._patience = PATIENCE + reply_bytes / BYTES_PER_SECOND
        self._bound = PullLimit(until, reply_bytes + OTHER_BYTES)
        self._thread: threading.Thread | None = None
        self._replies: list[Message] = []
        self._error: BaseException | None = None

    def poll(self, notify: Notify, deadline: float) -> Answer | None:
        """Return the answer if there is one.

        A pull that takes longer than that of a complete reply continues in its thread, and is looked at by later calls.

        Args:
            notify: Called with a line about replies that are ignored.
            deadline: When the reply is due, by the monotonic clock; from then on no large reply is waited for.

        Raises:
            Exception: What the grid raises, unless it is about this reply.
        """
        if self._thread is None:
            _running.add(self)
            self._thread = threading.Thread(target=self._pull, daemon=True)
            self._thread.start()
            self._thread.join(min(self._patience, max(PATIENCE, deadline - time.monotonic())))
        if self._thread.is_alive():
            return None
        self._thread, error, replies = None, self._error, self._replies
        self._error, self._replies = None, []
        if self._bound.exceeded:
            return Answer(None, f"its reply has more than {self._bound.size:.0f} bytes")
        if isinstance(error, UNREADABLE):  # the server stores replies unopened; the grid parses them and fails
            return Answer(None, f"its reply cannot be read: {one_line(f'{type(error).__name__}: {error}')}")
        if error is not None:
            raise error
        for _ in replies[1:]:
            notify(NO_REQUEST)
        return self._checked(replies[0]) if replies else None

    def abandon(self) -> None:
        """Wait no longer for a reply whose upload is not complete: its thread ends, and the reply is lost."""
        self._bound.until = 0.0

    def _pull(self) -> None:
        try:
            with bounded(self._bound):
                self._replies = list(self._grid.pull_messages([self._key]))
        except BaseException as error:  # raised by ``poll``, in the thread that asks
            self._error = error
        finally:
            if self._bound.exceeded:
                delete_message(self._grid, self._bound.message)
            _running.discard(self)  # or the reply to a request that was given up would stay in memory

    def _checked(self, reply: Message) -> Answer:
        """Return a reply if it names this request and its node: a node writes both itself."""
        if reply.metadata.reply_to_message_id != self._key:
            return Answer(None, "its reply names another request")
        if not is_from(reply, self._node):
            return Answer(None, "its reply names another node as its sender")
        return Answer(reply)


_running: set[Pull] = set()


@contextmanager
def ending_pulls() -> Iterator[None]:
    """Abandon all pulls at the end: Python does not exit while Flower's threads wait for an upload."""
    try:
        yield
    finally:
        while _running:
            _running.pop().abandon()


def delete_message(grid: Grid, message: str) -> None:
    """Delete a message from the server's disk, where Flower keeps one that nobody has fetched until the run ends.

    Flower offers this only to the receiver of a message, which confirms that it has it; the server's store does not
    distinguish. A node that asks for the message then gets none. A failure is ignored: it costs space only.
    """
    if isinstance(grid, HttpGrid):
        request = ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=message)
        with suppress(httpx.HTTPError, RuntimeError, ValueError, AttributeError):
            grid._runtime_client.ConfirmMessageReceived(request)


def is_from(reply: Message, node: int) -> bool:
    """Return whether a reply names a node as its sender; errors may be reported by the server."""
    return reply.has_error() or reply.metadata.src_node_id == node


def match_replies(replies: Iterable[Message], waiting: dict[str, int], notify: Notify) -> Iterator[tuple[int, Message]]:
    """Yield (node id, reply) for each reply to a waiting message, and remove the message from ``waiting``.

    A reply must name the node to which the message went as its sender.
    """
    for reply in replies:
        key = reply.metadata.reply_to_message_id
        if key not in waiting or not is_from(reply, waiting[key]):
            notify(NO_REQUEST)
        else:
            yield waiting.pop(key), reply
