"""Evaluation by client, level and class, and after fine-tuning, against loops that do not use the evaluator."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import small_data, small_net

import fedcover as fc
from fedcover.params import prune, put_params
from fedcover.seeding import ambient

Make = Callable[..., fc.Federation]
TEST = small_data(90, seed=9)


def by_hand(model: torch.nn.Module, theta: dict[str, torch.Tensor], mix: torch.Tensor) -> float:
    """Return the accuracy on each class, weighted by a label mix."""
    scratch = copy.deepcopy(model).eval()
    put_params(scratch, theta)
    with torch.no_grad():
        right = scratch(TEST.inputs).argmax(1) == TEST.labels
    accuracies = torch.stack([right[TEST.labels == label].double().mean() for label in range(3)])
    return float((accuracies * mix).sum())


def test_clients_levels_and_classes(small_federation: Make) -> None:
    federation = small_federation()
    history = federation.run(3, evaluate_on=TEST)
    tables = fc.evaluate_clients(federation, history, TEST)
    assert tables.tested_on == "label mixes"
    assert [row.client for row in tables.clients] == list(range(8))
    state = history.state
    for row in tables.clients:
        client = fc.Client(row.client, row.client % 4, federation.resolved_budgets[row.client % 4])
        assert row.level == str(client.budget)
        (plan,), _ = federation.policy.plan(state.theta, [client], fc.Round(4, 3), state.policy)
        expected = by_hand(small_net(), prune(state.theta, plan.mask), federation.clients.label_mix(row.client))
        assert row.accuracy == pytest.approx(expected)
        assert row.personalised is None
    assert [level.clients for level in tables.levels] == [2] * 4
    assert tables.levels[0].kept == 1.0
    accuracies = [row.accuracy for row in tables.clients if row.level == tables.levels[1].level]
    assert tables.levels[1].accuracy == pytest.approx(sum(accuracies) / 2)  # type: ignore[arg-type]
    for label in range(3):
        mix = F.one_hot(torch.tensor(label), 3).double()
        assert tables.classes[label] == pytest.approx(by_hand(small_net(), state.theta, mix))


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")  # of classes that no client of a round has
def test_sub_models_can_have_the_output_rows_of_all_classes() -> None:
    clients = fc.data.shards(small_data(), 8, 1, seed=0)
    federation = fc.Federation(fc.Task(small_net()), clients, fc.heterofl(), fc.by_slot("1,0.5"), cohort=2)
    history = federation.run(2, evaluate_on=TEST)
    own, whole = (fc.evaluate_clients(federation, history, TEST, all_classes=every) for every in (False, True))
    state, plan_of = history.state, federation.policy.plan
    for row in whole.clients:
        client = fc.Client(row.client, row.client % 2, federation.resolved_budgets[row.client % 2])
        (plan,), _ = plan_of(state.theta, [client], fc.Round(3, 0), state.policy)
        expected = by_hand(small_net(), prune(state.theta, plan.mask), federation.clients.label_mix(row.client))
        assert row.accuracy == pytest.approx(expected)
    assert all(a.kept < b.kept for a, b in zip(own.clients, whole.clients, strict=True))
    assert whole.clients[0].kept == 1


@pytest.mark.parametrize("engine", [fc.Serial(shrink=False), fc.Vectorized()])
def test_personalised_is_one_step_of_gradient_descent(engine: fc.Engine) -> None:
    with ambient(0, "net"):
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    clients = fc.data.dirichlet(small_data(), clients=5, alpha=0.5, seed=1)
    local = fc.LocalSGD(epochs=3, batch_size=200, lr=0.5, momentum=0.0)
    federation = fc.Federation(fc.Task(net), clients, local=local, cohort=2, engine=engine)
    history = federation.run(2, evaluate_on=TEST)
    tables = fc.evaluate_clients(federation, history, TEST, personalise=1, clients=[3, 1])
    assert [row.client for row in tables.clients] == [3, 1]
    for row in tables.clients:
        theta = {name: tensor.clone().requires_grad_() for name, tensor in history.state.theta.items()}
        own = clients.examples_of(row.client)
        loss = F.cross_entropy(torch.func.functional_call(net, theta, (own.inputs,)), own.labels)
        grads = torch.autograd.grad(loss, list(theta.values()))
        tuned = {name: (t - 0.5 * g).detach() for (name, t), g in zip(theta.items(), grads, strict=True)}
        assert row.personalised == pytest.approx(by_hand(net, tuned, clients.label_mix(row.client)))
    assert any(row.personalised != row.accuracy for row in tables.clients)
    assert history.state.round == 2


def test_own_test_sets(small_federation: Make) -> None:
    data, parts = small_data(), [range(20 * i, 20 * i + 20) for i in range(6)]
    tests = (TEST, [range(15 * i, 15 * i + 15) for i in range(6)])
    federation = fc.Federation(fc.Task(small_net()), fc.data.from_parts(data, parts, tests), cohort=3)
    history = federation.run(2, evaluate_on=TEST)
    tables = fc.evaluate_clients(federation, history, TEST)
    assert tables.tested_on == "own test sets"
    model = small_net().eval()
    put_params(model, history.state.theta)
    for row in tables.clients:
        own = slice(15 * row.client, 15 * row.client + 15)
        right = model(TEST.inputs[own]).argmax(1) == TEST.labels[own]
        assert row.accuracy == pytest.approx(float(right.double().mean()))


def test_a_regression_is_evaluated_by_its_loss() -> None:
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = (inputs, inputs.sum(1, keepdim=True))
    federation = fc.Federation(fc.Task(torch.nn.Linear(4, 1), F.mse_loss), fc.data.iid(data, clients=4), cohort=2)
    history = federation.run(2, evaluate_on=data)
    tables = fc.evaluate_clients(federation, history, data, personalise=2)
    assert tables.tested_on == "whole test set"
    assert all(row.accuracy is None for row in tables.clients)
    assert all(row.loss == pytest.approx(history.last.loss) for row in tables.clients)
    assert all(row.personalised is not None and row.personalised < row.loss for row in tables.clients)
    with pytest.raises(fc.InputError, match="accuracy is not measured for this task"):
        federation.run(2, evaluate_on=data, callbacks=[fc.EarlyStopping()])


def test_the_tables_are_in_the_run_folder(small_federation: Make, tmp_path: Path) -> None:
    federation = small_federation(policy=fc.pretrained_mask())
    callbacks = [fc.EvaluateClients(personalise=1)]
    history = federation.run(2, evaluate_on=TEST, out=tmp_path / "run", callbacks=callbacks)
    stored = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert stored == json.loads(fc.evaluate_clients(federation, history, TEST, 1).to_json())
    assert len(stored["clients"]) == 8
    assert all(0 <= row["personalised"] <= 1 for row in stored["clients"])
    with pytest.raises(fc.InputError, match="needs a run folder and a test set"):
        federation.run(1, callbacks=callbacks)
    with pytest.raises(fc.InputError, match="the history has no model"):
        fc.evaluate_clients(federation, fc.History(), TEST)


def test_clients_are_named_by_id_or_name(small_federation: Make) -> None:
    federation = small_federation()
    history = federation.run(1)
    for clients, why in (
        (1, "must be a list such as .*; got 1"),
        ("all", "must be a list such as .*; got 'all'"),
        ([], "clients is an empty list; leave it out"),
        (["ann"], "there is no client named 'ann'; the clients have no names; use ids"),
        ([0.5], "must be ids or names; got 0.5"),
        ([8], r"client must be in 0\.\.7; got 8"),
    ):
        with pytest.raises(fc.InputError, match=why):
            fc.evaluate_clients(federation, history, TEST, clients=clients)  # type: ignore[arg-type]
    for model in (history.theta, federation):
        with pytest.raises(fc.InputError, match=r"model must be the history that run\(\) returned"):
            fc.evaluate_clients(federation, model, TEST)  # type: ignore[arg-type]
    data = small_data()
    named = fc.data.from_parts(data, {"ann": range(60), "bo": range(60, 120)})
    federation = fc.Federation(fc.Task(small_net()), named, cohort=2)
    history = federation.run(1)
    by_name = fc.evaluate_clients(federation, history, TEST, clients=["bo"])
    assert by_name == fc.evaluate_clients(federation, history, TEST, clients=[1])
