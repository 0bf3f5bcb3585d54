"""A request to train: what the server sends to one client in one round, as kept values and packed masks."""

from dataclasses import dataclass
from typing import Any

from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import Population
from fedcover.deploy.wire.complements import (
    FindCopy,
    RequestParts,
    SentComplement,
    decode_complement,
    encode_complement,
)
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
    """In the shapes of the whole model. Values outside the mask are not sent, and are 0 on arrival, unless the client
    sees them: then they are on arrival those of the complement."""
    mask: Mask
    options: TrainingOptions | None = None
    frozen: tuple[str, ...] = ()
    """The names of the tensors that are not trained. The client has their values; only a digest of them is sent."""
    keeps_copy: bool = False
    """Whether the client keeps what it sees and trains, for the complement of a later round."""

    @property
    def sees(self) -> bool:
        """Whether the client sees values outside its mask."""
        return self.options is not None and self.options.complement


def request_from_job(job: Job, shrink: bool, keeps_copy: bool = False) -> TrainRequest:
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
        keeps_copy,
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


def encode_request(request: TrainRequest, complement: SentComplement | None = None) -> bytes:
    """Return a request as a frame: values of kept entries in row-major order, and packed masks.

    Args:
        request: The request.
        complement: What its client sees outside its mask; None for zeros.

    Raises:
        InputError: If the request cannot be sent, or its options do not fit the complement.
    """
    check_mask(request.mask, request.theta, "the mask of a request")
    _check_seen(request, complement is not None)
    if not -INT_LIMIT < request.seed < INT_LIMIT:
        raise InputError(f"the seed of a request must fit into 64 bits; got {request.seed}; choose a smaller one")
    sent = {name: tensor for name, tensor in request.theta.items() if name not in request.frozen}
    parts = {f"theta/{name}": encode_values(tensor, request.mask.get(name)) for name, tensor in sent.items()}
    seen = complement and encode_complement(complement, request.theta, request.mask, request.frozen, parts)
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
        "complement": seen,
        "keeps_copy": request.keeps_copy,
    }
    return pack_frame(head, parts)


def decode_request(
    data: bytes | memoryview, like: Params, frozen: tuple[str, ...] = (), find_copy: FindCopy = lambda digest: None
) -> TrainRequest:
    """Return the request in a frame.

    Args:
        data: The frame.
        like: The parameters of the client's own model, with which the request's must agree.
        frozen: The names of the tensors that the client does not train, whose values are not sent.
        find_copy: Returns the client's copy of the model by its digest.

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
    options = decode_options(head.pop("options", None), theta, mask, parts)
    field = head.pop("complement", None)
    if field is not None:
        theta = decode_complement(field, theta, RequestParts(parts, like, mask, frozen, find_copy))
    request = TrainRequest(
        client=take_int(head, "client", 0),
        slot=take_int(head, "slot", 0),
        round=take_int(head, "round", 1),
        seed=take_int(head, "seed"),
        recipe=decode_recipe(head.pop("recipe", None)),
        shrink=take_bool(head, "shrink"),
        theta=theta,
        mask=mask,
        options=options,
        frozen=frozen,
        keeps_copy=take_bool(head, "keeps_copy"),
    )
    check_nothing_left(head, parts)
    _check_seen(request, field is not None)
    return request


def _check_seen(request: TrainRequest, sent: bool) -> None:
    """Raise InputError unless a request has a complement exactly if its options say that the client sees one."""
    if request.sees != sent:
        raise InputError(
            f"the client of a request sees {'values' if request.sees else 'zeros'} outside its mask, but the request"
            f" has {'a' if sent else 'no'} complement; send one exactly if the client sees it"
        )
    if request.keeps_copy and not request.sees:
        raise InputError("the client of a request keeps a copy of the model, which it does not see; send a complement")


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
