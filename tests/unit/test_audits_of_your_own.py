"""Audits of policies that derive from ours: what their plans give is counted, whatever the classes above them say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.audit import audit_rounds
from fedcover.audit.tally import EntryTally, UnitTally, may, tally_of
from fedcover.clients import cohort_of
from fedcover.params import Mask, Params
from fedcover.policies.base import RoundFeedback
from fedcover.policies.fedrolex import FedRolex
from fedcover.policies.heterofl import HeteroFL
from fedcover.policies.unit_policy import HeldUnits, UnitPolicy, unit_mask
from fedcover.structure.units import find_groups
from tests.laws.policy_networks import mlp
from tests.laws.test_audit import counted, least

State = dict[str, Tensor]
Masks = tuple[list[Mask], State]
CASE = mlp(6, 4)
KEEPS, ROUNDS = [0.5, 0.5], 4


class Masked(FedRolex):
    """Without the first input, whoever holds what."""

    def mask_of(self, theta: Params, client: fc.Client, units: HeldUnits) -> Mask:
        mask = dict(super().mask_of(theta, client, units))
        return {**mask, "0.weight": mask["0.weight"] & (torch.arange(5) > 0)}


class Planned(HeteroFL):
    """The whole model for everyone in every second round."""

    def plan(self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State) -> Masks:
        masks, state = super().plan(theta, cohort, this_round, state)
        return (masks if this_round.index % 2 else [{}] * len(cohort)), state


class Rated(HeteroFL):
    """Wider from round to round."""

    def rate(self, client: fc.Client, this_round: fc.Round) -> float:
        return min(1.0, this_round.index / 4)


class Resting(FedRolex):
    """The second client trains in every second round alone."""

    def training_options(
        self, theta: Params, cohort: Sequence[fc.Client], masks: Sequence[Mask], this_round: fc.Round, state: State
    ) -> list[fc.TrainingOptions | None]:
        return [None, fc.TrainingOptions(rest=True) if this_round.index % 2 else None]


class Fewer(FedRolex):
    """Only the first of the groups."""

    def bind(self, network: fc.ModelStructure) -> "Fewer":
        return replace(self, groups=super().bind(network).groups[:1])


class Watching(FedRolex):
    """What it holds next may depend on theta."""

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: fc.Round, state: State) -> State:
        return {"size": theta["0.weight"].abs().sum(1)}


@dataclass(frozen=True)
class Sitting(UnitPolicy):
    """The last unit of every group; it declares its own traits."""

    moves = False
    reads_theta = False
    holds_whole_units = True

    def hold(self, cohort: Sequence[fc.Client], this_round: fc.Round, state: State) -> tuple[list[HeldUnits], State]:
        return [tuple(unit_mask(group.size, [group.size - 1]) for group in self.groups)] * len(cohort), state


OWN = [Masked, Planned, Rated, Resting, Fewer, Sitting]


@pytest.mark.parametrize("make", OWN)
def test_an_audit_counts_what_the_plan_gives(make: type[UnitPolicy]) -> None:
    network = fc.trace(*CASE)
    found = audit_rounds(make(), network, KEEPS, ROUNDS, window=2)
    plain = counted(make(), CASE, KEEPS, ROUNDS)
    assert found.gamma_rounds == [least([each]) for each in plain]
    assert found.gamma_window == min(least(plain[at : at + 2]) for at in range(ROUNDS - 1))
    total = {name: torch.stack([each[name] for each in plain]).sum(0) for name in plain[0]}
    assert [layer.gamma for layer in found.layers] == [int(counts.min()) for counts in total.values()]
    shares = [float((counts > 0).double().mean()) for counts in total.values()]
    assert [layer.weights_covered for layer in found.layers] == pytest.approx(shares)
    held = sum(
        int((total[member.tensor] > 0).movedim(member.axis, 0).flatten(1).any(1).sum())
        for group in find_groups(network)
        for member in group.members
        if member.incoming
    )
    assert found.units_covered == pytest.approx(held / sum(group.size for group in find_groups(network)))


def test_what_a_class_says_holds_for_its_own_methods() -> None:
    assert may(Watching(), "reads_theta")
    assert not may(FedRolex(), "reads_theta")
    network = fc.trace(*CASE)
    assert [audit_rounds(make(), network, KEEPS, 2).reads_theta for make in OWN] == [
        True, True, True, True, True, False,
    ]  # fmt: skip
    assert not audit_rounds("heterofl", network, KEEPS, 2).reads_theta


def test_ours_and_those_with_a_hold_of_their_own_are_counted_by_units() -> None:
    network, cohort = fc.trace(*CASE), cohort_of(range(2), [1, 1], [fc.Budget(keep) for keep in KEEPS], "slot")
    for make in (fc.heterofl, fc.fedrolex, fc.random_submodels, fc.fedecover, fc.weight_complete, Sitting):
        assert type(tally_of(make().bind(network), network, cohort)) is UnitTally
    classes = [replace(client, classes=(0,)) for client in cohort]
    assert type(tally_of(fc.heterofl().bind(network), network, classes)) is EntryTally
