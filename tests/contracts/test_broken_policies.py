"""Policies that break one law of plans, training options, state or feedback: each is refused, and the law is named."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.params import Params
from tests.contracts.federations import federation

State = dict[str, Tensor]


class Broken(fc.Policy):
    """A policy that breaks one law of training options or feedback."""

    def __init__(self, law: str) -> None:
        self._law, self._calls = law, 0

    def start(self) -> State:
        return {"sum": torch.zeros(1)}

    def traits(self) -> fc.Traits:
        return fc.Traits(ignores_budgets=True)

    def plan(
        self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State
    ) -> tuple[list[fc.ClientPlan], State]:
        self._calls += 1
        options: dict[str, object] = {
            "no options": {"gains": 2.0},
            "no such tensor": fc.TrainingOptions(gains={"x": 2.0}),
            "not the same": fc.TrainingOptions(gains={"0.bias": float(self._calls)}),
            "moments": fc.TrainingOptions(moments={"velocity": {"0.bias": torch.ones(9)}}),
            "not nested": fc.TrainingOptions(widths=({}, {"0.bias": torch.arange(9) < 3})),
        }
        plans = [fc.ClientPlan(client, options=options.get(self._law)) for client in cohort]  # type: ignore[arg-type]
        lists: dict[str, object] = {
            "nobody trains": [],
            "no list": iter(plans),
            "masks only": [plan.mask for plan in plans],
            "another client": [fc.ClientPlan(fc.Client(77, 0, fc.Budget()))],
            "another budget": [replace(plan, client=replace(plan.client, budget=fc.Budget(0.1))) for plan in plans],
            "backwards": plans[::-1],
            "twice": [plans[0], *plans],
        }
        if self._law == "changes theta":
            theta["0.bias"].mul_(0.5)
        if self._law == "changes state in plan":
            state["sum"].add_(1)
        return lists.get(self._law, plans), state  # type: ignore[return-value]

    def observe(self, theta: Params, feedback: fc.RoundFeedback, this_round: fc.Round, state: State) -> State:
        self._calls += 1
        if self._law == "fails":
            raise RuntimeError("broken")
        if self._law == "changes state":
            state["sum"].add_(1)
        if self._law == "changes the average":
            theta["0.bias"].mul_(0.5)
        if self._law == "changes counts":
            feedback.counts["0.bias"].zero_()  # type: ignore[index]
        if self._law == "another state":
            return {"sum": torch.full((1,), float(self._calls))}
        if self._law == "odd state":
            return {"sum": 3}  # type: ignore[dict-item]
        if self._law == "global randomness":
            torch.rand(1)
        return state


LISTS = ["nobody trains", "no list", "masks only", "another client", "another budget", "backwards", "twice"]


@pytest.mark.parametrize(
    ("how", "law"),
    [
        *((how, "one plan each") for how in LISTS),
        ("no options", "options fit"),
        ("no such tensor", "options fit"),
        ("moments", "options fit"),
        ("not nested", "options fit"),
        ("not the same", "same seed, same masks"),
        ("changes theta", "theta is left alone"),
        ("changes the average", "theta is left alone"),
        ("changes state in plan", "state is left alone"),
        ("fails", "observes"),
        ("changes state", "state is left alone"),
        ("another state", "same seed, same state"),
        ("odd state", "state is tensors"),
        ("global randomness", "no global randomness"),
    ],
)
def test_check_policy_names_the_broken_law(how: str, law: str) -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))
    with pytest.raises(fc.InputError, match=f"breaks the law '{law}' in round 1"):
        fc.check_policy(Broken(how), net, torch.zeros(2, 7))
    fc.check_policy(Broken("none"), net, torch.zeros(2, 7))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nobody trains", "the plan of policy Broken for round 1 lets every client sit out; at least one must train"),
        ("no list", "is a list_iterator; return a list of fedcover.ClientPlan"),
        ("masks only", "contains a mappingproxy; return one fedcover.ClientPlan"),
        ("another client", "has Client.id=77,.* which is not in the cohort"),
        ("another budget", "which is not in the cohort"),
        ("backwards", "twice or out of order"),
        ("twice", "twice or out of order"),
        ("no options", "must be a fedcover.TrainingOptions, or None"),
        ("no such tensor", "the training options of policy Broken for client .* in round 1 names 'x'"),
        ("moments", "client .* in round 1 have moments, which only the federation sets; leave them out"),
        ("not nested", "nested"),
        ("changes theta", r"policy Broken changed theta\['0.bias'\] in place in round 1"),
        ("changes state in plan", r"policy Broken changed state\['sum'\] in place in round 1"),
        ("changes state", r"policy Broken changed state\['sum'\] in place in round 1"),
        ("changes the average", r"policy Broken changed theta\['0.bias'\] in place in round 1"),
        ("changes counts", r"policy Broken changed counts\['0.bias'\] in place in round 1"),
    ],
)
def test_a_federation_refuses_what_a_policy_must_not_do(how: str, message: str) -> None:
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    playing = fc.Federation(fc.Task(net), federation(Serial(shrink=False)).clients, Broken(how), cohort=2)
    with pytest.raises(fc.InputError, match=message):
        playing.run(1)
