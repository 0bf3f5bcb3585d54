"""The client registry: nodes report facts and become stable clients; invalid facts are one line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.config.schema import check_config
from fedcover.data import Device, DevicePopulation
from fedcover.deploy.flower.apps import client as stock_client
from fedcover.deploy.flower.apps import device_check, play_config, rules_from_config
from fedcover.deploy.flower.client import client_app
from fedcover.deploy.flower.registry import ClientRegistry, device_from_facts
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FedCover
from fedcover.deploy.node.local_client import LocalClient, client_facts
from fedcover.deploy.status.run_rounds import read_rounds
from fedcover.engines.serial import Serial
from fedcover.federation.runs import Run, RunSchedule
from fedcover.toml import to_toml
from tests.contracts.federations import federation
from tests.unit.deploy.loop import LoopGrid, failed, grid_of
from tests.unit.deploy.playing import gathered, play, remote


def test_nodes_become_clients_by_the_facts_that_they_report() -> None:
    playing = federation(Serial(shrink=False))
    registry, _ = gathered(grid_of(playing))
    assert sorted(registry.devices) == list(range(8))
    for number, device in registry.devices.items():
        assert device.examples == playing.clients.size(number)
        assert device.labels == tuple(playing.clients.label_counts(number).tolist())
    assert len(set(registry.node_of.values())) == 8


def test_a_device_population_agrees_with_the_population() -> None:
    clients = federation(Serial(shrink=False)).clients
    population = DevicePopulation(
        clients.examples, list(gathered(grid_of(federation(Serial(shrink=False))))[0].devices.values())
    )
    assert len(population) == len(clients)
    assert population.total == clients.total
    assert torch.equal(population.label_totals(), clients.label_totals())
    for client in range(len(clients)):
        assert population.size(client) == clients.size(client)
        assert torch.equal(population.label_mix(client), clients.label_mix(client))
        assert population.classes_of(client) == clients.classes_of(client)
    with pytest.raises(fc.InputError, match="the examples of client 3 are on its own device"):
        population.indices(3)


def test_clients_that_do_not_share_their_labels() -> None:
    playing = federation(Serial(shrink=False))
    registry, _ = gathered(grid_of(playing, share_labels=False))
    assert {device.labels for device in registry.devices.values()} == {None}
    population = DevicePopulation(playing.clients.examples, list(registry.devices.values()))
    assert not population.shares_labels
    with pytest.raises(fc.InputError, match=r"client 2 .*--share-labels"):
        population.label_mix(2)
    with pytest.raises(fc.InputError, match="--share-labels"):
        fc.Federation(playing.task, population, aggregator=fc.mean("labels"), cohort=2)
    one = fc.Federation(playing.task, population, fc.heterofl(), fc.by_slot("2x1"), cohort=2)
    with pytest.raises(fc.InputError, match="--share-labels"):
        one.begin_round(one.start())


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "does not report its number"),
        ({"client": -1, "examples": 3}, "does not report its number"),
        ({"client": True, "examples": 3}, "does not report its number"),
        ({"client": 1, "examples": 0}, "number of examples must be"),
        ({"client": 1, "examples": 3, "capacity": 2.0}, "capacity must be a share of the model"),
        ({"client": 1, "examples": 3, "capacity": float("nan")}, "capacity must be a share of the model"),
        ({"client": 1, "examples": 3, "capacity": "much"}, "client 1 reports the capacity 'much'"),
        ({"client": 1, "examples": 3, "labels": [1, -2]}, "client 1 reports 2 labels"),
        ({"client": 1, "examples": 3, "labels": []}, "labels of client 1"),
        ({"client": 1, "examples": 3, "age": 7}, "unknown age"),
        ({"error": "no data\nhere"}, "no data here"),
    ],
)
def test_invalid_facts_are_one_sentence(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(fc.InputError, match=reason):
        device_from_facts(facts)


def test_two_nodes_that_claim_one_client() -> None:
    playing = federation(Serial(shrink=False))
    app = client_app(playing.task, lambda context: playing.clients.examples_of(0))
    grid = LoopGrid({0: app, 1: app}, {1: {"client": 0}})
    registry, lines = gathered(grid, 1)
    assert list(registry.devices) == [0]
    assert any("client 0 has already joined" in line for line in lines)


def test_a_client_on_a_new_node_stays_the_same_client_and_a_new_client_waits() -> None:
    playing = federation(Serial(shrink=False))
    grid = grid_of(playing)
    grid.offline = {7}
    registry, lines = gathered(grid, 7)
    registry.closed = True
    (old,) = (node for node, client in grid.nodes.items() if client == 3)
    del grid.nodes[old]
    grid.nodes[5] = 3
    grid.offline = set()
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert registry.node_of[3] == 5
    assert 7 not in registry.devices
    assert any("client 7 joined after the run started" in line for line in lines)


def test_too_few_clients_is_one_sentence() -> None:
    with pytest.raises(fc.InputError, match=r"8 of 9 clients have joined after 0.1 s"):
        gathered(grid_of(federation(Serial(shrink=False))), 9)


def test_a_registry_is_saved_for_a_resumed_run(tmp_path: Path) -> None:
    registry = ClientRegistry({3: Device(3, 5, (2, 3), 0.5), 1: Device(1, 4)})
    registry.save(tmp_path)
    again = ClientRegistry.load(tmp_path)
    assert again.devices == registry.devices
    assert again.closed
    (tmp_path / "clients.json").write_text('[{"number": 1}]')
    with pytest.raises(fc.InputError, match="not a readable client registry"):
        ClientRegistry.load(tmp_path)


def test_a_resumed_run_does_not_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcover.deploy.flower.registry.SETTLED", 0.2)
    grid, registry = grid_of(federation(Serial(shrink=False))), ClientRegistry()
    grid.offline = {2, 5}
    registry.gather(grid, 8, 60, lambda line: None, least=1)
    assert len(registry.node_of) == 6


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({}, Device(1, 3, (1, 2)), "2 classes"),
        ({}, Device(1, 10, (10**9,) * 10), "10000000000"),
        ({"aggregation": {"weighting": "labels"}}, Device(1, 3), "--share-labels"),
        ({"policy": {"name": "HeteroFL"}}, Device(1, 3), "--share-labels"),
        ({"policy": {"name": "full"}}, Device(1, 3, None, 0.5), "can afford 0.5 of the model"),
        ({"model": {"name": "cnn"}}, Device(1, 1), "client 1 .*batch norm"),
        ({"model": {"name": "cnn"}}, Device(1, 31), "client 1 .*batch norm"),
    ],
)
def test_the_facts_of_one_client_do_not_end_the_run_of_the_others(
    settings: dict[str, Any], device: Device, reason: str
) -> None:
    config = check_config({"data": {"name": "digits"}, **settings})
    registry = ClientRegistry(check_device=device_check(config, fc.data.load("digits").train))
    with pytest.raises(fc.InputError, match=reason):
        registry._add(7, device, {7})
    assert not registry.devices
    registry._add(7, Device(1, 10, (1,) * 10, 1.0), {7})
    assert list(registry.devices) == [1]


def test_a_client_cannot_afford_more_than_the_model() -> None:
    with pytest.raises(fc.InputError, match="capacity must be a share of the model"):
        Device(1, 3, None, 1 + 1e-13)  # a budget of this would be an error when the run is built
    assert Device(1, 3, None, 1.0).capacity == 1.0


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        ({"_reply_to_message_id": "another"}, "its reply names another request"),
        ({"_src_node_id": 900_001}, "its reply names another node as its sender"),
        (None, "its reply cannot be read: ValueError: Error parsing message"),
    ],
)
def test_unreadable_and_forged_replies_add_no_clients(forge: dict[str, Any] | None, reason: str) -> None:
    """And cost no other node its place: the first reply that cannot be read hides none of the others."""
    playing, lines, registry = federation(Serial(shrink=False)), list[str](), ClientRegistry()
    grid = grid_of(playing)
    pull, bad = grid.pull_messages, 900_001 + 7_919 * 3

    def tampered(keys: Any) -> Any:
        replies = pull(keys)
        for reply in replies:
            if reply.metadata.src_node_id == bad:
                if forge is None:
                    raise ValueError("Error parsing message")
                reply.metadata.__dict__.update(forge)
        return replies

    grid.pull_messages = tampered  # type: ignore[method-assign]
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert sorted(registry.devices) == [0, 1, 2, 4, 5, 6, 7]
    assert f"node {bad} is left out: {reason}" in lines


def test_a_node_of_a_simulation_that_cannot_take_part_ends_it() -> None:
    playing = federation(Serial(shrink=False))

    def data(context: object) -> Any:
        raise OSError("no such folder")

    grid, registry = LoopGrid({0: client_app(playing.task, data)}), ClientRegistry(wait_for_rejected=False)
    with pytest.raises(fc.InputError, match=r"a client of the simulation cannot take part: .*no such folder"):
        registry.gather(grid, 1, 60.0, lambda line: None)
    assert not rules_from_config(check_config({"engine": "flower-sim"})).wait_for_rejected
    assert rules_from_config(check_config({})).wait_for_rejected


def test_values_are_not_counted_as_labels() -> None:
    x = torch.randn(6, 4)
    local = LocalClient(fc.Task(torch.nn.Linear(4, 1)), fc.data.as_examples((x, x.sum(1))))
    assert client_facts(local, {"client": 0, "share-labels": True}) == {"client": 0, "examples": 6}


def test_a_rejected_node_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client restarted with the same key has the same node, and its fault may be fixed."""
    playing, good = federation(Serial(shrink=False)), [False]

    def data(context: object) -> Any:
        if not good[0]:
            raise OSError("no such folder")
        return playing.clients.examples_of(0)

    grid, registry, lines = LoopGrid({0: client_app(playing.task, data)}), ClientRegistry(), list[str]()
    for _ in range(3):
        registry.update(grid, grid.get_node_ids(), lines.append)
    assert [line for line in lines if "no such folder" in line] == lines
    assert len(lines) == 1
    good[0] = True
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert not registry.devices  # not at every poll
    registry.update(grid, [], lines.append)
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert list(registry.devices) == [0]
    good[0], registry = False, ClientRegistry()
    registry.update(grid, grid.get_node_ids(), lines.append)
    good[0] = True
    now = time.monotonic()
    monkeypatch.setattr("fedcover.deploy.flower.registry.time.monotonic", lambda: now + 60)
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert list(registry.devices) == [0]


def test_a_client_gets_a_new_node_once_the_old_one_is_offline() -> None:
    """A server takes a minute to notice that a node has died; a new one may join before that."""
    playing = federation(Serial(shrink=False))
    grid = grid_of(playing)
    registry, lines = gathered(grid)
    (old,) = (node for node, client in grid.nodes.items() if client == 3)
    grid.nodes[5] = 3
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert "client 3 has already joined" in lines[-1]
    del grid.nodes[old]
    registry._rejected = {node: (reason, 0.0) for node, (reason, _) in registry._rejected.items()}  # time passes
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert registry.node_of[3] == 5
    grid.nodes[old] = 3
    del grid.nodes[5]
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert registry.node_of[3] == old


def test_the_run_folder_names_the_node_that_a_client_has_now(tmp_path: Path) -> None:
    """A replaced key makes another node, and the status finds clients by their nodes."""
    playing = federation(Serial(shrink=True), "WP")
    grid = grid_of(playing)
    old = next(node for node, client in grid.nodes.items() if client == 3)

    def replace_key(record: fc.RoundRecord) -> None:
        if old in grid.nodes:
            grid.nodes[77] = grid.nodes.pop(old)

    play(grid, remote(playing, fc.weight_pruning()), 2, out=tmp_path / "run", on_round=replace_key)
    clients = read_rounds(tmp_path / "run").clients
    assert clients[77].client == 3
    assert old not in clients


def test_a_timeout_is_not_an_error_when_enough_clients_have_joined() -> None:
    grid, registry = grid_of(federation(Serial(shrink=False))), ClientRegistry()
    grid.offline = {2, 5}
    registry.gather(grid, 8, 0.1, lambda line: None, least=1)
    assert len(registry.node_of) == 6


def test_a_node_that_fails_is_reported_once_and_a_lost_connection_is_an_error() -> None:
    grid, registry, lines = grid_of(federation(Serial(shrink=False))), ClientRegistry(), list[str]()
    pull = grid.pull_messages
    grid.pull_messages = lambda keys: [failed(reply, "no such app", 1) for reply in pull(keys)]  # type: ignore[method-assign]
    for _ in range(3):
        registry.update(grid, grid.get_node_ids(), lines.append)
    assert len(lines) == 8
    assert all(line.endswith("is queried again: its app could not be loaded: no such app") for line in lines)

    def lost(keys: Any) -> Any:
        raise ConnectionError("refused")

    grid.pull_messages = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        registry.update(grid, grid.get_node_ids(), lines.append)
    grid.pull_messages = pull  # type: ignore[method-assign]
    registry.update(grid, grid.get_node_ids(), lines.append)
    assert len(registry.devices) == 8


def test_records_and_lines_name_clients_by_their_numbers(tmp_path: Path) -> None:
    """Numbers need not be 0, 1, 2: a record, a reason or a status must identify the node that it is about."""
    raw: dict[str, Any] = {
        "data": {"name": "digits", "clients": 60},
        "rounds": 2,
        "cohort": 3,
        "policy": {"name": "NP"},
        "budgets": {"code": "111"},
        "local": {"epochs": 1},
        "flower": {"gather": 5.0, "deadline": 1.0, "clients": 3, "quorum": 0.3},
    }
    numbers = (7, 30, 52)
    grid = LoopGrid(dict.fromkeys(numbers, stock_client), None, {"settings": to_toml(raw)})

    def tamper(client: int, number: int, reply: Any) -> Any:
        return (None, reply, failed(reply, "node unavailable"))[numbers.index(client)]

    grid.tamper = tamper
    lines, out = list[str](), tmp_path / "run"
    history = play_config(grid, check_config({**raw, "engine": "flower"}), out, notify=lines.append)
    for record in history:
        assert sorted(record.cohort) == list(numbers)
        assert sorted(row["client"] for row in record.rejected) == [7, 52]
    assert json.loads((out / "summary.json").read_text())["clients"] == list(numbers)
    assert {node: row.client for node, row in read_rounds(out).clients.items()} == grid.nodes
    assert ClientRegistry.load(out).devices.keys() == set(numbers)
    for node, number in grid.nodes.items():
        assert f"client {number} is node {node}" in lines
    assert any(line.startswith("round 1: client 7 is left out") for line in lines)


def fails_in_training(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if len(labels) > 2:
        raise RuntimeError("no attribute 'ohno'")
    return scores.mean()


def test_a_device_that_fails_reports_its_own_number() -> None:
    playing, broken = (
        federation(Serial(shrink=False)),
        fc.Task(federation(Serial(shrink=False)).task.model, loss=fails_in_training),
    )
    apps = {
        n: client_app(broken if n == 45 else playing.task, lambda context, n=n: playing.clients.examples_of(n - 40))
        for n in range(40, 48)
    }
    grid, lines = LoopGrid(apps), list[str]()
    registry, _ = gathered(grid)
    population = DevicePopulation(playing.clients.examples, list(registry.devices.values()))
    remote = fc.Federation(playing.task, population, fc.weight_pruning(), fc.by_slot("1" * 8), playing.local, 8)
    run, rules = Run(remote, None, lambda record: None), RoundRules(deadline=1.0)
    record = FedCover(run, RunSchedule(1), registry, rules, notify=lines.append).run(grid).last
    (left,) = record.rejected
    assert left["client"] == 45
    assert "client 45 failed in round 1 while training" in left["reason"]
    assert sorted(record.cohort) == list(range(40, 48))
