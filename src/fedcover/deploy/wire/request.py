"""What the server tells one client in one round, and how that travels: kept values and packed masks."""

from dataclasses import dataclass
from typing import Any

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.deploy.wire.fields import nothing_left, number, truth, whole
from fedcover.deploy.wire.frame import MOST_WHOLE, open_frame, pack_frame, shown
from fedcover.deploy.wire.tensors import difference, put_mask, put_values, table_of, take_mask, take_values
from fedcover.deploy.wire.training_options import put_options, take_options
from fedcover.errors import InputError
from fedcover.params import Mask, Params, check_mask
from fedcover.seeding import Round
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from fedcover.training.task import LocalSGD, Task

MOST_ORDER = 1 << 40
"""The most bytes of an order; nothing in it takes up memory before its model is known to be the client's own."""


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """One client's training in one round; with its own examples it has all that training depends on."""

    client: int
    slot: int
    round: int
    seed: int
    recipe: LocalSGD
    shrink: bool
    """Whether sub-models are made physically smaller before they are trained."""
    theta: Params
    """In the whole model's shapes; values outside the mask do not travel, and are 0 after it."""
    mask: Mask
    options: TrainingOptions | None = None


def order_of(job: Job, shrink: bool) -> TrainRequest:
    """The order that asks a client for what a job asks an engine for."""
    here, now = job.client, job.this_round
    return TrainRequest(here.id, here.slot, now.index, now.seed, job.recipe, shrink, job.theta, job.mask, job.options)


def job_of(order: TrainRequest, task: Task, clients: Population) -> Job:
    """The job of an order, for a ``ClientTrainer``; ``clients`` need hold nobody else."""
    who = order.client
    client = Client(who, order.slot, Budget(), clients.size(who), number=clients.number_of(who))
    this_round = Round(order.round, order.seed)
    return Job(task, clients, client, order.theta, order.mask, order.recipe, this_round, order.options)


def encode_request(order: TrainRequest) -> bytes:
    """The order as a frame: values of kept entries, row by row, and packed masks."""
    check_mask(order.mask, order.theta, "the mask of an order")
    if not -MOST_WHOLE < order.seed < MOST_WHOLE:
        raise InputError(f"a seed that travels must fit into 64 bits; got {order.seed}; choose a smaller one")
    parts = {f"theta/{name}": put_values(tensor, order.mask.get(name)) for name, tensor in order.theta.items()}
    recipe = order.recipe
    head: dict[str, Any] = {
        "kind": "order",
        "client": order.client,
        "slot": order.slot,
        "round": order.round,
        "seed": order.seed,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "momentum": recipe.momentum,
        "shrink": order.shrink,
        "tensors": table_of(order.theta),
        "mask": put_mask(order.mask, parts),
        "drill": put_options(order.options, order.theta, order.mask, parts),
    }
    return pack_frame(head, parts)


def decode_request(data: bytes | memoryview, like: Params) -> TrainRequest:
    """The order in a frame, for a client whose own model's parameters are ``like``."""
    head, parts = open_frame(data, MOST_ORDER)  # whose model may be another and larger, which is then said
    if (kind := head.pop("kind", None)) != "order":
        raise InputError(f"the message is {shown(kind)}, not an order; connect to a fedcover server")
    if why := difference(head.pop("tensors", None), like):
        raise InputError(f"the order is for another model: {why}; server and client must run the same model")
    mask = take_mask(parts, head.pop("mask", None), like)
    theta = {name: take_values(parts, "theta", name, tensor, mask.get(name)) for name, tensor in like.items()}
    order = TrainRequest(
        client=whole(head, "client", 0),
        slot=whole(head, "slot", 0),
        round=whole(head, "round", 1),
        seed=whole(head, "seed"),
        recipe=LocalSGD(
            whole(head, "epochs", 1), whole(head, "batch_size", 1), number(head, "lr"), number(head, "momentum")
        ),
        shrink=truth(head, "shrink"),
        theta=theta,
        mask=mask,
        options=take_options(head.pop("drill", None), theta, mask, parts),
    )
    nothing_left(head, parts)
    return order
