"""A run in words and digests: its settings and its data."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedcover.aggregation.label_weights import label_skew
from fedcover.data import Examples
from fedcover.data.inputs import parts_of
from fedcover.engines.base import Engine
from fedcover.federation.checkpoint import digest_of
from fedcover.seeding import seeded
from fedcover.training.targets import FittedLoss

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

SAMPLED = 32
"""The number of items of a lazy data set that identify it, with the targets that it lists."""


def describe(federation: "Federation", engine: Engine) -> dict[str, Any]:
    """Return a federation and its engine as settings."""
    return {
        "seed": federation.seed,
        "cohort": federation.cohort,
        "aggregation": {"name": repr(federation.aggregator)},
        "assign": federation.assign,
        "certify": federation.certify,
        "engine": engine.name,
        "data": {"name": federation.clients.examples.name, "clients": len(federation.clients)},
        "model": {"name": type(federation.task.model).__name__},
        "policy": {"name": str(getattr(federation.policy, "name", federation.policy))},
        "budgets": {"by": federation.by, "items": [budget.exact for budget in federation.resolved_budgets]},
        "local": federation.local.settings(),
        **({} if federation.sampling.uniform else {"sampling": {"name": repr(federation.sampling)}}),
        **({"complement": {"name": repr(federation.complement)}} if federation.complement.sees else {}),
        **({"screening": asdict(federation.screening)} if federation.screening else {}),
        **({"require_robustness": robust} if (robust := federation.require_robustness) else {}),
    }


def digests(federation: "Federation", test: Examples | None) -> list[str]:
    """Return digests of theta_0, and of all data, their partition, clients' own tests and the name of the loss."""
    clients, train = federation.clients, federation.clients.examples
    tensors = _contents("", train)
    if test is not None:
        tensors |= _contents("test ", test)
    tensors["sizes"] = torch.tensor([clients.size(i) for i in range(len(clients))])
    tensors["parts"] = clients.parts
    if clients.tests is not None:
        tensors |= _contents("own test ", clients.tests.examples)
        tensors["own test sizes"] = torch.tensor([clients.tests.size(i) for i in range(len(clients))])
        tensors["own test parts"] = clients.tests.parts
    loss = federation.task.loss
    loss = loss.loss if isinstance(loss, FittedLoss) else loss
    return [digest_of(federation.theta0), digest_of(tensors, getattr(loss, "__qualname__", type(loss).__name__))]


def describe_data(federation: "Federation", test: Examples | None) -> dict[str, str]:
    """Return a digest of the data, and what a partition has in common with those of other seeds, as text."""
    clients = federation.clients
    tensors = _contents("", clients.examples) | ({} if test is None else _contents("test ", test))
    if clients.tests is not None:
        tensors |= _contents("own test ", clients.tests.examples)
    sizes = [clients.size(client) for client in range(len(clients))]
    described = {"digest": digest_of(tensors)[:16], "sizes": "equal" if max(sizes) - min(sizes) <= 1 else "unequal"}
    return described | ({"label skew": f"{label_skew(clients):.3f}"} if clients.shares_labels else {})


def _contents(prefix: str, examples: Examples) -> dict[str, Tensor]:
    """Return what identifies examples: all of them, or of a lazy data set some, and the targets that it lists."""
    rows = slice(None)
    if not examples.in_memory:
        rows = slice(None, None, -(-len(examples) // SAMPLED))
    with seeded(0, "digest"):
        inputs, labels = examples.read(rows)
    named = {f"{prefix}inputs{'/' if name else ''}{name}": part for name, part in parts_of(inputs).items()}
    return {**named, f"{prefix}labels": labels if examples.labels is None else examples.labels}
