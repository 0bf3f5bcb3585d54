"""A Flower grid inside the test: messages go directly to ClientApps, and any reply can be tampered with."""

import time
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity  # Flower sets it in the processes of a real run

from fedcover.deploy.flower.client import client_app
from fedcover.federation.federation import Federation

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
Tamper = Callable[[int, int, Message], Message | None]
"""(client, number of earlier messages, its reply) -> what arrives instead; None for silence."""


class LoopGrid(Grid):
    """Nodes with random-looking ids, one for each client; replies come in reverse request."""

    def __init__(
        self,
        apps: dict[int, ClientApp],
        config: dict[int, dict[str, Any]] | None = None,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        self._run_config = run_config or {}
        self.nodes = {900_001 + 7_919 * client: client for client in apps}
        self.offline: set[int] = set()
        self._apps, self._config = apps, config or {}
        self.tamper: Tamper = lambda client, number, reply: reply
        self.states = {client: RecordDict() for client in apps}
        self.asked: dict[int, int] = dict.fromkeys(apps, 0)
        self._replies: dict[str, Message] = {}
        self._requests: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Any) -> None:
        raise AssertionError("a strategy never sets the run of its grid; Flower does")

    @property
    def run(self) -> Any:
        raise AssertionError("a strategy never asks its grid for the run")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("a strategy creates its messages itself")

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, client in self.nodes.items() if client not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self._sent += 1
        key = f"m{self._sent}"
        message.metadata.__dict__["_message_id"] = key
        message.metadata.__dict__["_src_node_id"] = 1
        node = message.metadata.dst_node_id
        client = self.nodes[node]
        config = {"partition-id": client, **self._config.get(client, {})}
        context = Context(1, node, config, self.states[client], self._run_config)
        reply: Message | None = self._apps[client](message, context)
        if message.metadata.message_type == "train":
            assert reply is not None
            reply = self.tamper(client, self.asked[client], reply)
            self.asked[client] += 1
        self._requests[key] = message
        if reply is not None:
            self._replies[key] = reply
        return key

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = (self._pull(key) for key in reversed(list(message_ids)))
        return [reply for reply in replies if reply is not None]

    def _pull(self, key: str) -> Message | None:
        """Return a reply if there is one, and an error for a request that has expired, as a SuperLink does."""
        if key in self._replies:
            return self._replies.pop(key)
        request = self._requests[key]
        if time.time() < request.metadata.created_at + request.metadata.ttl:
            return None
        return failed(Message(RecordDict(), reply_to=request), "Message Unavailable", ErrorCode.MESSAGE_UNAVAILABLE)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(list(messages)))


def grid_of(federation: Federation, share_labels: bool = True) -> LoopGrid:
    """Return a grid with a node for every client of a federation, each with its own examples."""
    clients = federation.clients
    apps = {
        number: client_app(
            federation.task, lambda context, number=number: clients.examples_of(number), None, share_labels
        )
        for number in range(len(clients))
    }
    return LoopGrid(apps)


def failed(reply: Message, reason: str, code: int = 5) -> Message:
    """Return the error that Flower would report instead of a reply; it comes from the SuperLink."""
    error = Message(Error(code, reason), metadata=copy(reply.metadata))
    error.metadata.__dict__["_src_node_id"] = 1
    return error
