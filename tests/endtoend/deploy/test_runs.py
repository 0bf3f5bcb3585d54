"""Whole runs over real processes on loopback, with TLS and node keys: bit-identical to the serial engine."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import pytest

import fedcover as fc
from fedcover._threads import one_thread
from fedcover.cli.deploy import submit
from fedcover.config.build import build_federation
from fedcover.config.schema import Config, parse_config
from fedcover.config.task_and_data import load_data, population
from fedcover.data import Device
from fedcover.deploy.flower.registry_file import clients_by_node
from fedcover.deploy.processes.keys import make_keys, node_keys, server_keys
from fedcover.deploy.processes.launch import SuperLink, SuperNode
from fedcover.deploy.processes.node_config import node_config
from fedcover.engines.serial import Serial
from fedcover.errors import FedcoverError
from fedcover.federation import checkpoint
from fedcover.federation.history import History
from fedcover.federation.round import Arrivals
from fedcover.params import Params
from tests.endtoend.deploy.conftest import Marked, close_all, slow, wait_for_nodes
from tests.laws.strategies import same

CAPACITIES = (1.0, 0.75, 0.5, 0.25)
SETTINGS = """
rounds = {rounds}
cohort = 4
[data]
name = "digits"
clients = 4
[policy]
name = "NP"
[local]
epochs = 1
[budgets]
code = "1111"
[flower]
deadline = {deadline}
quorum = 0.25
"""
HEAD = 1000
"""The most bytes of a message that are not values of the model."""
pytestmark = [pytest.mark.timeout(900)]


@dataclass
class Deployment:
    """A server and four nodes, and the files by which a test controls them."""

    folder: Path
    link: SuperLink
    nodes: list[SuperNode]

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    def plan(self, faults: dict[str, str]) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def restart(self) -> None:
        """Restart the server at the same port."""
        self.link.close()
        self.link = SuperLink(server_keys(self.keys / "server"), self.folder / "server", port=self.link.port)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    make_keys(folder / "keys", 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
        patch.setenv("FEDCOVER_TEST_FAULTS", str(folder / "faults.json"))
        patch.setenv("OMP_NUM_THREADS", "1")
        link = SuperLink(server_keys(folder / "keys" / "server"), folder / "server")
        nodes: list[SuperNode] = []
        deployment = Deployment(folder, link, nodes)
        try:
            link.register(server_keys(folder / "keys" / "server").nodes[: len(CAPACITIES)])
            for number, capacity in enumerate(CAPACITIES):
                keys = node_keys(folder / "keys" / f"node-{number}")
                nodes.append(SuperNode(link.address, keys, node_config(number, "", capacity, [], share_labels=True)))
            for node in nodes:
                node.join()
            deployment.plan({})
            yield deployment
        finally:
            close_all([node.program for node in nodes])
            for served in (*nodes, deployment.link):
                served.close()


def serial_run(config: Config, rejected: list[list[dict[str, object]]]) -> tuple[list[fc.RoundRecord], Params]:
    """Play the same run in this process by the serial engine, with the same clients left out."""
    clients = population(config, load_data(config))
    devices = [
        Device(i, clients.size(i), tuple(clients.label_counts(i).tolist()), CAPACITIES[i]) for i in range(len(clients))
    ]
    remote, test = build_federation(config, devices=devices)
    local, _ = build_federation(config.model_copy(update={"engine": "serial"}))
    state, records = remote.start(), []
    for left_out in rejected:
        last, absent = len(records) + 1 == len(rejected), {row["client"] for row in left_out}
        with one_thread():  # as in a run: sums are then the same on every machine
            begun = remote.begin_round(state)
            jobs = [replace(job, population=local.clients) for job in begun.jobs if job.client.id not in absent]
            updates = Serial(shrink=True).train(jobs)
            state, record = remote.end_round(begun, Arrivals(updates, left_out=left_out), remote.test_set(test), last)
        records.append(record)
    return records, state.theta


def outcome(folder: Path) -> tuple[History, Params]:
    """Return the history and the model of a run folder."""
    newest = sorted((folder / "checkpoints").glob("round-*.safetensors"))[-1]
    return History.load(folder / "history.jsonl"), checkpoint.load(newest)[0].theta


def test_four_unequal_nodes_train_what_the_serial_engine_trains(deployment: Deployment) -> None:
    nodes = wait_for_nodes(deployment.link.control, 4, 60)
    settings, out = SETTINGS.format(rounds=2, deadline=240), deployment.folder / "plain"
    state = submit(deployment.link.control, settings, out, quiet=True)
    assert state.completed, state.details
    history, theta = outcome(out)
    expected, expected_theta = serial_run(parse_config(settings), [[], []])
    assert list(history) == expected
    assert same(theta, expected_theta)
    assert [record.rejected for record in history] == [[], []]
    assert clients_by_node(out) == {node.node: number for number, node in enumerate(deployment.nodes)}
    assert set(clients_by_node(out)) <= {node.id for node in nodes}
    wire = history.last.wire
    assert wire is not None
    for client, *sizes in zip(history.last.cohort, wire["down"], wire["up"], strict=True):
        values = CAPACITIES[client] * wire["full"]
        assert all(values <= size < values + HEAD for size in sizes), f"client {client}: {sizes}, not {values}"


@slow
def test_whatever_clients_and_servers_do_the_run_continues_or_resumes(deployment: Deployment, marked: Marked) -> None:
    """NaN, shapes, sizes, an old round, silence, a killed node, a client on two nodes, a killed server."""
    wait_for_nodes(deployment.link.control, 4, 60)
    deployment.plan(
        {
            "client 1 round 1": "NaN",
            "client 2 round 1": "wrong shapes",
            "client 3 round 1": "too large",
            "client 1 round 2": "old round",
            "client 2 round 2": "late",
            "client 3 round 2": "late",  # it is killed while it waits
            "client 0 round 3": "pause",  # meanwhile the server is killed
        }
    )
    settings, out = SETTINGS.format(rounds=3, deadline=45), deployment.folder / "faulty"
    same_client = node_config(0, "", 1.0, [], share_labels=True)
    deployment.link.register(server_keys(deployment.keys / "server").nodes)
    twin = SuperNode(deployment.link.address, node_keys(deployment.keys / "node-4"), same_client)
    deployment.nodes.append(twin)
    twin.join()

    def kill() -> None:
        _wait_for(deployment.folder / "client 3 round 2")
        os.kill(deployment.nodes[3].program.pid, signal.SIGKILL)
        _wait_for(deployment.folder / "client 0 round 3")
        os.kill(deployment.link.program.pid, signal.SIGKILL)

    killer = Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(FedcoverError):
        submit(deployment.link.control, settings, out, quiet=True, apps="tests.endtoend.deploy.faulty_app")
    killer.join(1)
    assert len(History.load(out / "history.jsonl")) == 2
    deployment.plan({})
    deployment.restart()
    wait_for_nodes(deployment.link.control, 2, 90)
    state = submit(
        deployment.link.control, settings, out, resume=True, quiet=True, apps="tests.endtoend.deploy.faulty_app"
    )
    assert state.completed, state.details

    history, theta = outcome(out)
    assert len(history) == 3
    reasons = [{row["client"]: row["reason"] for row in record.rejected} for record in history]
    assert set(reasons[0]) == {1, 2, 3}
    assert "finite" in reasons[0][1]
    assert "values" in reasons[0][2]
    assert "times" in reasons[0][3]
    assert set(reasons[1]) == {1, 2, 3}
    assert "round" in reasons[1][1]
    assert "reply" in reasons[1][2]
    assert "reply" in reasons[1][3]
    assert {3} <= set(reasons[2]) <= {2, 3}  # one is dead, the other may still train for the last round
    assert [record.gamma_min for record in history] == [1, 1, 1]
    expected, expected_theta = serial_run(parse_config(settings), [record.rejected for record in history])
    assert list(history) == expected
    assert same(theta, expected_theta)

    close_all([node.program for node in deployment.nodes])
    deployment.link.close()
    assert marked.left(20) == []


def _wait_for(path: Path, seconds: float = 200) -> None:
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
