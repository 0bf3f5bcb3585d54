"""Audits of policies derived from built-in ones: their plans are counted, whatever their base classes declare."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.audit import audit_rounds
from fedcover.audit.tally import EntryTally, UnitTally, own_traits, tally_of
from fedcover.clients import cohort_of
from fedcover.params import Mask, Params
from fedcover.policies.base import ClientPlan, HeldUnits, RoundFeedback, Traits
from fedcover.policies.fedrolex import FedRolex
from fedcover.policies.heterofl import HeteroFL
from fedcover.policies.unit_policy import UnitPolicy, unit_mask
from fedcover.structure.units import find_groups
from tests.laws.policy_networks import mlp
from tests.laws.test_audit import counted, least

State = dict[str, Tensor]
Plans = tuple[list[ClientPlan], State]
CASE = mlp(6, 4)
KEEPS, ROUNDS = [0.5, 0.5], 4


class Masked(FedRolex):
    """The first input is never held."""

    def masks_of(self, theta: Params, clients: Sequence[fc.Client], units: Sequence[HeldUnits]) -> list[Mask]:
        masks = super().masks_of(theta, clients, units)
        return [{**mask, "0.weight": mask["0.weight"] & (torch.arange(5) > 0)} for mask in masks]


class Planned(HeteroFL):
    """The whole model for everyone in every second round."""

    def plan(self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State) -> Plans:
        plans, state = super().plan(theta, cohort, this_round, state)
        return (plans if this_round.index % 2 else [ClientPlan(client) for client in cohort]), state


class Rated(HeteroFL):
    """Wider from round to round."""

    def rate(self, client: fc.Client, this_round: fc.Round) -> float:
        return min(1.0, this_round.index / 4)


class Resting(FedRolex):
    """The second client trains only in every second round."""

    def plan(self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State) -> Plans:
        plans, state = super().plan(theta, cohort, this_round, state)
        return plans[: 1 if this_round.index % 2 else 2], state


class Fewer(FedRolex):
    """Only the first group is pruned."""

    def bind(self, structure: fc.ModelStructure) -> "Fewer":
        return replace(self, groups=super().bind(structure).groups[:1])


class Watching(FedRolex):
    """What is held next may depend on theta."""

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: fc.Round, state: State) -> State:
        return {"size": theta["0.weight"].abs().sum(1)}


@dataclass(frozen=True)
class Sitting(UnitPolicy):
    """The last unit of every group; it declares its own traits."""

    def traits(self) -> Traits:
        return replace(super().traits(), moves=False, reads_theta=False, hold=self.hold)

    def hold(self, cohort: Sequence[fc.Client], this_round: fc.Round, state: State) -> tuple[list[HeldUnits], State]:
        return [tuple(unit_mask(group.size, [group.size - 1]) for group in self.groups)] * len(cohort), state


OWN = [Masked, Planned, Rated, Resting, Fewer, Sitting]


@pytest.mark.parametrize("make", OWN)
def test_an_audit_counts_the_plan(make: type[UnitPolicy]) -> None:
    structure = fc.trace(*CASE)
    audit = audit_rounds(make(), structure, KEEPS, ROUNDS, window=2)
    plain = counted(make(), CASE, KEEPS, ROUNDS)
    assert audit.gamma_rounds == [least([each]) for each in plain]
    assert audit.gamma_window == min(least(plain[at : at + 2]) for at in range(ROUNDS - 1))
    total = {name: torch.stack([each[name] for each in plain]).sum(0) for name in plain[0]}
    assert [layer.gamma for layer in audit.layers] == [int(counts.min()) for counts in total.values()]
    shares = [float((counts > 0).double().mean()) for counts in total.values()]
    assert [layer.weights_covered for layer in audit.layers] == pytest.approx(shares)
    covered = sum(
        int((total[member.tensor] > 0).movedim(member.axis, 0).flatten(1).any(1).sum())
        for group in find_groups(structure)
        for member in group.members
        if member.incoming
    )
    assert audit.units_covered == pytest.approx(covered / sum(group.size for group in find_groups(structure)))


def test_traits_of_a_class_apply_to_its_own_methods() -> None:
    assert own_traits(Watching()).reads_theta
    assert not own_traits(FedRolex()).reads_theta
    structure = fc.trace(*CASE)
    assert [audit_rounds(make(), structure, KEEPS, 2).reads_theta for make in OWN] == [
        True, True, True, True, True, False,
    ]  # fmt: skip
    assert not audit_rounds("heterofl", structure, KEEPS, 2).reads_theta


def test_policies_that_declare_whole_units_are_counted_by_units() -> None:
    structure, cohort = fc.trace(*CASE), cohort_of(range(2), [1, 1], [fc.Budget(keep) for keep in KEEPS], "slot")
    for make in (fc.heterofl, fc.fedrolex, fc.random_submodels, fc.fedecover, fc.weight_complete, Sitting):
        assert type(tally_of(make().bind(structure), structure, cohort)) is UnitTally
    classes = [replace(client, classes=(0,)) for client in cohort]
    assert type(tally_of(fc.heterofl().bind(structure), structure, classes)) is EntryTally
