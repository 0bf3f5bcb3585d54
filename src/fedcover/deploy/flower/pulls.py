"""Pulling replies from a Flower grid, one request at a time.

A grid fetches all replies that it is asked for, and the server deletes them, before the first is parsed. One malformed
reply in a group would therefore cost the others, so each is asked for alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedcover.deploy.flower.messages import Notify
from fedcover.deploy.text import one_line

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, DecodeError, RecursionError, MemoryError)
"""What a grid raises on a malformed reply. A lost connection raises something else, which ends the run."""
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
    """

    def __init__(self, grid: Grid, key: str, node: int) -> None:
        self._grid, self._key, self._node = grid, key, node

    def poll(self, notify: Notify) -> Answer | None:
        """Return the answer if there is one.

        Raises:
            Exception: What the grid raises, unless it is about this reply.
        """
        try:
            replies = list(self._grid.pull_messages([self._key]))
        except UNREADABLE as error:  # the server stores replies unopened; the grid parses them and fails
            return Answer(None, f"its reply cannot be read: {one_line(f'{type(error).__name__}: {error}')}")
        for _ in replies[1:]:
            notify(NO_REQUEST)
        return self._checked(replies[0]) if replies else None

    def _checked(self, reply: Message) -> Answer:
        """Return a reply if it names this request and its node: a node writes both itself."""
        if reply.metadata.reply_to_message_id != self._key:
            return Answer(None, "its reply names another request")
        if not is_from(reply, self._node):
            return Answer(None, "its reply names another node as its sender")
        return Answer(reply)


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
