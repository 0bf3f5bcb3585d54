"""Budgets in any unit: whatever a policy gives to clients, and whatever they see outside it, no client exceeds them."""

import math
import re
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedcover as fc
from fedcover.calibration import Calibration
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.errors import InputError
from fedcover.federation.complements import complement_of
from fedcover.masks.cost import Cost, cost_of
from fedcover.policies.registry import named_policy
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.complements import Complement
from fedcover.training.recipes import Recipe
from tests.conftest import POLICIES

STEPS = 3
SEEN: list[Complement] = [fc.Frozen(), fc.Quantized(8), fc.Quantized(2), fc.Kept()]
RECIPES: list[Recipe] = [
    fc.LocalSGD(1, 4),
    fc.LocalAdam(1, 4, keep_moments=True),
    fc.LocalSGD(1, 4, control_variates=True),
]
CHANGES_TRAINING = ("HeteroFL", "FjORD", "FIARSE")
"""Policies whose training options are not for control variates, and in part not for complements."""


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU(),
        nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3),
    )  # fmt: skip


def chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 40), nn.ReLU(), nn.Linear(40, 1), nn.ReLU(), nn.Linear(1, 3))


NETWORKS = {"convolutions": convolutions, "chain": chain}


@cache
def problem(name: str) -> tuple[nn.Module, fc.Population, ModelStructure]:
    torch.manual_seed(0)
    inputs = torch.randn(24, 1, 6, 6)
    clients = fc.data.iid((inputs, torch.arange(24) % 3), clients=4, seed=0)
    model = NETWORKS[name]()
    return model, clients, trace(model, inputs)


def spent(cost: Cost, unit: str, device: Calibration, keep: float) -> float:
    if unit == "seconds":
        return device.seconds_of_round(keep, STEPS, cost.bytes_down, cost.bytes_up)
    return cost.bytes_down + cost.bytes_up if unit == "bytes" else float(getattr(cost, unit))


def device_for(structure: ModelStructure, units: bool, complement: bool) -> Calibration:
    size = cost_of(structure, {}).parameters
    return Calibration("a test", "a test", size, units, 4, ((0.5, 1.5), (1.0, 2.0)), 1e3, 5e2, complement=complement)


def costs_as_recorded(federation: fc.Federation, trains: bool) -> list[Cost]:
    """Return the costs of all clients in some rounds, as records have them.

    Clients train only if they exchange what they keep between rounds. FedDST and PruneFL ask for more in round 10.
    """
    state = federation.start()
    first = federation.begin_round(state)
    if trains:
        state, _ = federation.end_round(first, federation.engine.train(first.jobs))
        return [*first.costs, *federation.begin_round(state).costs]
    later = [replace(state, round=index - 1, policy=first.policy_state) for index in (2, 10)]
    return [*first.costs, *(cost for one in later for cost in federation.begin_round(one).costs)]


@st.composite
def choices(draw: st.DrawFn) -> tuple[str, Complement | None]:
    """Draw a policy, and a complement that it allows; None for its default."""
    name = draw(st.sampled_from(sorted(POLICIES)))
    traits = named_policy(name).traits()
    pruned_only = traits.prunes_global_model or name in CHANGES_TRAINING[:2]
    return name, None if pruned_only else draw(st.sampled_from([None, *SEEN]))


@settings(max_examples=60)
@given(
    st.sampled_from(list(NETWORKS)), choices(), st.sampled_from(["parameters", "macs", "bytes", "seconds"]),
    st.floats(0.02, 1.2), st.sampled_from([*[RECIPES[0]] * 8, *RECIPES[1:]]),
)  # fmt: skip
def test_no_client_exceeds_its_budget(
    network: str, choice: tuple[str, Complement | None], unit: str, part: float, recipe: Recipe
) -> None:
    (name, complement), (model, clients, structure) = choice, problem(network)
    policy = named_policy(name)
    recipe = RECIPES[0] if name in CHANGES_TRAINING else recipe
    seen, message = complement_of(complement, policy), ""
    try:
        costs = cost_model_of(policy, structure, recipe, seen)
        device = device_for(structure, policy.bind(structure).part_sizes(structure).units, seen.sees)
        amount = part * spent(cost_of(structure, {}), unit, device, 1.0)
        keep = costs.keep_for(unit, amount, device, STEPS)
    except InputError as error:
        message = str(error)
    if message:
        assert refusal(message, name)
        return
    if policy.traits().ignores_budgets and keep < 1:
        return  # such a run is refused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federation = fc.Federation(
            model, clients, policy, [fc.Budget(keep)] * 3, local=recipe, cohort=3, engine=fc.Serial(),
            complement=seen,
        )  # fmt: skip
        for cost in costs_as_recorded(federation, trains=recipe is not RECIPES[0]):
            assert spent(cost, unit, device, keep) <= amount * (1 + 1e-12)


def refusal(message: str, policy: str) -> bool:
    """Return whether a message refuses a budget, and names what to do."""
    return bool(
        re.search(r"give at least [\d.]+", message)
        or ("give fractions" in message and policy in ("S-GaP", "P-GaP"))
        or ("give budgets in parameters or bytes" in message and policy == "depth_windows")
    )


@pytest.mark.parametrize("complement", SEEN, ids=str)
@pytest.mark.parametrize("policy", ["random_weights", "random_units", "depth_windows", "NP"])
def test_a_refused_budget_of_bytes_names_the_least_that_is_enough(policy: str, complement: Complement) -> None:
    _, _, structure = problem("convolutions")
    costs = cost_model_of(named_policy(policy), structure, RECIPES[0], complement)
    with pytest.raises(InputError, match="give at least") as caught:
        costs.keep_for("bytes", 10)
    least = int(re.findall(r"give at least (\d+)", str(caught.value))[0])
    assert costs.keep_for("bytes", least) > 0
    with pytest.raises(InputError, match=f"give at least {least}"):
        costs.keep_for("bytes", least - 1)
    sent = sum(complement.bytes_down(torch.Size(shape), math.prod(shape)) for shape in structure.shapes.values())
    assert least > 0.9 * sent


@pytest.mark.parametrize("policy", ["random_weights", "disjoint_units", "FedPLT", "depth_windows", "FIARSE", "NP"])
@pytest.mark.parametrize("complement", SEEN, ids=str)
def test_budgets_of_bytes_are_used(policy: str, complement: Complement) -> None:
    """The bound is close to what clients spend, or budgets would buy less than they can."""
    _, clients, _ = problem("chain")
    wide = nn.Sequential(nn.Flatten(), nn.Linear(36, 200), nn.ReLU(), nn.Linear(200, 50), nn.ReLU(), nn.Linear(50, 3))
    structure = trace(wide, torch.zeros(2, 1, 6, 6))
    full = cost_of(structure, {})
    amount = 0.8 * (full.bytes_down + full.bytes_up)
    keep = cost_model_of(named_policy(policy), structure, RECIPES[0], complement).keep_for("bytes", amount)
    federation = fc.Federation(
        wide, clients, policy, [fc.Budget(keep)] * 3, cohort=3, engine=fc.Serial(), complement=complement
    )
    most = max(cost.bytes_down + cost.bytes_up for cost in federation.begin_round(federation.start()).costs)
    assert 0.95 * amount < most <= amount


def test_the_forward_pass_is_whole_with_a_complement() -> None:
    _, _, structure = problem("convolutions")
    costs = cost_model_of(named_policy("random_weights"), structure, RECIPES[0], fc.Frozen())
    assert costs.keep_for("macs", structure.work) == 1.0
    with pytest.raises(InputError, match=rf"complement Frozen\(\) the forward pass .* at least {structure.work:.0f}"):
        costs.keep_for("macs", structure.work - 1)


@pytest.mark.parametrize(("policy", "option"), [("random_weights", ""), ("FedPLT", " --whole-units")])
def test_a_calibration_without_a_complement_does_not_predict_its_seconds(policy: str, option: str) -> None:
    _, _, structure = problem("convolutions")
    units = bool(option)
    costs = cost_model_of(named_policy(policy), structure, RECIPES[0], fc.Frozen())
    with pytest.raises(InputError, match=rf"see zeros .* `fedcover calibrate steps{option} --complement"):
        costs.keep_for("seconds", 3, device_for(structure, units, complement=False), STEPS)
    pruned = cost_model_of(named_policy("NP" if units else "WP"), structure, RECIPES[0], fc.Zero())
    with pytest.raises(InputError, match=rf"see the whole model .* `fedcover calibrate steps{option} --out"):
        pruned.keep_for("seconds", 3, device_for(structure, units, complement=True), STEPS)
