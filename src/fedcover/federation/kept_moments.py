"""The moments of clients' optimizers, kept from round to round.

Every entry has its own history, with its own count of steps: a round changes a client's moments only inside the mask
that it returned, and outside it they stay as they were. The server keeps the moments of all clients in its state, so
that a run resumes to the same bits and a client needs no memory of its own; they are sent to the client and back.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.federation.checkpoint import State
from fedcover.federation.planned_round import PlannedRound
from fedcover.params import Params, prune, storage_of
from fedcover.policies.base import ClientPlan
from fedcover.training.options import PLAIN
from fedcover.training.recipes import Recipe


def with_moments(recipe: Recipe, state: State, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans with their clients' moments, inside their masks; a client's first round has none."""
    new = []
    for plan in plans:
        moments = {m: prune(_tensors(state, plan.client.id, m), plan.mask) for m in recipe.moment_names}
        first = not any(moments.values())
        new.append(plan if first else replace(plan, options=replace(plan.options or PLAIN, moments=moments)))
    return new


def _tensors(state: State, client: int, moment: str) -> Params:
    """Return one moment of a client's tensors; none before its first round."""
    keys = {name: _key(client, moment, name) for name in state.theta}
    return {n: state.clients[key].to(state.theta[n].device) for n, key in keys.items() if key in state.clients}


def _key(client: int, moment: str, name: str) -> str:
    return f"{client}/{moment}/{name}"


class MomentUpdates:
    """The moments of clients after a round, from its updates as they arrive."""

    def __init__(self, planned: PlannedRound) -> None:
        self._theta, self._state = planned.state.theta, dict(planned.state.clients)

    def add(self, update: ClientUpdate) -> None:
        """Replace the client's moments inside its mask."""
        storage = storage_of(self._theta)
        for moment, tensors in (update.moments or {}).items():
            for name, tensor in tensors.items():
                key = _key(update.client, moment, name)
                new = tensor.to(storage, copy=True)  # not a view of a stack, which would keep the whole stack in memory
                if name in update.mask:
                    before = self._state.get(key, torch.zeros_like(new)).to(storage)
                    new = torch.where(update.mask[name].to(storage), new, before)
                self._state[key] = new

    def state(self) -> dict[str, Tensor]:
        """Return the moments of all clients, by "ID/MOMENT/TENSOR"."""
        return self._state
