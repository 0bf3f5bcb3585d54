"""A client on its own device: a ClientApp built from a task and the device's examples.

    app = client_app(task, lambda context: examples)

On request it reports which client it is and what it can afford, and it trains what it receives as the serial engine
would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcover.data import Examples, SingleClientPopulation
from fedcover.deploy.flower.messages import ERROR, body_content, body_of, facts_content, one_line
from fedcover.deploy.wire import decode_request, encode_reply, frozen_in, job_from_request
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.params import params_of
from fedcover.training.task import Task

NUMBER_KEYS = ("client", "partition-id")
"""The keys of a node's configuration that may hold the client's number; simulations have only the second."""
Capacity = float | Callable[[Context], float | None] | None
"""The share of the model that a node can afford, or a function that computes it; None if it is not reported."""


@dataclass(frozen=True)
class LocalClient:
    """The task and the examples of a node."""

    task: Task
    examples: Examples


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
        return _reply(message, lambda: body_content(train_reply(body_of(message), load(context), number_of(context))))

    return app


def train_reply(body: bytes, local: LocalClient, number: int | None = None) -> bytes:
    """Train as a request asks and return the reply; errors name the client by its ``number``."""
    task = local.task.fitted(local.examples)
    request = decode_request(body, params_of(task.model), frozen_in(task))
    population = SingleClientPopulation(request.client, local.examples, number)
    (update,) = _engine(request.shrink).train([job_from_request(request, task, population)])
    return encode_reply(update, request)


@lru_cache(maxsize=2)
def _engine(shrink: bool) -> Serial:
    """Return the engine of this process; it is cached, since traced steps serve all clients of a simulation."""
    return Serial(shrink)


def number_of(context: Context) -> int:
    """Return the number of the client that a node is."""
    for key in NUMBER_KEYS:
        value = context.node_config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise InputError("the node's configuration has no client number; start it with client=NUMBER")


def _facts(local: LocalClient, context: Context, capacity: Capacity, share_labels: bool) -> dict[str, Any]:
    config: Mapping[str, Any] = context.node_config
    facts: dict[str, Any] = {"client": number_of(context), "examples": len(local.examples)}
    share = config.get("capacity", capacity(context) if callable(capacity) else capacity)
    if share is not None:
        facts["capacity"] = float(share)
    if config.get("share-labels", share_labels):
        facts["labels"] = local.examples.label_counts().tolist()
    return facts


def _reply(message: Message, make: Callable[[], RecordDict]) -> Message:
    """Return a reply even after an error: otherwise Flower would wait, and send the node nothing more."""
    try:
        content = make()
    except Exception as error:
        content = facts_content({ERROR: one_line(f"{type(error).__name__}: {error}")})
    return Message(content, reply_to=message)
