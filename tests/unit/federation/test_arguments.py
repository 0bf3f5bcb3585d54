"""Arguments of a federation: what is meant is accepted, and anything else is named with what to give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import small_data, small_net
from torch import nn
from torch.utils.data import DataLoader

import fedcover as fc
from fedcover.params import Mask, Params

CLIENTS = fc.data.iid(small_data(), clients=8, seed=1)


def federation(**arguments: Any) -> fc.Federation:
    return fc.Federation(**{"task": small_net(), "clients": CLIENTS, "cohort": 4, **arguments})


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"task": "mlp"}, r"task must be a model, or a task: fedcover.Task\(model, loss\); got 'mlp'"),
        ({"clients": small_data()}, r"fedcover.data.iid\(data, clients=10\) deals .*; got a value of type Examples"),
        ({"clients": (torch.zeros(4, 6), [0, 1, 2, 0])}, r"fedcover.data.iid\(data, .*; got a value of type tuple"),
        (
            {"clients": {"ann": [0, 1], "bo": [2]}},
            r"from_parts\(data, parts\) takes .* dict by name, .*; got .* type dict",
        ),
        ({"policy": fc.weight_pruning}, "policy must be a policy.*; got weight_pruning itself, which must be called"),
        ({"policy": "WPP"}, "there is no policy 'WPP'.*did you mean 'WP'"),
        (
            {"budgets": 0.5},
            r"budgets must be budgets or a code, such as .*'1247'.* or '10x0.5'; got 0.5",
        ),
        ({"local": "Adom"}, "there is no .* 'Adom'.*did you mean 'Adam'"),
        ({"local": fc.LocalAdam}, "got LocalAdam itself, which must be called"),
        ({"aggregator": fc.mean}, "got mean itself, which must be called"),
        ({"engine": "gpu"}, "engine must be one of auto, serial, processes, vectorized; got 'gpu'"),
        ({"certify": "no"}, "certify must be True or False; got 'no'"),
        ({"seed": "1"}, "seed must be a whole number; got '1'"),
        ({"seed": None}, "seed must be a whole number; got None"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named_with_what_to_give(argument: dict[str, object], why: str) -> None:
    settings = {"task": fc.Task(small_net()), "clients": CLIENTS, **argument}
    with pytest.raises(fc.InputError, match=why):
        fc.Federation(**settings)  # type: ignore[arg-type]


def test_names_and_codes_stand_for_what_they_name() -> None:
    named = fc.Federation(
        small_net(),
        CLIENTS,
        "WP",
        "1,3x0.5",
        "Adam",
        cohort=4,
        aggregator="median",
        engine="serial",  # type: ignore[arg-type]
    )
    objects = fc.Federation(
        fc.Task(small_net()), CLIENTS, fc.weight_pruning(), fc.by_slot("1,3x0.5"), fc.LocalAdam(), cohort=4,
        aggregator=fc.median(), engine=fc.Serial(shrink=False),
    )  # fmt: skip
    assert named.run(2) == objects.run(2)


@pytest.mark.parametrize("name", ["WP", "HeteroFL", "FedRolex", "FjORD", "optimal", "NP"])
def test_a_policy_that_prunes_needs_budgets(name: str) -> None:
    policy = fc.policies.POLICIES.find(name)[1]()
    with pytest.raises(fc.InputError, match=f"(?i)the policy {name} prunes to budgets, and there are none.*by_slot"):
        fc.Federation(small_net(), CLIENTS, policy, cohort=4)  # type: ignore[arg-type]
    whole = fc.Federation(small_net(), CLIENTS, policy, "4x1", cohort=4)  # type: ignore[arg-type]
    assert whole.run(1).last.kept == [1.0] * 4


def test_a_policy_of_your_own_may_ignore_budgets() -> None:
    @fc.policy
    def half(theta: Params, client: fc.Client, this_round: fc.Round) -> Mask:
        return {"0.weight": torch.arange(48).reshape(8, 6) % 2 == 0}

    with pytest.warns(fc.CoverageWarning):
        assert max(fc.Federation(fc.Task(small_net()), CLIENTS, half, cohort=4).run(1).last.kept) < 1


def test_arrays_in_double_precision_fit_a_model_in_single() -> None:
    x = np.random.default_rng(0).normal(size=(40, 6))
    y = (x[:, 0] > 0).astype(np.int32)
    federation = fc.Federation(fc.Task(small_net()), fc.data.iid((x, y), 4), cohort=4)
    assert federation.run(1, evaluate_on=(x, y)).last.accuracy is not None
    whole = fc.Federation(fc.Task(small_net()), fc.data.iid((np.rint(x).astype(np.int64), y), 4), cohort=4)
    assert whole.run(1).theta is not None


def test_tokens_stay_whole_numbers() -> None:
    tokens = torch.randint(5, (40, 4))
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))
    clients = fc.Federation(fc.Task(net), fc.data.iid((tokens, tokens[:, 0] % 2), 4), cohort=4).clients
    assert clients.examples.inputs.dtype == torch.int64


def test_rates_without_a_draw_are_refused() -> None:
    with pytest.raises(fc.InputError, match="rates are drawn only with dynamic=True; give fixed widths as budgets"):
        fc.heterofl(rates=[0.5, 0.25])


def test_a_seed_of_numpy_is_the_same_seed() -> None:
    whole = [fc.Federation(small_net(), CLIENTS, cohort=4, seed=seed) for seed in (3, np.int64(3))]
    assert whole[0].run(1) == whole[1].run(1)
    parts = [fc.data.iid(small_data(), clients=8, seed=seed).parts for seed in (3, np.int64(3))]
    assert all(torch.equal(part, parts[0]) for part in parts)
    with pytest.raises(fc.InputError, match=r"seed must be a whole number; got 1\.5"):
        fc.data.iid(small_data(), clients=8, seed=1.5)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: fc.policy(lambda theta, client: {}), r"takes \(theta, client, this_round\); got .* of \(theta"),
        (lambda: fc.policy(None), "takes .*; got None"),  # type: ignore[arg-type]
        (lambda: federation(policy=lambda t, c, r: {}), "with @fedcover.policy; got the function '<lambda>'"),
        (lambda: federation(clients=[(1, 2)]), r"from_clients\(datasets\) takes one data set per client; got .* list"),
        (lambda: federation(task=nn.Linear(6, 0)), r"Linear returns scores of shape \(2, 0\), which have no entries"),
        (lambda: federation().run(1, evaluate_on=DataLoader(small_data())), "got DataLoader; pass its dataset"),
        (lambda: federation().run(1, callbacks=[print]), "subclass of fedcover.Callback; got .*; on_round takes"),
        (lambda: fc.run_many(federation(), rounds=1), "must be a list of federations; got a value of type Federation"),
        (lambda: fc.run_many([federation()], 1, out="runs"), "a list of one folder per federation, 1; got 'runs'"),
        (lambda: fc.EarlyStopping("acuracy"), "did you mean the metric 'accuracy'"),
        (lambda: federation().run(1).column("train_los"), "no field or metric 'train_los'.*did you mean 'train_loss'"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_mistakes_are_answered_with_what_to_write(call: Callable[[], object], why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        call()


def test_an_unknown_option_of_a_run_is_named() -> None:
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected .* 'verbose'; it also takes .*evaluate_every"):
        federation().run(1, verbose=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"run_many\(\) got an unexpected .* 'verbose'; .*callbacks"):
        fc.run_many([federation()], 1, verbose=True)  # type: ignore[call-arg]


def test_budgets_may_be_an_array() -> None:
    kept = [
        federation(policy="WP", budgets=each).run(1).last.kept for each in (np.array([1, 0.5, 0.5, 1]), "1,2x0.5,1")
    ]
    assert kept[0] == kept[1]


def test_a_history_shows_its_last_scores() -> None:
    history = federation().run(2, evaluate_on=small_data())
    assert repr(history).startswith(f"History(2 rounds, accuracy {history.last.accuracy:.4g}, loss ")
    assert repr(fc.History()) == "History(0 rounds)"
