"""Policies by depth in every engine, and their steps by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import sub_models
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.models import ResNet18Exits
from fedcover.params import params_of
from fedcover.seeding import ambient
from fedcover.training.exits import Exits
from fedcover.training.recipes import Recipe
from tests.conftest import POLICIES as OTHERS
from tests.conftest import small_data
from tests.contracts.depth_federations import KINDS, NETWORKS, POLICIES, TOGETHER, parts, playing, policy_for
from tests.contracts.federations import DEVICES, TOLERANCE, furthest, serial
from tests.laws.strategies import same
from tests.networks import ExitNet


@cache
def by_serial(name: str, network: str) -> fc.History:
    """Return two rounds of a policy by the serial engine, which several engines are compared with."""
    return playing(serial(), network, policy_for(name, network)).run(2)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", POLICIES)
def test_steps_agree_traced_shrunk_and_by_autograd(name: str, network: str) -> None:
    expected = by_serial(name, network)
    for engine in (Serial(shrink=False, traced=False), serial(shrink=True)):
        actual = playing(engine, network, policy_for(name, network)).run(2)
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
    expected = by_serial(name, network)
    actual = playing(Vectorized(device, shrink=shrink), network, policy_for(name, network)).run(2)
    assert furthest(expected, actual) < TOLERANCE
    assert expected.column("train_loss") == pytest.approx(actual.column("train_loss"), rel=1e-4)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_processes_equal_serial_bit_for_bit(name: str, shrink: bool, processes: dict[bool, Processes]) -> None:
    expected = playing(serial(shrink), "linear", POLICIES[name]()).run(3, evaluate_on=small_data(40, seed=9))
    actual = playing(processes[shrink], "linear", POLICIES[name]()).run(3, evaluate_on=small_data(40, seed=9))
    assert actual == expected
    assert actual.theta is not None
    assert expected.theta is not None
    assert same(actual.theta, expected.theta)


RECIPES: dict[str, Recipe] = {
    "kept momentum": fc.LocalSGD(1, 4, 0.05, 0.5, keep_moments=True),
    "Adam": fc.LocalAdam(1, 4, 0.01, keep_moments=True),
    "SCAFFOLD": fc.LocalSGD(1, 4, 0.05, control_variates=True),
    "FedProx": fc.LocalSGD(1, 4, 0.05, 0.5, proximal=0.1, clip=1.0, weight_decay=1e-3),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_agree_in_shallow_models(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments, control variates and the values at the start have no entries of deeper layers either."""
    monkeypatch.setattr(sub_models, "WORTHWHILE", 0.0)
    expected, *others = (
        playing(engine, "convolutions", fc.depthfl(ramp_up=0), local=RECIPES[recipe]).run(3)
        for engine in (serial(), serial(shrink=True), Vectorized("cpu"), Vectorized("cpu", shrink=False))
    )
    assert all(furthest(expected, other) < TOLERANCE for other in others)


def test_runs_with_other_weights_of_distillation_share_a_batch() -> None:
    policies = [fc.depthfl(distil=0.2, ramp_up=0), fc.depthfl(distil=3.0, ramp_up=0)]
    alone = [playing(serial(), "linear", policy).run(2) for policy in policies]
    together = fc.run_many([playing(serial(), "linear", policy) for policy in policies], 2, engine=Vectorized("cpu"))
    assert furthest(*alone) > 1e-3
    assert all(furthest(a, b) < TOLERANCE for a, b in zip(alone, together, strict=True))


@pytest.mark.filterwarnings("default")  # of the compiler
def test_a_compiled_step_follows_the_weight_of_distillation(compiled_steps: list[Any]) -> None:
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
    assert compiled_steps


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


def test_exits_in_turn_are_trained_inside_the_mask_only() -> None:
    federation = playing(serial(), "linear", POLICIES["FeDepth"]())
    kept = torch.arange(256).view(16, 16) % 2 == 0
    options = fc.TrainingOptions(exits=Exits((2, 6), in_turn=True), complement=True)
    job = replace(federation.begin_round(federation.start()).jobs[0], mask={"blocks.1.weight": kept}, options=options)
    (update,) = federation.engine.train([job])
    change = update.theta["blocks.1.weight"] - job.theta["blocks.1.weight"]
    assert bool(change[kept].any())
    assert not bool(update.theta["blocks.1.weight"][~kept].any())  # 0 outside the mask
    assert bool((update.theta["blocks.5.weight"] - job.theta["blocks.5.weight"]).any())


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
