"""Policies by depth: laws, what a level holds, evaluation, budgets in other units, and refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.models import MLP
from fedcover.params import count, params_of, put_params
from fedcover.policies import POLICIES as ALL_POLICIES
from fedcover.structure.exits import ExitModel, with_exits
from fedcover.structure.trace import trace
from fedcover.training.complements import Zero
from fedcover.training.exits import Exits
from tests.conftest import POLICIES as OTHERS
from tests.conftest import small_data
from tests.contracts.depth_federations import KINDS, NETWORKS, POLICIES, TOGETHER, parts, playing, policy_for
from tests.contracts.federations import serial
from tests.laws.strategies import same
from tests.networks import ExitConvolutions, ExitNet

KEEPS = (1.0, 0.75, 0.5, 0.25)


def test_these_are_all_policies_by_depth() -> None:
    assert {*POLICIES, *OTHERS} == set(ALL_POLICIES)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_by_depth_keep_every_law(name: str, network: str) -> None:
    make, example = NETWORKS[network]
    fc.check_policy(policy_for(name, network), make(), example)


def masks_by_keep(policy: fc.Policy, model: nn.Module, example: Tensor) -> dict[float, fc.ClientPlan]:
    bound, cohort = policy.bind(trace(model, example)), [fc.Client(i, i, fc.Budget(k)) for i, k in enumerate(KEEPS)]
    plans, _ = bound.plan(params_of(model), cohort, fc.Round(1, 0), {})
    return dict(zip(KEEPS, plans, strict=True))


def left_by(plan: fc.ClientPlan, model: nn.Module) -> set[str]:
    return {name for name in params_of(model) if name not in plan.mask or bool(plan.mask[name].any())}


def test_a_level_of_depthfl_holds_the_first_blocks_and_their_exits_within_its_budget() -> None:
    model, total = ExitNet(), count(params_of(ExitNet()))
    depths = {1.0: 6, 0.75: 4, 0.5: 2, 0.25: 1}
    for keep, plan in masks_by_keep(fc.depthfl(), model, torch.zeros(2, 6)).items():
        depth = depths[keep]
        blocks = {f"{part}.{i}.{kind}" for part in ("blocks", "heads") for i in range(depth) for kind in KINDS}
        assert left_by(plan, model) == blocks | {"stem.weight", "stem.bias"}
        assert plan.options is not None
        assert plan.options.exits is not None
        assert plan.options.exits.numbers == tuple(range(1, depth + 1))
        assert count(params_of(model), plan.mask) <= keep * total
        deeper = 312 + 16 * 16 + 16 + 3 * 16 + 3  # no deeper one fits
        assert keep == 1 or count(params_of(model), plan.mask) + deeper - 312 > keep * total


def test_a_level_of_inclusivefl_holds_one_exit_only() -> None:
    model = ExitNet()
    for keep, plan in masks_by_keep(
        fc.inclusivefl(depths=(0, 0.5, 0.6, 0.7, 0.8, 1)), model, torch.zeros(2, 6)
    ).items():
        depth = {1.0: 6, 0.75: 4, 0.5: 2, 0.25: 1}[keep]
        blocks = {f"blocks.{i}.{kind}" for i in range(depth) for kind in KINDS}
        head = {f"heads.{depth - 1}.{kind}" for kind in KINDS}
        assert left_by(plan, model) == blocks | head | {"stem.weight", "stem.bias"}
        assert plan.options is not None
        assert plan.options.exits == Exits((depth,))


def test_a_level_of_scalefl_holds_the_first_units_of_the_first_blocks() -> None:
    model = ExitConvolutions()
    for keep, plan in masks_by_keep(fc.scalefl(), model, torch.zeros(2, 1, 6, 6)).items():
        depth, units = {1.0: (3, 8), 0.75: (2, 6), 0.5: (1, 4), 0.25: (1, 2)}[keep]
        assert left_by(plan, model) == {
            name for name in params_of(model) if name.startswith("stem") or int(name.split(".")[1]) < depth
        }
        assert plan.options is not None
        assert plan.options.exits is not None
        assert plan.options.exits.numbers == tuple(range(1, depth + 1))
        assert sum(plan.options.exits.weights) == pytest.approx(1)
        first = plan.mask.get("heads.0.weight", torch.ones(3, 3, dtype=torch.bool)).any(0)
        assert first.tolist() == [i < -(-keep * 3 // 1) for i in range(3)]
        assert plan.options.gains == ({} if keep == 1 else dict.fromkeys(plan.options.gains, 1 / keep))
        assert keep == 1 or f"convs.{depth - 1}.weight" in plan.options.gains
        assert units  # widths of the last stage, for the reader


def test_levels_can_be_fixed() -> None:
    plans = masks_by_keep(fc.depthfl(depths=(0.25, 0.5, 0.6, 0.7, 0.75, 1)), ExitNet(), torch.zeros(2, 6))
    exits = {
        keep: plan.options.exits.numbers[-1] for keep, plan in plans.items() if plan.options and plan.options.exits
    }
    assert exits == {1.0: 6, 0.75: 5, 0.5: 2, 0.25: 1}
    scaled = fc.scalefl(depths=(0, 0.5, 1), widths=(0.7, 0.7, 1))
    plans = masks_by_keep(scaled, ExitConvolutions(), torch.zeros(2, 1, 6, 6))
    assert int(plans[0.5].mask["convs.1.weight"].any(1).any(1).any(1).sum()) == 5  # ceil(0.7 * 6)
    assert not plans[1.0].mask


def test_distillation_of_depthfl_rises_over_the_rounds() -> None:
    policy = fc.depthfl()
    weights = [policy.weight_in(fc.Round(index, 0)) for index in (1, 151, 301, 900)]
    assert weights == pytest.approx([0.006737947, 0.2865048, 1.0, 1.0])
    assert fc.depthfl(ramp_up=0).weight_in(fc.Round(1, 0)) == 1


def test_runs_of_fedepth_fit_into_memory() -> None:
    model, example = ExitNet(), torch.zeros(2, 6)
    policy = fc.fedepth(batch_size=512).bind(trace(model, example))
    for keep in (0.25, 0.4, 0.6, 0.8, 1.0):
        runs = policy.runs(fc.Budget(keep))
        blocks = [block for first, last in runs for block in range(first, last + 1)]
        assert blocks == sorted(set(blocks))
        for first, last in runs:
            assert policy.memory[first - 1][last - first] <= keep
            assert last == 6 or policy.memory[first - 1][last - first + 1] > keep  # the next block does not fit
        assert all(policy.memory[block - 1][0] > keep for block in range(1, 7) if block not in blocks)
        (plan,), _ = policy.plan(params_of(model), [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), {})
        trained = {f"blocks.{block - 1}.weight" for block in blocks} | {f"heads.{last - 1}.weight" for _, last in runs}
        assert {name for name in left_by(plan, model) if name.endswith("weight")} - {"stem.weight"} == trained
        assert ("stem.weight" in left_by(plan, model)) == (1 in blocks)
    assert policy.runs(fc.Budget(1.0)) == ((1, 6),)
    assert policy.runs(fc.Budget(0.25))[0][0] == 2  # the first block needs more, with the layer before it
    with pytest.raises(
        fc.InputError, match=r"budget '0.01' is too small .*: the smallest block needs .* raise the bud"
    ):
        policy.runs(fc.Budget(0.01))
    with pytest.raises(fc.InputError, match="is a share of the memory"):
        policy.part_sizes(trace(ExitNet(), torch.zeros(2, 6)))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_shallow_client_is_evaluated_by_its_own_exits(name: str) -> None:
    federation, test = playing(serial(), "linear", POLICIES[name]()), small_data(60, seed=9)
    history = federation.run(3)
    theta, plans = history.theta, federation.begin_round(federation.start()).plans
    assert theta is not None
    for plan in plans[2:]:
        assert plan.options is not None
        assert plan.options.exits is not None
        numbers = plan.options.exits.numbers
        model = copy.deepcopy(with_exits(federation.task.model, numbers))
        assert isinstance(model, ExitModel)
        assert model.prediction == ("mean" if name == "DepthFL" else "last")
        put_params(model, {n: t * plan.mask[n] if n in plan.mask else t for n, t in theta.items()})
        expected = float((model.eval()(test.inputs).argmax(1) == test.labels).double().mean())
        assert federation.evaluator.accuracy_of(theta, plan.mask, test) == pytest.approx(expected)


@pytest.mark.parametrize("unit", ["parameters", "macs", "bytes"])
@pytest.mark.parametrize("name", TOGETHER)
def test_budgets_in_other_units_buy_the_deepest_sub_model_that_fits(name: str, unit: str) -> None:
    model, example = ExitNet(), torch.zeros(2, 6)
    structure, policy = trace(model, example), POLICIES[name]()
    costs = cost_model_of(policy, structure, fc.LocalSGD(), Zero())
    plans = masks_by_keep(policy, model, example)
    for plan in plans.values():
        cost = fc.cost_of(structure, plan.mask)
        amounts = {"parameters": cost.parameters, "macs": cost.macs, "bytes": cost.bytes_down + cost.bytes_up}
        keep = costs.keep_for(unit, amounts[unit])
        bound = policy.bind(structure)
        (other,), _ = bound.plan(params_of(model), [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), {})
        assert same_mask(other.mask, plan.mask)
    with pytest.raises(fc.InputError, match="its layers up to the first exit, takes more"):
        costs.keep_for(unit, 5)
    with pytest.raises(fc.InputError, match="needs a calibration"):
        costs.keep_for("seconds", 10)


def same_mask(a: object, b: object) -> bool:
    return same(dict(a), dict(b))  # type: ignore[call-overload]


@pytest.mark.parametrize("name", TOGETHER)
def test_what_cannot_be_done_is_refused_with_the_reason(name: str) -> None:
    example, make = torch.zeros(2, 6), POLICIES[name]
    with pytest.raises(fc.InputError, match="MLP has no exits; use the model resnet18_exits"):
        make().bind(trace(MLP(), torch.zeros(2, 1, 28, 28)))
    with pytest.raises(fc.InputError, match="leave out only and skip"):
        ALL_POLICIES[name](skip=["stem"]).bind(trace(ExitNet(), example))
    with pytest.raises(fc.InputError, match="6 exits of ExitNet; got 2"):
        ALL_POLICIES[name](depths=(0.5, 1)).bind(trace(ExitNet(), example))
    with pytest.raises(fc.InputError, match="ascending"):
        ALL_POLICIES[name](depths=(0.5, 0.2))
    with pytest.raises(fc.InputError, match="for its exits, behind which clients run nothing; use complement 'zero'"):
        playing(serial(), "linear", make(), complement=fc.Frozen())
    with pytest.raises(fc.InputError, match="not bound"):
        make().plan({}, [], fc.Round(1, 0), {})


@pytest.mark.parametrize("policy", ["full", "DepthFL"])
def test_certificates_do_not_claim_losses_of_several_outputs(policy: str) -> None:
    task, clients = parts("linear")
    history = fc.Federation(task, clients, policy, "3x1", cohort=3, certify=True).run(1)
    assert history.last.certificate is not None
    assert "clients of a model with exits" in str(history.last.certificate)


def test_heterofl_does_not_take_the_rows_of_one_exit_for_those_of_all() -> None:
    x = torch.randn(12, 6)
    clients = fc.data.from_parts((x, torch.arange(12) % 3), [torch.arange(0, 12, 3), torch.arange(12)])
    federation = fc.Federation(fc.Task(ExitNet(), prediction="last"), clients, "HeteroFL", "1,0.5", cohort=2)
    with pytest.raises(fc.InputError, match=r"cannot find the rows .* or set label_aware=False"):
        federation.run(1)


def test_a_budget_that_is_too_small_is_refused() -> None:
    task, clients = parts("linear")
    small = fc.Federation(task, clients, fc.depthfl(), fc.by_slot("1,0.1"), cohort=2)
    with pytest.raises(fc.InputError, match=r"budget '0.1' is too small .* keep of 0.212.*set depths"):
        small.run(1)
    with pytest.raises(fc.InputError, match="blocks of ExitConvolutions between exits are not alike; set momentum=0"):
        playing(serial(), "convolutions", fc.inclusivefl())
