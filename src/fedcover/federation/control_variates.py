"""SCAFFOLD: control variates that correct the drift of clients, inside their masks.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020. c_n is the mean
gradient of client n when it last trained, and c the mean of the c_n. A client adds c - c_n to its gradients.

Under partial coverage every entry has its own history. c_n changes only inside the mask that the client trained under;
outside it stays as it was. c is the mean over the clients that have ever held an entry, and an entry that a client
trains for the first time is not corrected. The server keeps all c_n, so clients receive c - c_n and send nothing more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.federation.checkpoint import State
from fedcover.params import Mask, Params, flat_mask, flat_values, parts_of_flat, spans_of, storage_of
from fedcover.policies.base import ClientPlan
from fedcover.training.options import PLAIN
from fedcover.training.recipes import LocalSGD, Recipe

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation
    from fedcover.federation.planned_round import PlannedRound

KINDS = {"sum": torch.double, "holders": torch.int32, "trained": torch.bool}
"""The types of what is stored beside control variates, which have the type of the parameters."""


def uses_control_variates(recipe: Recipe) -> bool:
    """Return whether a recipe asks for control variates."""
    return isinstance(recipe, LocalSGD) and recipe.control_variates


def corrected(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans, with c - c_n added to the clients' gradients."""
    spans, new = _spans(federation, state.theta), []
    means = [_mean(state, span) for span in spans]
    for plan in plans:
        options = plan.options or PLAIN
        in_turn = options.exits is not None and options.exits.in_turn
        if in_turn or options.has_beyond("regrow", "report", "exits", "complement"):
            raise InputError(
                f"control variates need plain masked SGD, but policy {federation.policy} changes local training; use"
                f" another policy, or control_variates=False"
            )
        shifts: Params = {}
        for span, mean in zip(spans, means, strict=True):
            if f"control/{plan.client.id}/{next(iter(span))}" in state.clients:
                shifts |= parts_of_flat(_shift(state, plan, span, mean), span)
        new.append(replace(plan, options=replace(options, shifts=shifts)) if shifts else plan)
    return new


def _spans(federation: "Federation", theta: Params) -> list[Params]:
    """Return the tensors that are trained, in spans of one type that are processed at once."""
    trained = {name: tensor for name, tensor in theta.items() if name not in federation.structure.frozen}
    types = dict.fromkeys(tensor.dtype for tensor in trained.values())
    return [span for dtype in types for span in spans_of({n: t for n, t in trained.items() if t.dtype == dtype})]


def _stored(clients: Mapping[str, Tensor], kind: str, span: Params, like: Tensor) -> Tensor:
    """Return what is stored of the tensors of a span, as one tensor on the device of another; zeros at first."""
    dtype = KINDS.get(kind.partition("/")[0], next(iter(span.values())).dtype)
    if f"{kind}/{next(iter(span))}" not in clients:
        return torch.zeros_like(like, dtype=dtype)
    return flat_values({name: clients[f"{kind}/{name}"].to(like.device) for name in span}, dtype)


def _inside(mask: Mask, span: Params) -> Tensor:
    """Return a mask over the entries of a span."""
    return flat_mask({name: mask[name] for name in span if name in mask}, span)


def _mean(state: State, span: Params) -> Tensor:
    """Return c: for each entry of a span the mean of c_n over the clients that have ever held it."""
    like = _flat(span, span)
    return _stored(state.clients, "sum", span, like) / _stored(state.clients, "holders", span, like).clamp_min(1)


def _shift(state: State, plan: ClientPlan, span: Params, mean: Tensor) -> Tensor:
    """Return c - c_n of a span, 0 where the client has never held an entry and outside its mask."""
    control, trained = (
        _stored(state.clients, f"{kind}/{plan.client.id}", span, mean) for kind in ("control", "trained")
    )
    return torch.where(trained & _inside(plan.mask, span), mean.to(control.dtype) - control, 0.0)


def _flat(tensors: Mapping[str, Tensor], span: Params) -> Tensor:
    """Return the entries of tensors of a span as one tensor, on the span's device."""
    dtype = next(iter(span.values())).dtype
    return flat_values({name: tensors[name].to(like.device) for name, like in span.items()}, dtype)


def total_weight(steps: int, decay: float) -> float:
    """Return the sum of the weights with which the gradients of all steps move a client: v decays by ``decay``.

    >>> total_weight(4, 0.0), total_weight(2, 0.5)
    (4.0, 2.5)
    """
    return (steps - decay * (1 - decay**steps) / (1 - decay)) / (1 - decay)


class ControlUpdates:
    """The control variates after a round, from its updates as they arrive."""

    def __init__(self, federation: "Federation", planned: "PlannedRound") -> None:
        self._planned, self._spans = planned, _spans(federation, planned.state.theta)
        self._plans = {plan.client.id: plan for plan in planned.plans}
        self._state = dict(planned.state.clients)

    def add(self, update: ClientUpdate) -> None:
        """Set c_n to the mean gradient of the client's steps, inside its mask."""
        plan, recipe = self._plans[update.client], self._planned.recipes[update.client]
        scale = recipe.lr * total_weight(recipe.steps(update.examples), recipe.decay)
        shifts = plan.options.shifts if plan.options else {}
        storage = storage_of(self._planned.state.theta)
        for span in self._spans:
            mean = (_flat(span, span) - _flat(update.theta, span)) / scale
            if shifts:
                mean = mean - _flat(shifts, span)
            inside = _inside(plan.mask, span)
            if update.mask is not plan.mask:  # the client may have readjusted its mask
                inside = inside & _inside(update.mask, span)
            self._set(update.client, span, mean.to(storage), inside.to(storage))

    def _set(self, client: int, span: Params, mean: Tensor, inside: Tensor) -> None:
        """Set c_n of a span, and keep the sum and the number of holders of every entry."""
        control, trained, total, holders = (
            _stored(self._state, kind, span, mean)
            for kind in (f"control/{client}", f"trained/{client}", "sum", "holders")
        )
        new = torch.where(inside, mean, control)
        after = {
            f"control/{client}": new,
            f"trained/{client}": trained | inside,
            "sum": total + (new.double() - control.double()),
            "holders": holders + (inside & ~trained).to(torch.int32),
        }
        for kind, flat in after.items():
            self._state |= {f"{kind}/{name}": part for name, part in parts_of_flat(flat, span).items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state of clients for the next round."""
        return self._state
