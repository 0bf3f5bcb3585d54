"""A request to train: what the server sends to one client in one round, as kept values and packed masks."""

from dataclasses import dataclass
from typing import Any

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.deploy.wire.fields import check_nothing_left, take_bool, take_int
from fedcover.deploy.wire.frame import INT_LIMIT, open_frame, pack_frame, short_repr
from fedcover.deploy.wire.recipe import decode_recipe, encode_recipe
from fedcover.deploy.wire.tensors import (
    decode_mask,
    decode_values,
    encode_mask,
    encode_values,
    model_difference,
    tensor_table,
)
from fedcover.deploy.wire.training_options import decode_options, encode_options
from fedcover.errors import InputError
from fedcover.federation.checkpoint import digest_of
from fedcover.params import Mask, Params, check_mask, prune
from fedcover.seeding import Round
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from fedcover.training.recipes import Recipe
from fedcover.training.task import Task

MAX_REQUEST_BYTES = 1 << 40
"""The size limit of a request; memory is allocated only after its model was compared with the client's own."""


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """One client's training in one round; together with the client's examples it determines the result."""

    client: int
    slot: int
    round: int
    seed: int
    recipe: Recipe
    shrink: bool
    """Whether sub-models are made physically smaller before they are trained."""
    theta: Params
    """In the shapes of the whole model; values outside the mask are not sent, and are 0 on arrival."""
    mask: Mask
    options: TrainingOptions | None = None
    frozen: tuple[str, ...] = ()
    """The names of the tensors that are not trained. The client has their values; only a digest of them is sent."""


def request_from_job(job: Job, shrink: bool) -> TrainRequest:
    """Return the request that asks a client to do a job."""
    client, this_round = job.client, job.this_round
    return TrainRequest(
        client.id,
        client.slot,
        this_round.index,
        this_round.seed,
        job.recipe,
        shrink,
        job.theta,
        job.mask,
        job.options,
        frozen_in(job.task),
    )


def frozen_in(task: Task) -> tuple[str, ...]:
    """Return the names of the tensors of a task's model that are not trained."""
    return tuple(name for name, parameter in task.model.named_parameters() if not parameter.requires_grad)


def job_from_request(request: TrainRequest, task: Task, clients: Population) -> Job:
    """Return the job of a request, for a ``ClientTrainer``; ``clients`` needs to contain only this client."""
    number = clients.number_of(request.client)
    client = Client(request.client, request.slot, Budget(), clients.size(request.client), number=number)
    this_round = Round(request.round, request.seed)
    return Job(task, clients, client, request.theta, request.mask, request.recipe, this_round, request.options)


def encode_request(request: TrainRequest) -> bytes:
    """Return a request as a frame: values of kept entries in row-major order, and packed masks."""
    check_mask(request.mask, request.theta, "the mask of a request")
    if not -INT_LIMIT < request.seed < INT_LIMIT:
        raise InputError(f"the seed of a request must fit into 64 bits; got {request.seed}; choose a smaller one")
    sent = {name: tensor for name, tensor in request.theta.items() if name not in request.frozen}
    parts = {f"theta/{name}": encode_values(tensor, request.mask.get(name)) for name, tensor in sent.items()}
    head: dict[str, Any] = {
        "kind": "request",
        "client": request.client,
        "slot": request.slot,
        "round": request.round,
        "seed": request.seed,
        "recipe": encode_recipe(request.recipe),
        "shrink": request.shrink,
        "tensors": tensor_table(request.theta),
        "frozen": _frozen_field(request.theta, request.frozen),
        "mask": encode_mask(request.mask, parts),
        "options": encode_options(request.options, request.theta, request.mask, parts),
    }
    return pack_frame(head, parts)


def decode_request(data: bytes | memoryview, like: Params, frozen: tuple[str, ...] = ()) -> TrainRequest:
    """Return the request in a frame.

    Args:
        data: The frame.
        like: The parameters of the client's own model, with which the request's must agree.
        frozen: The names of the tensors that the client does not train, whose values are not sent.

    Raises:
        InputError: If the frame is not a valid request for this model.
    """
    head, parts = open_frame(data, MAX_REQUEST_BYTES)  # a larger model is allowed here, for a clear error below
    if (kind := head.pop("kind", None)) != "request":
        raise InputError(f"the message is {short_repr(kind)}, not a request; connect to a fedcover server")
    if difference := model_difference(head.pop("tensors", None), like):
        raise InputError(f"the request is for another model: {difference}; server and client must use the same model")
    mask = decode_mask(parts, head.pop("mask", None), like)
    _check_frozen(head.pop("frozen", None), like, frozen)
    kept = prune({name: like[name] for name in frozen}, mask)
    theta = {
        name: kept[name] if name in kept else decode_values(parts, "theta", name, tensor, mask.get(name))
        for name, tensor in like.items()
    }
    request = TrainRequest(
        client=take_int(head, "client", 0),
        slot=take_int(head, "slot", 0),
        round=take_int(head, "round", 1),
        seed=take_int(head, "seed"),
        recipe=decode_recipe(head.pop("recipe", None)),
        shrink=take_bool(head, "shrink"),
        theta=theta,
        mask=mask,
        options=decode_options(head.pop("options", None), theta, mask, parts),
        frozen=frozen,
    )
    check_nothing_left(head, parts)
    return request


def _frozen_field(theta: Params, frozen: tuple[str, ...]) -> dict[str, Any]:
    """Return the names of the frozen tensors with a digest of their values; nothing if there are none."""
    return {"names": list(frozen), "digest": digest_of({name: theta[name] for name in frozen})} if frozen else {}


def _check_frozen(field: object, like: Params, frozen: tuple[str, ...]) -> None:
    """Raise InputError unless the server freezes the same tensors, with the same values."""
    expected = _frozen_field(like, frozen)
    if not isinstance(field, dict) or field.get("names") != expected.get("names"):
        raise InputError(
            f"the request does not freeze what this client freezes ({', '.join(frozen) or 'nothing'}); server and"
            f" client must freeze the same tensors"
        )
    if field != expected:
        raise InputError(
            "the frozen tensors have other values on the server; server and client must load the same pre-trained"
            " model, or build it from the same seed"
        )
