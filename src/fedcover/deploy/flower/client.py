"""A client on a device of its own: a ClientApp made from a task and the device's examples.

    app = client_app(task, lambda context: examples)

It tells who it is and what it can afford when it is asked, and trains what it is sent; both as the serial engine would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcover.data import Examples
from fedcover.deploy.flower.messages import ERROR, body_of, content_of, cut_short, facts_content
from fedcover.deploy.wire import decode_request, encode_reply, job_of, only
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.params import params_of
from fedcover.training.task import Task

NAMES = ("client", "partition-id")
"""What a node's configuration calls the number of its client; simulations know the second alone."""
Capacity = float | Callable[[Context], float | None] | None
"""The share of the model that a node can afford, or what finds it there; None if it does not say."""


@dataclass(frozen=True)
class LocalClient:
    """What a node brings to a federation."""

    task: Task
    examples: Examples


def client_app(
    task: Task | Callable[[Context], Task],
    data: Callable[[Context], Examples],
    capacity: Capacity = None,
    share_labels: bool = False,
) -> ClientApp:
    """A ClientApp that trains a task's sub-models on the examples of its node.

    ``capacity`` is the share of the model that the node can afford; the node's configuration may say it too, as it may
    say ``share-labels``. The node's number comes from its configuration alone: ``client``.
    """

    def device(context: Context) -> LocalClient:
        return LocalClient(task if isinstance(task, Task) else task(context), data(context))

    return app_of(device, capacity, share_labels)


def app_of(
    device: Callable[[Context], LocalClient], capacity: Capacity = None, share_labels: bool = False
) -> ClientApp:
    """A ClientApp for what a function finds on its node; another may find what the node can afford."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _answer(message, lambda: facts_content(_facts(device(context), context, capacity, share_labels)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answer(message, lambda: content_of(trained(body_of(message), device(context), number_of(context))))

    return app


def trained(body: bytes, device: LocalClient, name: int | None = None) -> bytes:
    """The answer to an order, by this device; its errors say the ``name`` by which it is known."""
    task = device.task.static(device.examples.inputs[:2])
    order = decode_request(body, params_of(task.model))
    (update,) = _engine(order.shrink).train([job_of(order, task, only(order.client, device.examples, name))])
    return encode_reply(update, order)


@lru_cache(maxsize=2)
def _engine(shrink: bool) -> Serial:
    """The engine of this process; kept, since steps that are traced once serve all clients of a simulation."""
    return Serial(shrink)


def number_of(context: Context) -> int:
    """The number of the client that a node is."""
    for name in NAMES:
        value = context.node_config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise InputError("the node's configuration does not say which client it is; start it with client=NUMBER")


def _facts(device: LocalClient, context: Context, capacity: Capacity, share_labels: bool) -> dict[str, Any]:
    config: Mapping[str, Any] = context.node_config
    facts: dict[str, Any] = {"client": number_of(context), "examples": len(device.examples)}
    able = config.get("capacity", capacity(context) if callable(capacity) else capacity)
    if able is not None:
        facts["capacity"] = float(able)
    if config.get("share-labels", share_labels):
        facts["labels"] = device.examples.label_counts().tolist()
    return facts


def _answer(message: Message, make: Callable[[], RecordDict]) -> Message:
    """A reply in any case: without one Flower would wait, and give the node nothing more."""
    try:
        content = make()
    except Exception as error:
        content = facts_content({ERROR: cut_short(f"{type(error).__name__}: {error}")})
    return Message(content, reply_to=message)
