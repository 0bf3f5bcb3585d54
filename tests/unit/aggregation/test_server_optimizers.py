"""Server optimizers: their formulas, entries without a holder, checkpoints, and the certificate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fedcover.federation import checkpoint
from fedcover.params import Params
from tests.conftest import small_data
from tests.laws.strategies import same

Make = Callable[..., fc.Federation]
OPTIMIZERS = [name for name in SERVER_OPTIMIZERS if name != "plain"]
ROUNDS = 50


def step(
    optimizer: fc.Aggregator, theta: Params, updates: list[fc.ClientUpdate], state: dict[str, torch.Tensor]
) -> tuple[Params, dict[str, torch.Tensor]]:
    aggregation = optimizer.start(theta, [], state)
    aggregation.add_together(updates)
    return aggregation.result(), aggregation.state()


def updates_of(theta: Params, seed: int, mask: dict[str, torch.Tensor] | None = None) -> list[fc.ClientUpdate]:
    """Return three updates, which pull theta to 1 and add noise."""
    rng = torch.Generator().manual_seed(seed)
    return [
        fc.ClientUpdate(
            client,
            {name: t + 0.1 * (1 - t) + 0.05 * torch.randn(t.shape, generator=rng).to(t) for name, t in theta.items()},
            mask or {},
        )
        for client in range(3)
    ]


def start(dtype: torch.dtype = torch.float64) -> Params:
    rng = torch.Generator().manual_seed(5)
    return {"w": torch.randn(4, 3, generator=rng, dtype=dtype), "b": torch.randn(3, generator=rng, dtype=dtype)}


def flower_strategy(name: str, theta: Params) -> Any:
    """Return Flower's strategy with our parameters."""
    strategies = pytest.importorskip("flwr.server.strategy")
    from flwr.common import ndarrays_to_parameters

    initial = ndarrays_to_parameters([tensor.numpy() for tensor in theta.values()])
    settings = {
        "FedAvgM": {"server_learning_rate": 0.5, "server_momentum": 0.8},
        "FedAdagrad": {"eta": 0.05, "tau": 1e-3},
        "FedAdam": {"eta": 0.02, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-3},
        "FedYogi": {"eta": 0.02, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-3},
    }[name]
    return getattr(strategies, name)(initial_parameters=initial, **settings)


OURS = {
    "FedAvgM": fc.FedAvgM(lr=0.5, momentum=0.8),
    "FedAdagrad": fc.FedAdagrad(lr=0.05),
    "FedAdam": fc.FedAdam(lr=0.02, beta1=0.8, beta2=0.95),
    "FedYogi": fc.FedYogi(lr=0.02, beta1=0.8, beta2=0.95),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_masks_follow_flower(name: str) -> None:
    theta = start()
    flower, ours, state = flower_strategy(name, theta), OURS[name], OURS[name].initial_state(theta)
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    for index in range(1, ROUNDS + 1):
        updates = updates_of(theta, index)
        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([t.numpy() for t in u.theta.values()]), 1, {}))
            for u in updates
        ]
        # Flower's FedAdam corrects the moments of round 1 as if it were the second, so it gets the number before.
        parameters, _ = flower.aggregate_fit(index - 1 if name == "FedAdam" else index, results, [])
        theta, state = step(ours, theta, updates, state)
        for tensor, expected in zip(theta.values(), parameters_to_ndarrays(parameters), strict=True):
            assert float((tensor - torch.from_numpy(expected)).abs().max()) < 1e-6
        assert not same(theta, start())


def test_lr_1_without_momentum_is_the_mean(small_federation: Make) -> None:
    plain, momentum = (
        small_federation(aggregator=rule).run(4).theta for rule in (fc.mean(), fc.FedAvgM(lr=1.0, momentum=0.0))
    )
    assert plain is not None
    assert momentum is not None
    assert same(plain, momentum)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_entry_without_a_holder_keeps_its_value_and_moments(name: str) -> None:
    """It is held, then left out for some rounds, then held again; its moments are those of the rounds it was held."""
    optimizer, theta = OURS[name], start(torch.float32)
    upper = {"w": torch.arange(4).view(4, 1).expand(4, 3) < 2}
    state = optimizer.initial_state(theta)
    alone, alone_state = theta, state
    for index in range(8):
        held = index % 4 == 0
        updates = updates_of(theta, index)
        lower = [fc.ClientUpdate(u.client, u.theta, {} if held else upper) for u in updates]
        before, before_state = theta, state
        theta, state = step(optimizer, theta, lower, state)
        if held:
            assert not torch.equal(theta["w"][2:], before["w"][2:])
            assert all(not torch.equal(state[key], before_state[key]) for key in state)
            alone, alone_state = step(optimizer, {**alone, "b": before["b"]}, updates, {**alone_state})
        else:
            assert torch.equal(theta["w"][2:], before["w"][2:])
            assert not torch.equal(theta["w"][:2], before["w"][:2])
            for key in (key for key in state if key.endswith("/w")):
                assert torch.equal(state[key][2:], before_state[key][2:])
        assert torch.equal(theta["w"][2:], alone["w"][2:])
        for key in (key for key in state if key.endswith("/w")):
            assert torch.equal(state[key][2:], alone_state[key][2:])


def test_adam_counts_steps_by_entry() -> None:
    """The first step of an entry is corrected as a first step, however late it comes."""
    optimizer, theta = fc.FedAdam(lr=0.1, tau=1e-12), {"w": torch.zeros(2)}
    first = fc.ClientUpdate(0, {"w": torch.tensor([1.0, 9.0])}, {"w": torch.tensor([True, False])})
    state = optimizer.initial_state(theta)
    for _ in range(5):
        theta, state = step(optimizer, theta, [first], state)
    assert state["steps/w"].tolist() == [5, 0]
    theta, state = step(optimizer, theta, [fc.ClientUpdate(0, {"w": torch.tensor([1.0, 3.0])}, {})], state)
    assert float(theta["w"][1]) == pytest.approx(0.1)  # Adam's first step is lr, whatever the gradient
    assert state["steps/w"].tolist() == [6, 1]


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumes_to_the_same_bits(name: str, small_federation: Make, tmp_path: Path) -> None:
    def federation() -> fc.Federation:
        return small_federation(aggregator=OURS[name], budgets=fc.by_slot("4777"), certify=True)

    whole = federation().run(5, evaluate_on=small_data())
    federation().run(2, evaluate_on=small_data(), out=tmp_path / "run", local_every=5)
    resumed = federation().run(5, evaluate_on=small_data(), out=tmp_path / "run", local_every=5, resume=True)
    assert whole.theta is not None
    assert resumed.theta is not None
    assert same(whole.theta, resumed.theta)
    assert whole.column("accuracy")[2:] == resumed.column("accuracy")[2:]
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    state = checkpoint.load(newest)[0]
    assert set(state.server) == set(OURS[name].initial_state(state.theta))
    certificate = resumed.last.certificate
    assert certificate is not None
    assert certificate["sentence"].endswith(f"this run's server uses {name}; use server.name=plain")


def test_resuming_with_another_optimizer_is_refused(small_federation: Make, tmp_path: Path) -> None:
    small_federation(aggregator=fc.FedAdam()).run(1, out=tmp_path / "run")
    with pytest.raises(fc.InputError, match=r"lr=0\.2"):
        small_federation(aggregator=fc.FedAdam(lr=0.2)).run(2, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("setting", ["lr", "tau", "beta1", "beta2", "momentum"])
def test_numbers_out_of_range_are_refused(name: str, setting: str) -> None:
    kind = SERVER_OPTIMIZERS[name]
    if hasattr(OURS[name], setting):
        with pytest.raises(fc.InputError, match=f"{setting} must be"):
            kind(**{setting: -0.5})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("first", "got"), [(0.1, "0.1"), ("median", "'median'"), (fc.mean, "mean itself")])
def test_what_cannot_be_wrapped_is_refused(name: str, first: object, got: str) -> None:
    with pytest.raises(fc.InputError, match=f"the first argument of {name} must be the aggregator .*; got {got}"):
        SERVER_OPTIMIZERS[name](first)


def test_defaults_wrap_the_mean() -> None:
    optimizer = fc.FedAdam()
    assert isinstance(optimizer, ServerOptimizer)
    assert optimizer.aggregator == fc.mean()
    assert not optimizer.needs_labels
    assert fc.FedYogi(fc.mean("labels")).needs_labels
