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
from fedcover.params import Mask, Params, flat_like, flat_mask, parts_of_flat, storage_of
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
    groups, new = trained_by_type(federation, state.theta), []
    means = [_mean(state, group) for group in groups]
    for plan in plans:
        options = plan.options or PLAIN
        in_turn = options.exits is not None and options.exits.in_turn
        if in_turn or options.has_beyond("regrow", "report", "exits", "complement"):
            raise InputError(
                f"control variates need plain masked SGD, but policy {federation.policy} changes local training; use"
                f" another policy, or control_variates=False"
            )
        shifts: Params = {}
        for group, mean in zip(groups, means, strict=True):
            if key_of(f"control/{plan.client.id}", group) in state.clients:
                shifts |= parts_of_flat(_shift(state, plan, group, mean), group)
        new.append(replace(plan, options=replace(options, shifts=shifts)) if shifts else plan)
    return new


def trained_by_type(federation: "Federation", theta: Params) -> list[Params]:
    """Return the tensors that are trained, in a group for each type; what is stored of a group is one flat tensor."""
    groups: dict[torch.dtype, Params] = {}
    for name, tensor in theta.items():
        if name not in federation.structure.frozen:
            groups.setdefault(tensor.dtype, {})[name] = tensor
    return list(groups.values())


def key_of(kind: str, group: Params) -> str:
    """Return the key in ``State.clients`` of what is stored of a group.

    >>> key_of("control/3", {"w": torch.zeros(2)})
    'control/3/float32'
    """
    return f"{kind}/{next(iter(group.values())).dtype}".replace("torch.", "")


def _stored(clients: Mapping[str, Tensor], kind: str, group: Params, like: Tensor) -> Tensor:
    """Return what is stored of a group, on the device of another tensor; zeros at first."""
    if (stored := clients.get(key_of(kind, group))) is not None:
        return stored.to(like.device)
    return torch.zeros_like(like, dtype=KINDS.get(kind.partition("/")[0], next(iter(group.values())).dtype))


def _inside(mask: Mask, group: Params) -> Tensor:
    """Return a mask over the entries of a group."""
    return flat_mask({name: mask[name] for name in group if name in mask}, group)


def _mean(state: State, group: Params) -> Tensor:
    """Return c: for each entry of a group the mean of c_n over the clients that have ever held it."""
    like = flat_like(group, group)
    return _stored(state.clients, "sum", group, like) / _stored(state.clients, "holders", group, like).clamp_min(1)


def _shift(state: State, plan: ClientPlan, group: Params, mean: Tensor) -> Tensor:
    """Return c - c_n of a group, 0 where the client has never held an entry and outside its mask."""
    control, trained = (
        _stored(state.clients, f"{kind}/{plan.client.id}", group, mean) for kind in ("control", "trained")
    )
    return torch.where(trained & _inside(plan.mask, group), mean.to(control.dtype) - control, 0.0)


def total_weight(steps: int, decay: float) -> float:
    """Return the sum of the weights with which the gradients of all steps move a client: v decays by ``decay``.

    >>> total_weight(4, 0.0), total_weight(2, 0.5)
    (4.0, 2.5)
    """
    return (steps - decay * (1 - decay**steps) / (1 - decay)) / (1 - decay)


class ControlUpdates:
    """The control variates after a round, from its updates as they arrive."""

    def __init__(self, federation: "Federation", planned: "PlannedRound") -> None:
        self._planned = planned
        self._groups = trained_by_type(federation, planned.state.theta)
        self._starts = [flat_like(group, group) for group in self._groups]
        self._plans = {plan.client.id: plan for plan in planned.plans}
        self._state = dict(planned.state.clients)

    def add(self, update: ClientUpdate) -> None:
        """Set c_n to the mean gradient of the client's steps, inside its mask."""
        plan, recipe = self._plans[update.client], self._planned.recipes[update.client]
        scale = recipe.lr * total_weight(recipe.steps(update.examples), recipe.decay)
        shifts = plan.options.shifts if plan.options else {}
        storage = storage_of(self._planned.state.theta)
        for group, start in zip(self._groups, self._starts, strict=True):
            mean = (start - flat_like(update.theta, group)) / scale
            if shifts:
                mean = mean - flat_like(shifts, group)
            inside = _inside(plan.mask, group)
            if update.mask is not plan.mask:  # the client may have readjusted its mask
                inside = inside & _inside(update.mask, group)
            self._set(update.client, group, mean.to(storage), inside.to(storage))

    def _set(self, client: int, group: Params, mean: Tensor, inside: Tensor) -> None:
        """Set c_n of a group, and keep the sum and the number of holders of every entry."""
        control, trained, total, holders = (
            _stored(self._state, kind, group, mean)
            for kind in (f"control/{client}", f"trained/{client}", "sum", "holders")
        )
        new = torch.where(inside, mean, control)
        self._state |= {
            key_of(f"control/{client}", group): new,
            key_of(f"trained/{client}", group): trained | inside,
            key_of("sum", group): total + (new.double() - control.double()),
            key_of("holders", group): holders + (inside & ~trained).to(torch.int32),
        }

    def state(self) -> dict[str, Tensor]:
        """Return the state of clients for the next round."""
        return self._state
