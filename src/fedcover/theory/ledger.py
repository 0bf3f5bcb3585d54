"""A certificate for every round of a run, and what must be carried from one round to the next for it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregate import ClientUpdate
from fedcover.params import Params
from fedcover.theory.bounds import Steps
from fedcover.theory.certificates import Facts, certificate
from fedcover.theory.estimates import Estimate, Spread, Summary

NEVER = torch.iinfo(torch.int16).max
"""The age of an entry that nobody has held yet."""
_NUMBERS = ("rounds", "shared", "smoothness", "gradient", "variance", "averaged", "gap")
_LAST = ("each", "averaged", "largest", "averaging", "shared")


@dataclass
class Ages:
    """For each entry the rounds since it was last held: how long a window covers the whole model.

    >>> ages = Ages()
    >>> for counts in ([2, 0], [0, 1], [3, 0]):
    ...     ages.add({"w": torch.tensor(counts)})
    >>> len(ages), ages.gamma_min()
    (2, 1)
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Take in the coverage of a round."""
        for name, held in counts.items():
            age = self.by_name.get(name, torch.full_like(held, NEVER - 1, dtype=torch.int16))
            self.by_name[name] = torch.where(held > 0, 0, (age + 1).clamp_max(NEVER - 1)).to(torch.int16)

    def __len__(self) -> int:
        """The least number of rounds, up to the present one, that together cover every entry."""
        return 1 + max(int(age.max()) for age in self.by_name.values() if age.numel())

    def gamma_min(self) -> int:
        """1 if some window covers every entry, 0 if an entry was never held."""
        return int(len(self) < NEVER)


class Ledger:
    """One round's entries: updates go in, then a certificate and the state for the next round come out."""

    def __init__(self, theta: Params, state: Mapping[str, Tensor], passes: int, iid: bool) -> None:
        self._theta, self._iid = theta, iid
        self._estimate, self._ages, self._gap = _restored(state, passes)
        self._spread = Spread(theta)
        self._steps: list[Steps] = []

    def add(self, update: ClientUpdate, steps: Steps) -> None:
        """Take in one client's update."""
        self._spread.add(update, steps)
        self._steps.append(steps)

    def close(
        self, facts: Facts, counts: Mapping[str, Tensor], new_theta: Params, train_loss: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The round's certificate as plain data, and the state for the next round.

        F(theta_1) - F_inf is taken to be the first training loss that is finite: a loss is not negative.
        """
        self._estimate.add(self._theta, self._spread, new_theta)
        self._ages.add(counts)
        if math.isnan(self._gap) and math.isfinite(train_loss):
            self._gap = train_loss
        known = not math.isnan(self._gap)
        constants = self._estimate.constants(self._gap, None if self._iid else facts.regions) if known else None
        longest = max(self._steps, key=lambda steps: steps.count)
        window = self._ages if facts.gamma_min == 0 else None
        made = certificate(facts, longest, constants, max(1, facts.round), self._iid, window)  # type: ignore[arg-type]
        return made.to_dict(), self._state()

    def _state(self) -> dict[str, Tensor]:
        estimate, last = self._estimate, self._estimate.last
        assert last is not None
        values = [getattr(estimate, name) for name in _NUMBERS[:-1]] + [self._gap]
        numbers = [math.nan if value is None else float(value) for value in values]
        state = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        state["last"] = torch.tensor([float(getattr(last, name)) for name in _LAST], dtype=torch.float64)
        for kind, tensors in (("mean", last.mean), ("held", last.held), ("moved", estimate.moved)):
            state |= {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
        return state | {f"age/{name}": age for name, age in self._ages.by_name.items()}


def _restored(state: Mapping[str, Tensor], passes: int) -> tuple[Estimate, Ages, float]:
    """What ``Ledger`` carried over, or a fresh start."""
    if not state:
        return Estimate(passes), Ages(), math.nan

    def part(kind: str) -> dict[str, Tensor]:
        return {name.partition("/")[2]: tensor for name, tensor in state.items() if name.startswith(f"{kind}/")}

    values = dict(zip(_NUMBERS, state["numbers"].tolist(), strict=True))
    last = dict(zip(_LAST, state["last"].tolist(), strict=True))
    shared = bool(last.pop("shared"))
    summary = Summary(part("mean"), part("held"), shared=shared, **last)
    known = {name: None if math.isnan(value) else value for name, value in values.items()}
    guesses = [known[name] for name in ("smoothness", "gradient", "variance", "averaged")]
    estimate = Estimate.resumed(passes, int(values["rounds"]), int(values["shared"]), guesses, summary, part("moved"))
    return estimate, Ages(part("age")), values["gap"]
