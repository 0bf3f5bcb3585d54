"""SCAFFOLD: control variates that correct the drift of clients, inside their masks.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020. c_n is the mean
gradient of client n when it last trained, and c the mean of the c_n. A client adds c - c_n to its gradients.

Under partial coverage every entry has its own history. c_n changes only inside the mask that the client trained under;
outside it stays as it was. c is the mean over the clients that have ever held an entry, and an entry that a client
trains for the first time is not corrected. The server keeps all c_n, so clients receive c - c_n and send nothing more.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError
from fedcover.federation.checkpoint import State
from fedcover.params import Mask, Params, device_of, storage_of
from fedcover.policies.base import ClientPlan
from fedcover.training.options import PLAIN
from fedcover.training.recipes import LocalSGD, Recipe

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation
    from fedcover.federation.planned_round import PlannedRound


def uses_control_variates(recipe: Recipe) -> bool:
    """Return whether a recipe asks for control variates."""
    return isinstance(recipe, LocalSGD) and recipe.control_variates


def corrected(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans, with c - c_n added to the clients' gradients."""
    means, new = _means(state), []
    for plan in plans:
        options = plan.options or PLAIN
        if options.has_beyond("regrow", "report", "complement"):
            raise InputError(
                f"control variates need plain masked SGD, but policy {federation.policy} changes local training; use"
                f" another policy, or control_variates=False"
            )
        shifts = {
            name: _shift(state, plan, name, mean)
            for name, mean in means.items()
            if f"control/{plan.client.id}/{name}" in state.clients
        }
        new.append(replace(plan, options=replace(options, shifts=shifts)) if shifts else plan)
    return new


def _means(state: State) -> Params:
    """Return c: for each entry the mean of c_n over the clients that have ever held it."""
    device, names = device_of(state.theta), [name for name in state.theta if f"sum/{name}" in state.clients]
    sums, holders = ([state.clients[f"{kind}/{name}"].to(device) for name in names] for kind in ("sum", "holders"))
    return {name: s / n.clamp_min(1) for name, s, n in zip(names, sums, holders, strict=True)}


def _shift(state: State, plan: ClientPlan, name: str, mean: Tensor) -> Tensor:
    """Return c - c_n of one tensor, 0 where the client has never held an entry and outside its mask."""
    of = f"{plan.client.id}/{name}"
    trained, control = (state.clients[f"{kind}/{of}"].to(mean.device) for kind in ("trained", "control"))
    shift = torch.where(trained, mean.to(control.dtype) - control, 0.0)
    return torch.where(plan.mask[name], shift, 0.0) if name in plan.mask else shift


def total_weight(steps: int, decay: float) -> float:
    """Return the sum of the weights with which the gradients of all steps move a client: v decays by ``decay``.

    >>> total_weight(4, 0.0), total_weight(2, 0.5)
    (4.0, 2.5)
    """
    return (steps - decay * (1 - decay**steps) / (1 - decay)) / (1 - decay)


class ControlUpdates:
    """The control variates after a round, from its updates as they arrive."""

    def __init__(self, federation: "Federation", planned: "PlannedRound") -> None:
        self._planned, self._federation = planned, federation
        self._plans = {plan.client.id: plan for plan in planned.plans}
        self._state = dict(planned.state.clients)

    def add(self, update: ClientUpdate) -> None:
        """Set c_n to the mean gradient of the client's steps, inside its mask."""
        plan, recipe = self._plans[update.client], self._planned.recipes[update.client]
        scale = recipe.lr * total_weight(recipe.steps(update.examples), recipe.decay)
        shifts = plan.options.shifts if plan.options else {}
        storage = storage_of(self._planned.state.theta)
        for name, before in self._planned.state.theta.items():
            if name in self._federation.structure.frozen:
                continue
            mean = (before - update.theta[name].to(before)) / scale
            if name in shifts:
                mean = mean - shifts[name]
            self._set(update.client, name, mean.to(storage), _stays(plan.mask, update.mask, mean, name).to(storage))

    def _set(self, client: int, name: str, mean: Tensor, inside: Tensor) -> None:
        """Set c_n of one tensor, and keep the sum and the number of holders of every entry."""
        state, key = self._state, f"{client}/{name}"

        def stored(name: str, dtype: torch.dtype) -> Tensor:
            return state[name].to(mean.device) if name in state else torch.zeros_like(mean, dtype=dtype)

        control, trained = stored(f"control/{key}", mean.dtype), stored(f"trained/{key}", torch.bool)
        total, holders = stored(f"sum/{name}", torch.double), stored(f"holders/{name}", torch.int32)
        new = torch.where(inside, mean, control)
        state[f"sum/{name}"] = total + (new.double() - control.double())
        state[f"holders/{name}"] = holders + (inside & ~trained).to(torch.int32)
        state[f"control/{key}"], state[f"trained/{key}"] = new, trained | inside

    def state(self) -> dict[str, Tensor]:
        """Return the state of clients for the next round."""
        return self._state


def _stays(planned: Mask, returned: Mask, like: Tensor, name: str) -> Tensor:
    """Return the entries that a client held during the whole round; it may have readjusted its mask."""
    inside = torch.ones_like(like, dtype=torch.bool)
    for mask in (planned, returned):
        if name in mask:
            inside = inside & mask[name].to(like.device)
    return inside
