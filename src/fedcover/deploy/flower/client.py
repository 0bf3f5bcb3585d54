"""A client on its own device: a ClientApp built from a task and the device's examples.

    app = client_app(task, lambda context: examples)

On request it reports which client it is and what it can afford, and it trains what it receives as the serial engine
would.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcover.data import Examples
from fedcover.deploy.flower.messages import ERROR, body_content, body_of, facts_content
from fedcover.deploy.node.local_client import LocalClient, client_facts, client_number, train_reply
from fedcover.deploy.text import one_line
from fedcover.training.task import Task

COPY = "fedcover-copy"
"""The name of the node's copy of the model in its context."""

Capacity = float | Callable[[Context], float | None] | None
"""The share of the model that a node can afford, or a function that computes it; None if it is not reported."""


def client_app(
    task: Task | Callable[[Context], Task],
    data: Callable[[Context], Examples],
    capacity: Capacity = None,
    share_labels: bool = False,
) -> ClientApp:
    """Return a ClientApp that trains sub-models of a task on the examples of its node.

    The node's configuration may also set ``capacity`` and ``share-labels``; they take precedence. The client's number
    comes only from the node's configuration, under ``client``.

    Args:
        task: The task, or a function of the node's context that returns it.
        data: A function of the node's context that returns its examples.
        capacity: The share of the model that the node can afford, in (0, 1], or a function that computes it.
        share_labels: Whether the node reports its label counts.
    """

    def load(context: Context) -> LocalClient:
        return LocalClient(task if isinstance(task, Task) else task(context), data(context))

    return build_client_app(load, capacity, share_labels)


def build_client_app(
    load: Callable[[Context], LocalClient], capacity: Capacity = None, share_labels: bool = False
) -> ClientApp:
    """Return a ClientApp whose task and examples a function of the node's context loads."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _reply(message, lambda: facts_content(_facts(load(context), context, capacity, share_labels)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _reply(message, lambda: body_content(_trained(message, load(context), context)))

    return app


def number_of(context: Context) -> int:
    """Return the number of the client that a node is."""
    return client_number(context.node_config)


def _trained(message: Message, local: LocalClient, context: Context) -> bytes:
    """Train as a message asks, and return the reply."""
    return train_reply(body_of(message), local, number_of(context), CopyInContext(context))


class CopyInContext:
    """The node's copy of the model in the state that Flower keeps for a node during a run.

    Args:
        context: The node's context.
    """

    def __init__(self, context: Context) -> None:
        self._state = context.state

    def read(self) -> bytes | None:
        """Return the copy; None if there is none."""
        record = self._state.array_records.get(COPY)
        return bytes(record[COPY].numpy()) if record is not None else None

    def write(self, data: bytes) -> None:
        """Replace the copy."""
        self._state[COPY] = ArrayRecord({COPY: Array(np.frombuffer(data, np.uint8))})


def _facts(local: LocalClient, context: Context, capacity: Capacity, share_labels: bool) -> dict[str, Any]:
    share = capacity(context) if callable(capacity) else capacity
    return client_facts(local, {"share-labels": share_labels, **context.node_config}, share)


def _reply(message: Message, make: Callable[[], RecordDict]) -> Message:
    """Return a reply even after an error: otherwise Flower would wait, and send the node nothing more."""
    try:
        content = make()
    except Exception as error:
        content = facts_content({ERROR: one_line(f"{type(error).__name__}: {error}")})
    return Message(content, reply_to=message)
