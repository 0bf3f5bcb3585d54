"""What nodes may claim: limits of the operator, facts that cannot be used, and runs that start without such nodes."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.config.schema import check_config
from fedcover.data import Device, DevicePopulation
from fedcover.deploy.flower.apps import client as stock_client
from fedcover.deploy.flower.apps import play_config, rules_from_config
from fedcover.deploy.flower.claims import ClaimLimits, ClientLimit
from fedcover.deploy.flower.registry import ClientRegistry, device_from_facts
from fedcover.toml import to_toml
from tests.conftest import small_data
from tests.unit.deploy.loop import LoopGrid

RAW: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4},
    "engine": "flower",
    "rounds": 1,
    "cohort": 4,
    "policy": {"name": "WP"},
    "budgets": {"code": "1111"},
    "local": {"epochs": 1},
    "flower": {"gather": 1.0, "deadline": 5.0, "quorum": 0.5},
}


def fleet(facts: dict[int, dict[str, Any]], raw: dict[str, Any] = RAW, clients: int = 4) -> LoopGrid:
    """Return a grid of the stock client, whose nodes are configured with these facts."""
    return LoopGrid(dict.fromkeys(range(clients), stock_client), facts, {"settings": to_toml(raw)})


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"capacity": -1.0}, r"client 2 .*capacity must be a share of the model in \(0, 1\]; got -1.0"),
        ({"capacity": 5.0}, r"client 2 .*got 5.0"),
        ({"capacity": 1e-9}, "client 2 claims a capacity of 1e-09, below claims.least_capacity"),
    ],
)
def test_a_node_with_a_bad_fact_is_named_and_the_others_start(
    fact: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    lines = list[str]()
    config = check_config(RAW)
    history = play_config(fleet({2: fact}), config, tmp_path / "run", notify=lines.append)
    assert sorted(history.last.cohort) == [0, 1, 3]
    (start,) = [line for line in lines if "are enough" in line]
    assert start.startswith("3 of 4 clients are enough; the run starts without the others (node ")
    assert re.search(reason, start)


def test_a_run_without_a_quorum_names_the_nodes_and_what_they_sent(tmp_path: Path) -> None:
    bad = {0: {"capacity": -1.0}, 1: {"capacity": 5.0}, 2: {"capacity": 1e-9}}
    with pytest.raises(fc.InputError) as error:
        play_config(fleet(bad), check_config(RAW), tmp_path / "run", notify=lambda line: None)
    text = str(error.value)
    assert text.startswith("1 of 4 clients have joined after 1 s, and 2 are needed (node ")
    for part in ("got -1.0", "got 5.0", "capacity of 1e-09", "fedcover deploy client"):
        assert part in text
    assert not (tmp_path / "run").exists()


def test_a_code_with_different_slots_needs_a_client_for_each(tmp_path: Path) -> None:
    raw = {**RAW, "budgets": {"code": "1,1,0.5,0.5"}}
    with pytest.raises(fc.InputError, match="3 of 4 clients have joined after 1 s, and 4 are needed"):
        play_config(fleet({2: {"capacity": -1.0}}, raw), check_config(raw), tmp_path / "run", notify=lambda line: None)


def test_a_huge_list_of_labels_is_one_sentence() -> None:
    with pytest.raises(fc.InputError, match="client 3 reports 1000001 labels"):
        device_from_facts({"client": 3, "examples": 5, "labels": [1] * 1_000_001})


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
def test_a_capacity_is_cut_to_what_the_operator_allows_and_reported(tmp_path: Path) -> None:
    raw = {**RAW, "claims": {"capacity": 0.75, "clients": {"1": {"capacity": 0.5}}}}
    lines = list[str]()
    grid = fleet({number: {"capacity": 1.0} for number in range(4)}, raw)
    history = play_config(grid, check_config(raw), tmp_path / "run", notify=lines.append)
    kept = dict(zip(history.last.cohort, history.last.kept, strict=True))
    assert kept[1] < kept[0] == kept[2] == kept[3] < 1
    assert any("client 1 is node" in line and "a capacity of 1 is cut to 0.5" in line for line in lines)
    rows = {row["number"]: row for row in json.loads((tmp_path / "run" / "clients.json").read_text())}
    assert (rows[1]["capacity"], rows[1]["claimed_capacity"]) == (0.5, 1.0)
    assert ClientRegistry.load(tmp_path / "run").devices[1].capacity == 0.5


def test_limits_of_single_clients() -> None:
    limits = ClaimLimits(clients={3: ClientLimit(capacity=0.5, examples=100)})
    assert limits.limited(Device(3, 100, capacity=0.25)).capacity == 0.25
    assert limits.limited(Device(4, 100)).capacity is None
    with pytest.raises(fc.InputError, match=r"client 3 reports no capacity, .*limit it to 0\.5; .*--capacity"):
        limits.limited(Device(3, 100))  # it would get the run's budget, which may be the whole model
    assert limits.limited(Device(4, 10**9, capacity=1.0)) == Device(4, 10**9, capacity=1.0)
    with pytest.raises(fc.InputError, match=r"client 3 claims 101 examples, and claims\.clients\.3 allows 100"):
        limits.limited(Device(3, 101, capacity=0.5))


@pytest.mark.parametrize(
    "clients", [{"x": {}}, {"1": 3}, {"1": {"speed": 2}}, {"1": {"capacity": 2.0}}, {"1": {"examples": 0}}]
)
def test_wrong_limits_are_named(clients: dict[str, Any]) -> None:
    with pytest.raises(fc.InputError, match=r"claims\.clients|capacity|examples"):
        check_config({"claims": {"clients": clients}})


def test_limits_come_from_the_settings() -> None:
    config = check_config({"claims": {"least_capacity": 0.1, "clients": {"3": {"examples": 7}}}})
    assert rules_from_config(config).claims == ClaimLimits(1.0, 0.1, {3: ClientLimit(None, 7)})


def test_one_device_does_not_decide_the_labels_or_the_draws_of_all() -> None:
    """A claim of very many examples would be the population's label mix, and be drawn in every round."""
    examples = small_data(30)
    honest = [Device(number, 30, (10, 10, 10)) for number in range(4)]
    liar = Device(9, 3 * 10**15, (3 * 10**15, 0, 0))
    believed, capped = (DevicePopulation(examples, [*honest, liar], most) for most in (float("inf"), 2.0))
    assert believed.label_totals()[0] / believed.label_totals().sum() > 0.999
    assert torch.equal(capped.label_totals(), torch.tensor([40 + 60, 40, 40]))
    assert [capped.counted_examples(client) for client in range(5)] == [30, 30, 30, 30, 60]
    drawn = [fc.weighted("examples").draw(fc.Round(index, 0), capped, 1, None) for index in range(1, 61)]  # type: ignore[arg-type]
    assert 5 < sum(ids == [4] for ids in drawn) < 40


@pytest.mark.parametrize("examples", [100, 2**50])
def test_a_node_that_claims_balanced_labels_does_not_own_the_model(examples: int) -> None:
    """The labels of the others are skewed, so that weights by labels would be almost only its own."""
    honest = [[100 * (label == client) for label in range(10)] for client in range(10)]
    devices = [Device(i, sum(row), tuple(row)) for i, row in enumerate([[examples // 10] * 10, *honest])]
    data, theta = fc.data.as_examples((torch.zeros(20, 2), torch.arange(20) % 10)), {"w": torch.zeros(1)}
    shares = []
    for most in (math.inf, 2.0):
        total = fc.mean("labels").bind(DevicePopulation(data, devices, most)).start(theta, [], {})
        for client in range(6):  # a region that half of the clients hold
            total.add(fc.ClientUpdate(client, {"w": torch.full((1,), float(client == 0))}, {}))
        shares.append(total.result()["w"].item())
    assert shares[0] > 0.8
    assert shares[1] == pytest.approx(2 / 6)
