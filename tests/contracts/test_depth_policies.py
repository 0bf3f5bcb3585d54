"""Policies by depth: laws, what a level holds, all engines, averages over holders, evaluation, and refusals."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import sub_models
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.models import MLP, ResNet18Exits, TransformerExits
from fedcover.params import count, params_of, put_params
from fedcover.policies import POLICIES as ALL_POLICIES
from fedcover.seeding import ambient
from fedcover.structure.exits import ExitModel, with_exits
from fedcover.structure.trace import trace
from fedcover.training.complements import Zero
from fedcover.training.exits import Exits
from tests.conftest import POLICIES as OTHERS
from tests.conftest import small_data
from tests.contracts.federations import DEVICES, TOLERANCE, furthest, serial
from tests.laws.strategies import same
from tests.networks import ExitConvolutions, ExitNet

POLICIES: dict[str, Callable[[], fc.Policy]] = {
    "DepthFL": lambda: fc.depthfl(ramp_up=4),
    "ScaleFL": lambda: fc.scalefl(distil=0.5),
    "InclusiveFL": fc.inclusivefl,
    "FeDepth": lambda: fc.fedepth(batch_size=512),
}
TOGETHER = [name for name in POLICIES if name != "FeDepth"]
"""Those whose clients can be trained as one batch, and whose budgets limit what they hold."""
SIZES = (5, 16, 3, 9, 20, 12)
"""The numbers of examples of clients; in batches of 4, most end with a short one."""
KEEPS = (1.0, 0.75, 0.5, 0.25)


def text_net() -> TransformerExits:
    return TransformerExits((5,), 7, width=8, head=4, layers=6)


NETWORKS: dict[str, tuple[Callable[[], ExitModel], Tensor]] = {
    "linear": (ExitNet, torch.randn(2, 6)),
    "convolutions": (ExitConvolutions, torch.randn(2, 1, 6, 6)),
    "text": (text_net, torch.randint(7, (2, 5))),
}


@cache
def parts(network: str) -> tuple[fc.Task, fc.Population]:
    """Return a task and clients of unequal sizes; those with batch norm have full batches."""
    make, example = NETWORKS[network]
    rng, sizes = torch.Generator().manual_seed(0), (4, 8, 4, 12, 8, 4) if network == "convolutions" else SIZES
    ends = torch.tensor(sizes).cumsum(0).tolist()
    owned = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with ambient(1, "depth"):
        net = make()
    if network == "text":
        x = torch.randint(7, (ends[-1], 5), generator=rng)
        return fc.Task(net), fc.data.from_parts((x, x.roll(-1, 1)), owned)
    x = torch.randn(ends[-1], *example.shape[1:], generator=rng)
    return fc.Task(net), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), owned)


def playing(engine: fc.Engine, network: str, policy: fc.Policy, **changes: object) -> fc.Federation:
    task, clients = parts(network)
    settings: dict[str, object] = {"local": fc.LocalSGD(2, 4, 0.05, 0.5), "cohort": 5, "seed": 2, **changes}
    return fc.Federation(task, clients, policy, fc.by_slot("1,1,0.75,0.5,0.25"), engine=engine, **settings)  # type: ignore[arg-type]


def policy_for(name: str, network: str) -> fc.Policy:
    """Return a policy; the stages of convolutions differ, so that InclusiveFL has no momentum there."""
    return fc.inclusivefl(momentum=0) if (name, network) == ("InclusiveFL", "convolutions") else POLICIES[name]()


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


KINDS = ("weight", "bias")


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


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", POLICIES)
def test_steps_agree_traced_shrunk_and_by_autograd(name: str, network: str) -> None:
    expected = playing(serial(), network, policy_for(name, network)).run(3)
    for engine in (Serial(shrink=False, traced=False), serial(shrink=True)):
        actual = playing(engine, network, policy_for(name, network)).run(3)
        if not engine.shrink or (name, network) != ("ScaleFL", "linear"):  # whose dropout draws for fewer units
            assert furthest(expected, actual) < TOLERANCE
        assert actual.column("bytes_up") == expected.column("bytes_up")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", TOGETHER)
def test_vectorized_agrees_with_serial(
    name: str, network: str, shrink: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of different depths, short batches, and a weight of distillation that changes."""
    monkeypatch.setattr(sub_models, "WORTHWHILE", 0.0)
    shrink = shrink and (name, network) != ("ScaleFL", "linear")  # with dropout, for fewer units
    engines = serial(), Vectorized(device, shrink=shrink)
    histories = [playing(engine, network, policy_for(name, network)).run(3) for engine in engines]
    assert furthest(*histories) < TOLERANCE
    assert histories[0].column("train_loss") == pytest.approx(histories[1].column("train_loss"), rel=1e-4)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_processes_equal_serial_bit_for_bit(name: str, shrink: bool, processes: dict[bool, Processes]) -> None:
    expected = playing(serial(shrink), "linear", POLICIES[name]()).run(3, evaluate_on=small_data(40, seed=9))
    actual = playing(processes[shrink], "linear", POLICIES[name]()).run(3, evaluate_on=small_data(40, seed=9))
    assert actual == expected
    assert actual.theta is not None
    assert expected.theta is not None
    assert same(actual.theta, expected.theta)


@pytest.mark.filterwarnings("default")  # of the compiler
def test_a_compiled_step_follows_the_weight_of_distillation() -> None:
    """In the second round the weight is another one, and the step is that of the first."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    clients = fc.data.from_parts((x, x[:, :3].argmax(1)), [torch.arange(4), torch.arange(4, 8)])
    with ambient(2, "compiled"):
        task = fc.Task(ExitNet(depth=2, width=4))
    recipe = fc.LocalSGD(epochs=1, batch_size=4, lr=0.1)
    histories = [
        fc.Federation(task, clients, fc.depthfl(ramp_up=2), fc.by_slot("2x1"), recipe, 2, engine=engine).run(2)
        for engine in (serial(), Vectorized("cpu", compile=True))
    ]
    assert furthest(*histories) < TOLERANCE


def test_one_client_of_depth_two_trains_what_autograd_trains_by_hand() -> None:
    """One step of DepthFL, written out: the sum of two cross-entropies and the mean of both divergences."""
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    with ambient(3, "by hand"):
        model = ExitNet()
    model.drop.p = 0.0
    recipe = fc.LocalSGD(epochs=1, batch_size=8, lr=0.1, momentum=0.0)
    policy = fc.depthfl(distil=0.8, ramp_up=0)
    federation = fc.Federation(fc.Task(model), fc.data.from_parts((x, y), [torch.arange(8)]), policy, "0.5", recipe, 1)
    state, _ = federation.play_round(federation.start())
    theta = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    hidden, scores = torch.relu(x @ theta["stem.weight"].T + theta["stem.bias"]), []
    for i in range(2):
        hidden = hidden + torch.relu(hidden @ theta[f"blocks.{i}.weight"].T + theta[f"blocks.{i}.bias"])
        scores.append(hidden @ theta[f"heads.{i}.weight"].T + theta[f"heads.{i}.bias"])
    p = [each.softmax(1) for each in scores]
    loss = sum(-each[torch.arange(8), y].log().mean() for each in p)
    loss = loss + 0.8 * sum((p[1 - i].detach() * (p[1 - i].detach() / p[i]).log()).sum(1).mean() for i in range(2))
    grads = torch.autograd.grad(loss, list(theta.values()), allow_unused=True)
    for (name, old), grad in zip(theta.items(), grads, strict=True):
        expected = old.detach() if grad is None else old.detach() - 0.1 * grad
        torch.testing.assert_close(state.theta[name], expected, rtol=1e-4, atol=1e-6)
        assert grad is not None or torch.equal(state.theta[name], old.detach())  # nobody holds it: the same bits


def test_a_client_of_fedepth_trains_one_run_of_blocks_after_another() -> None:
    """Two runs of one step each, written out: blocks 1 and 2 under exit 2, then the others under exit 6."""
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    with ambient(3, "by hand"):
        model = ExitNet()
    model.drop.p = 0.0
    recipe = fc.LocalSGD(epochs=1, batch_size=8, lr=0.1, momentum=0.0)
    clients = fc.data.from_parts((x, y), [torch.arange(8)])
    federation = fc.Federation(fc.Task(model), clients, fc.fedepth(batch_size=512), fc.by_slot("0.75"), recipe, 1)
    (job,) = federation.begin_round(federation.start()).jobs
    job = replace(job, mask={}, options=fc.TrainingOptions(exits=Exits((2, 6), in_turn=True)))
    (update,) = federation.engine.train([job])
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {
        "stem.weight",
        "stem.bias",
        *(f"{part}.{kind}" for part in ("blocks.0", "blocks.1", "heads.1") for kind in KINDS),
    }
    second = {f"blocks.{i}.{kind}" for i in range(2, 6) for kind in KINDS} | {"heads.5.weight", "heads.5.bias"}
    for names, last in ((first, 2), (second, 6)):
        leaves = {name: tensor.clone().requires_grad_(name in names) for name, tensor in theta.items()}
        hidden = torch.relu(x @ leaves["stem.weight"].T + leaves["stem.bias"])
        for i in range(last):
            hidden = hidden + torch.relu(hidden @ leaves[f"blocks.{i}.weight"].T + leaves[f"blocks.{i}.bias"])
        scores = hidden @ leaves[f"heads.{last - 1}.weight"].T + leaves[f"heads.{last - 1}.bias"]
        torch.nn.functional.cross_entropy(scores, y).backward()
        theta |= {name: leaves[name].detach() - 0.1 * leaves[name].grad for name in names}
    for name, expected in theta.items():
        torch.testing.assert_close(update.theta[name], expected, rtol=1e-4, atol=1e-6)


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


def test_exits_in_turn_need_clients_one_by_one_and_new_moments() -> None:
    make = POLICIES["FeDepth"]
    with pytest.raises(fc.InputError, match="needs clients trained one by one; use engine=processes"):
        playing(Vectorized("cpu"), "linear", make()).run(1)
    vectorized = playing(Vectorized("cpu"), "linear", make())
    with pytest.raises(fc.InputError, match="cannot train the exits of a model one after another"):
        vectorized.play_round(vectorized.start())
    moments = playing(serial(), "linear", make(), local=fc.LocalSGD(1, 4, 0.05, 0.5, keep_moments=True))
    with pytest.raises(fc.FedcoverError, match="set keep_moments=False"):
        moments.run(1)
    scaffold = playing(serial(), "linear", make(), local=fc.LocalSGD(1, 4, 0.05, control_variates=True))
    with pytest.raises(fc.InputError, match="control variates need plain masked SGD"):
        scaffold.run(1)
    with pytest.raises(fc.InputError, match="cannot learn from each other"):
        Exits((1, 2), distil=1.0, in_turn=True)


def test_every_block_is_averaged_over_its_holders() -> None:
    federation = playing(serial(), "linear", fc.depthfl(distil=0))
    begun = federation.begin_round(federation.start())
    updates = list(federation.engine.train(begun.jobs))
    state, record = federation.end_round(begun, updates)
    depths = [job.exits.numbers[-1] if job.exits else 0 for job in begun.jobs]
    assert depths == [6, 6, 4, 2, 1]
    for block in range(6):
        trained = [
            update.theta[f"heads.{block}.weight"]
            for update, depth in zip(updates, depths, strict=True)
            if depth > block
        ]
        torch.testing.assert_close(state.theta[f"heads.{block}.weight"], torch.stack(trained).mean(0))
    assert record.gamma_min == 2


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


@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("run") / "run"
    whole = playing(serial(), "linear", POLICIES[name]()).run(4)
    playing(serial(), "linear", POLICIES[name]()).run(2, out=out)
    resumed = playing(serial(), "linear", POLICIES[name]()).run(4, out=out, resume=True)
    assert resumed == whole
    assert resumed.theta is not None
    assert whole.theta is not None
    assert same(resumed.theta, whole.theta)


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")  # nobody holds the deeper layers
def test_sub_models_of_resnet18_are_trained_small_and_as_in_the_whole_model() -> None:
    """Two clients of depth 1 and 2, with 1 % and 6 % of the entries."""
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with ambient(0, "resnet"):
        task = fc.Task(ResNet18Exits(classes=4))
    clients = fc.data.from_parts((x, torch.arange(8) % 4), [torch.arange(4), torch.arange(4, 8)])
    recipe = fc.LocalSGD(epochs=1, batch_size=4, lr=0.05)
    both = [
        fc.Federation(task, clients, fc.depthfl(), fc.by_slot("0.02,0.07"), recipe, 2, engine=engine).run(1)
        for engine in (serial(shrink=True), serial(shrink=False))
    ]
    assert furthest(*both) < TOLERANCE
    assert both[0][0].kept == pytest.approx([0.0134, 0.0604], abs=2e-3)


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


def test_a_budget_that_is_too_small_is_refused() -> None:
    task, clients = parts("linear")
    small = fc.Federation(task, clients, fc.depthfl(), fc.by_slot("1,0.1"), cohort=2)
    with pytest.raises(fc.InputError, match=r"budget '0.1' is too small .* keep of 0.212.*set depths"):
        small.run(1)
    with pytest.raises(fc.InputError, match="blocks of ExitConvolutions between exits are not alike; set momentum=0"):
        playing(serial(), "convolutions", fc.inclusivefl())


def test_options_for_an_exit_that_a_mask_leaves_out_are_refused() -> None:
    @fc.policy
    def shallow(theta: dict[str, Tensor], client: fc.Client, this_round: fc.Round) -> dict[str, Tensor]:
        return {"blocks.5.weight": torch.zeros(16, 16, dtype=torch.bool)}

    federation = playing(serial(), "linear", shallow)
    begun = federation.begin_round(federation.start())
    assert all(update.is_finite() for update in federation.engine.train(begun.jobs))  # of exits 1 to 5
    job = replace(begun.jobs[0], options=fc.TrainingOptions(exits=Exits((6,))))
    for engine in (Serial(), Vectorized("cpu")):
        with pytest.raises(fc.FedcoverError, match="train exit 6, and its mask leaves exits 1, 2, 3, 4, 5 of 6"):
            list(engine.train([job]))


@pytest.mark.parametrize("policy", ["full", "WP", "FedRolex"])
def test_other_policies_train_all_exits_in_every_engine(policy: str) -> None:
    task, clients = parts("linear")
    settings = fc.by_slot("3x1" if policy == "full" else "1,0.5,0.5"), fc.LocalSGD(1, 4, 0.05), 3
    histories = [
        fc.Federation(
            task,
            clients,
            OTHERS[policy](),
            *settings,
            engine=engine,
        ).run(2)
        for engine in (serial(), Serial(shrink=False, traced=False), Vectorized("cpu"))
    ]
    assert all(furthest(histories[0], other) < TOLERANCE for other in histories[1:])
    start = params_of(task.model)
    assert histories[0].theta is not None
    assert all(not torch.equal(histories[0].theta[f"heads.{i}.weight"], start[f"heads.{i}.weight"]) for i in range(6))
