"""Laws of recipes: what FedProx, SCAFFOLD, clipping and schedules reduce to, and what never changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.engines.serial import Serial
from fedcover.federation.control_variates import key_of, total_weight, trained_by_type
from fedcover.params import Params, parts_of_flat, prune
from fedcover.training.step import StepData, start_state, take_step
from tests.conftest import small_data, small_net
from tests.contracts.federations import federation, furthest
from tests.laws.strategies import same, seeds


def played(rounds: int = 2, **changes: Any) -> fc.History:
    playing = federation(Serial(shrink=False))
    settings = {"policy": fc.weight_pruning(), "budgets": fc.by_slot("124567"), "local": playing.local, **changes}
    return fc.Federation(playing.task, playing.clients, cohort=6, seed=5, **settings).run(rounds)


def test_fedprox_without_a_pull_is_fedavg() -> None:
    assert furthest(played(), played(local=fc.LocalSGD(2, 8, 0.1, proximal=0.0))) == 0


def test_fedprox_pulls_towards_the_start() -> None:
    free, pulled = (played(1, local=fc.LocalSGD(5, 8, 0.1, proximal=mu)) for mu in (0.0, 5.0))
    start = {name: tensor.detach() for name, tensor in federation(Serial(shrink=False)).theta0.items()}
    moved = [sum(float((h.theta[n] - start[n]).square().sum()) for n in start) for h in (free, pulled) if h.theta]
    assert moved[1] < moved[0] / 2


def equal_clients(**changes: Any) -> fc.Federation:
    """A federation whose clients have the same examples, in one batch, and the same mask."""
    data = small_data(20)
    clients = fc.data.from_parts(
        fc.Examples(data.inputs.repeat(3, 1), data.labels.repeat(3), classes=3), list(torch.arange(60).split(20))
    )
    net = small_net()
    net[2].p = 0.0
    return fc.Federation(fc.Task(net), clients, cohort=3, **changes)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_scaffold_with_equal_clients_is_fedavg(momentum: float) -> None:
    plain, controlled = (
        equal_clients(local=fc.LocalSGD(3, 20, 0.1, momentum, control_variates=controls)).run(4)
        for controls in (False, True)
    )
    assert furthest(plain, controlled) < 1e-6


def test_control_variates_are_mean_gradients_inside_masks() -> None:
    """After one step per client, c_n is the gradient at theta o m; it stays where the client holds nothing."""
    playing = federation(Serial(shrink=False))
    playing = fc.Federation(
        playing.task, playing.clients, fc.weight_pruning(), fc.by_slot("124567"), cohort=6, seed=5,
        local=fc.LocalSGD(batch_size=64, lr=0.1, local_steps=1, control_variates=True),
    )  # fmt: skip
    state, _ = playing.play_round(playing.start())
    planned = playing.begin_round(playing.start())
    (group,) = trained_by_type(playing, playing.theta0)

    def stored(kind: str) -> Params:
        return parts_of_flat(state.clients[key_of(kind, group)], group)

    for job in planned.jobs:
        (update,) = Serial(shrink=False).train([job])
        controls, trained = (stored(f"{kind}/{job.client.id}") for kind in ("control", "trained"))
        for name, before in playing.theta0.items():
            inside = job.mask.get(name, torch.ones_like(before, dtype=torch.bool))
            control = controls[name]
            torch.testing.assert_close(control[inside], ((before - update.theta[name]) / 0.1)[inside])
            assert not bool(control[~inside].any())
            assert torch.equal(trained[name], inside)
    of_clients = [state.clients[key_of(f"control/{client.id}", group)].double() for client in planned.cohort]
    torch.testing.assert_close(state.clients[key_of("sum", group)], torch.stack(of_clients).sum(0))


@given(st.integers(1, 20), st.floats(0, 0.95))
def test_the_weight_of_steps_is_how_far_a_constant_gradient_moves(steps: int, decay: float) -> None:
    velocity = moved = 0.0
    for _ in range(steps):
        velocity = decay * velocity + 1
        moved += velocity
    assert total_weight(steps, decay) == pytest.approx(moved)


@given(seeds, st.floats(0.01, 10))
@settings(max_examples=20)
def test_clipping_bounds_the_step(seed: int, most: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    theta = {"a": torch.randn(5, 4, generator=rng), "b": torch.randn(3, generator=rng)}
    kept = {name: torch.rand(tensor.shape, generator=rng) < 0.7 for name, tensor in theta.items()}
    theta = prune(theta, kept)
    recipe = fc.LocalSGD(lr=0.5, momentum=0.0, clip=most)
    grads = {name: torch.randn(tensor.shape, generator=rng) * 10 for name, tensor in theta.items()}
    data = StepData(recipe.lr, {}, kept, *({} for _ in StepData._fields[3:]))
    state, _ = take_step(
        recipe, lambda shown: (grads, torch.tensor(0.0)), start_state(recipe, theta, False, False), data, 0, {}
    )
    moved = sum(float((state.theta[name] - theta[name]).square().sum()) for name in theta) ** 0.5
    assert moved <= 0.5 * most * (1 + 1e-5)
    assert all(not bool(state.theta[name][~kept[name]].any()) for name in theta)


def resumable(**changes: Any) -> fc.Federation:
    clients = fc.data.iid(small_data(), clients=8, seed=1)
    recipes: dict[str, Any] = {
        "policy": fc.weight_pruning(), "budgets": fc.by_slot("1247"), "cohort": 4, "seed": 3, **changes,
    }  # fmt: skip
    return fc.Federation(fc.Task(small_net()), clients, **recipes)


@pytest.mark.parametrize(
    "changes",
    [
        {"local": fc.LocalSGD(2, 8, 0.1, schedule=fc.schedules.WarmUp(2, fc.schedules.Cosine(6)))},
        {"local": fc.LocalAdam(2, 8, 0.01), "aggregator": fc.FedAdam(fc.mean())},
        {"local": fc.LocalSGD(2, 8, 0.1, control_variates=True), "aggregator": fc.FedAvgM(fc.mean(), momentum=0.9)},
        {"local": fc.LocalAdam((2, 1), 8, 0.01, keep_moments=True)},
    ],
    ids=["schedule", "Adam", "SCAFFOLD", "kept moments"],
)
def test_a_run_resumed_in_the_middle_continues_to_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = resumable(**changes).run(5)
    resumable(**changes).run(2, out=tmp_path)
    actual = resumable(**changes).run(5, out=tmp_path, resume=True)
    assert actual.theta is not None
    assert expected.theta is not None
    assert same(actual.theta, expected.theta)
    assert list(actual) == list(expected)


@pytest.mark.parametrize("policy", [fc.weight_pruning(), fc.fedrolex(), fc.feddst(every=1)], ids=repr)
def test_kept_moments_change_only_inside_the_mask(policy: fc.Policy) -> None:
    """And a client's moments after a round are those with which it starts the next time, whatever its mask then is."""
    playing = resumable(policy=policy, local=fc.LocalAdam(1, 8, 0.01, keep_moments=True), cohort=4)
    state = playing.start()
    for _ in range(4):
        planned, before = playing.begin_round(state), state.clients
        updates = {update.client: update for update in Serial(shrink=False).train(planned.jobs)}
        state, _ = playing.end_round(planned, updates.values())
        for job in planned.jobs:
            update, client = updates[job.client.id], job.client.id
            for moment in ("mean", "square", "count"):
                for name, tensor in playing.theta0.items():
                    key, inside = f"{client}/{moment}/{name}", torch.ones_like(tensor, dtype=torch.bool)
                    old, new = before.get(key, torch.zeros_like(tensor)), state.clients[key]
                    held = update.mask.get(name, inside)
                    assert torch.equal(new[~held], old[~held])
                    assert torch.equal(new[held], (update.moments or {})[moment][name][held])
                    if key in before:
                        assert job.options is not None
                        planned_for = job.mask.get(name, inside)
                        started = job.options.moments[moment][name]
                        assert torch.equal(started, torch.where(planned_for, old, 0.0))
    assert any(float(count.max()) > 1 for key, count in state.clients.items() if "/count/" in key)


def test_one_round_with_kept_moments_is_one_with_fresh_ones() -> None:
    fresh, kept = (played(1, local=fc.LocalAdam(2, 8, 0.01, keep_moments=keep)) for keep in (False, True))
    assert furthest(fresh, kept) == 0


def test_epochs_that_are_all_equal_are_one_number() -> None:
    one, several = (played(local=fc.LocalSGD(epochs, 8, 0.1)) for epochs in (2, [2, 2]))
    assert furthest(one, several) == 0


def test_control_variates_are_refused_where_the_mean_gradient_is_unknown() -> None:
    with pytest.raises(fc.InputError, match="leave out weight_decay"):
        fc.LocalSGD(control_variates=True, clip=1.0)
    playing = resumable(policy=fc.fiarse(), local=fc.LocalSGD(control_variates=True))
    with pytest.raises(fc.InputError, match="control variates need plain masked SGD"):
        playing.run(1)


def test_the_certificate_says_when_the_theorem_does_not_apply() -> None:
    for local in (fc.LocalSGD(1, 8, 0.1, weight_decay=0.1), fc.LocalSGD(1, 8, 0.1, keep_moments=True)):
        history = resumable(local=local, certify=True).run(1)
        assert "recipe of local training is another" in str(history.last.certificate)
    unequal = resumable(local=fc.LocalSGD((1, 2), 8, 0.1), certify=True).run(1)
    assert "equally many local steps" in str(unequal.last.certificate)


@pytest.mark.parametrize(
    "local", [fc.LocalSGD(1, 8, 0.1, control_variates=True), fc.LocalAdam(1, 8, keep_moments=True)]
)
def test_what_a_federation_sends_for_its_recipe_is_no_option_of_the_policy(local: fc.Recipe) -> None:
    certificate = str(
        resumable(local=local, cohort=8, budgets=fc.by_slot("11111247"), certify=True).run(2).last.certificate
    )
    assert "recipe of local training is another" in certificate
    assert "this policy changes local training" not in certificate


def test_shifts_of_a_policy_are_an_option_of_the_policy() -> None:
    class Shifted(fc.Policy):
        """Whole models whose gradients are shifted."""

        def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
            shift = fc.TrainingOptions(shifts={name: torch.ones_like(tensor) for name, tensor in theta.items()})
            return [fc.ClientPlan(client, {}, shift) for client in cohort], state

    history = resumable(policy=Shifted(), budgets=fc.by_slot("1111"), certify=True).run(1)
    assert "this policy changes local training" in str(history.last.certificate)
