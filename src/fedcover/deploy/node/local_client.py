"""The client of a node: its task and its examples, what it reports of itself, and its training."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedcover.data import Examples, SingleClientPopulation
from fedcover.deploy.node.copies import CopyStore, NoStore, copy_finder, store_copy
from fedcover.deploy.wire import decode_request, encode_reply, frozen_in, job_from_request
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.params import params_of
from fedcover.training.task import Task

NUMBER_KEYS = ("client", "partition-id")
"""The keys of a node's configuration that may hold the client's number; simulations have only the second."""


@dataclass(frozen=True)
class LocalClient:
    """The task and the examples of a node."""

    task: Task
    examples: Examples


def client_number(node: Mapping[str, Any]) -> int:
    """Return the number of the client that a node is, by the node's configuration."""
    for key in NUMBER_KEYS:
        value = node.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise InputError("the node's configuration has no client number; start it with client=NUMBER")


def client_facts(local: LocalClient, node: Mapping[str, Any], capacity: float | None = None) -> dict[str, Any]:
    """Return what a node reports of its client.

    Args:
        local: The client's task and examples.
        node: The node's configuration; its ``capacity`` takes precedence.
        capacity: The share of the model that the node can afford; None if it is not reported.
    """
    facts: dict[str, Any] = {"client": client_number(node), "examples": len(local.examples)}
    share = node.get("capacity", capacity)
    if share is not None:
        facts["capacity"] = float(share)
    if node.get("share-labels") and local.examples.has_classes:
        facts["labels"] = local.examples.label_counts().tolist()
    return facts


def train_reply(body: bytes, local: LocalClient, number: int | None = None, copies: CopyStore | None = None) -> bytes:
    """Train as a request asks and return the reply.

    Args:
        body: The request.
        local: The client's task and examples.
        number: The client's number, by which errors name it.
        copies: Where it keeps its copy of the model, if the request asks for it.
    """
    task, store = local.task.fitted(local.examples), copies or NoStore()
    like, frozen = params_of(task.model), frozen_in(task)
    trained = {name: tensor for name, tensor in like.items() if name not in frozen}
    request = decode_request(body, like, frozen, copy_finder(store, trained))
    population = SingleClientPopulation(request.client, local.examples, number)
    start = time.perf_counter()
    (update,) = _engine(request.shrink).train([job_from_request(request, task, population)])
    update = replace(update, seconds=round(time.perf_counter() - start, 3))
    if request.keeps_copy:
        store_copy(store, request, update)
    return encode_reply(update, request)


@lru_cache(maxsize=2)
def _engine(shrink: bool) -> Serial:
    """Return the engine of this process; it is cached, since traced steps serve all clients of a simulation."""
    return Serial(shrink)
