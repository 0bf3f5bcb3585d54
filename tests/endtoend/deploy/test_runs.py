"""Whole runs over real processes on loopback, with TLS and node keys: bit-identical to the serial engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import fedcover as fc
from fedcover._threads import one_thread
from fedcover.config.build import build_federation
from fedcover.config.schema import Config, parse_config
from fedcover.config.task_and_data import load_data, population
from fedcover.data import Device
from fedcover.deploy.node import configured_client
from fedcover.deploy.status.run_rounds import read_rounds
from fedcover.engines.serial import Serial
from fedcover.federation import checkpoint
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.history import History
from fedcover.federation.run_folder import lock_folder, unlock_folder
from fedcover.params import Params
from tests.endtoend.deploy.conftest import SKIP, Marked, slow
from tests.endtoend.deploy.fleet import FAULTY_NODE, Fleet, wait_for
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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    faults = {"FEDCOVER_TEST_FAULTS": str(folder / "faults.json")}
    with closing(Fleet(folder, 5)) as fleet:
        plan(fleet, {})
        for number, capacity in enumerate(CAPACITIES):
            options = ["--capacity", str(capacity), "--share-labels"]
            fleet.start_node(number, *options, module=FAULTY_NODE, environment=faults)
        fleet.join()
        yield fleet


def plan(fleet: Fleet, faults: dict[str, str]) -> None:
    """Write which client fails how in which round."""
    (fleet.folder / "faults.json").write_text(json.dumps(faults))


def serial_run(
    config: Config, rejected: list[list[dict[str, object]]], capacities: Sequence[float] = CAPACITIES
) -> tuple[list[fc.RoundRecord], Params]:
    """Play the same run in this process by the serial engine, with the same clients left out."""
    clients = population(config, load_data(config))
    devices = [
        Device(i, clients.size(i), tuple(clients.label_counts(i).tolist()), capacities[i]) for i in range(len(clients))
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


def test_four_unequal_nodes_train_what_the_serial_engine_trains(fleet: Fleet) -> None:
    settings = SETTINGS.format(rounds=2, deadline=240)
    out = fleet.play(settings, "plain")
    history, theta = outcome(out)
    expected, expected_theta = serial_run(parse_config(settings), [[], []])
    assert list(history) == expected
    assert same(theta, expected_theta)
    assert [record.rejected for record in history] == [[], []]
    nodes = fleet.registered()
    clients = {node: row.client for node, row in read_rounds(out).clients.items()}
    assert clients == {nodes[f"node-{number}"].id: number for number in range(len(CAPACITIES))}
    wire = history.last.wire
    assert wire is not None
    for client, *sizes in zip(history.last.cohort, wire["down"], wire["up"], strict=True):
        values = CAPACITIES[client] * wire["full"]
        assert all(values <= size < values + HEAD for size in sizes), f"client {client}: {sizes}, not {values}"


@pytest.mark.parametrize("complement", ["frozen", pytest.param("kept", marks=(pytest.mark.slow, SKIP))])
def test_nodes_see_what_clients_of_the_serial_engine_see(fleet: Fleet, complement: str) -> None:
    """The whole model is sent in every round, or once: then nodes keep their copies, in files."""
    settings = SETTINGS.format(rounds=2, deadline=240).replace("NP", "FedRolex")
    settings += f'[complement]\nname = "{complement}"\n'
    history, theta = outcome(fleet.play(settings, complement))
    expected, expected_theta = serial_run(parse_config(settings), [[], []])
    assert list(history) == expected
    assert same(theta, expected_theta)
    assert [record.rejected for record in history] == [[], []]
    for record in history:
        wire = record.wire
        assert wire is not None
        for client, down, up in zip(record.cohort, wire["down"], wire["up"], strict=True):
            part = CAPACITIES[client] * wire["full"]
            values = part if complement == "kept" and record.round > 1 else wire["full"]
            assert values <= down < values + 2 * HEAD, f"client {client}: {down}, not {values}"
            assert part <= up < part + HEAD
    files = [fleet.folder / f"node-{number}" / "copy.safetensors" for number in range(len(CAPACITIES))]
    assert [file.exists() for file in files] == [complement == "kept"] * len(files)


def test_a_killed_worker_costs_seconds_and_no_reply(fleet: Fleet) -> None:
    """The worker of one node is killed while it works: the node starts another, which replies."""
    plan(fleet, {"client 1 round 1": "pause"})
    settings = SETTINGS.format(rounds=1, deadline=240)
    run = fleet.start_run(settings, "killed-worker")
    wait_for(lambda: (fleet.folder / "client 1 round 1").exists(), 60)
    plan(fleet, {})
    (worker,) = fleet.children(1)
    killed = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: (fleet.folder / "killed-worker" / "history.jsonl").exists(), 100, "the record of the round")
    assert time.monotonic() - killed < max(10, 3 * seconds_to_start_a_worker())  # of a deadline of 240 s
    assert run.process.wait(60) == 0, run.printed
    history, theta = outcome(fleet.folder / "killed-worker")
    expected, expected_theta = serial_run(parse_config(settings), [[]])
    assert list(history) == expected
    assert same(theta, expected_theta)
    assert fleet.children(1) != [worker]
    events = [json.loads(line) for line in (fleet.folder / "node-1" / "events.jsonl").read_text().splitlines()]
    (reason,) = [event["reason"] for event in events if event["event"] == "worker died"]
    assert reason == "the process that trains ended by signal SIGKILL (is there enough memory?)"


def seconds_to_start_a_worker() -> float:
    """Return how long a process takes to load what a worker loads: two seconds, or ten on a busy machine."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {configured_client.__name__}"], check=True)
    return time.monotonic() - start


@slow
def test_a_worker_that_dies_again_costs_seconds_and_is_named(fleet: Fleet) -> None:
    plan(fleet, {"client 2 round 1": "death"})
    history, _ = outcome(fleet.play(SETTINGS.format(rounds=2, deadline=240), "dying"))
    (row,) = history[0].rejected
    assert row["client"] == 2
    assert "its process ended with code 3, 2 times" in row["reason"]
    assert sum(history[0].seconds.values()) < 60  # of a deadline of 240 s
    assert history.last.rejected == []


@slow
def test_a_worker_that_is_stuck_is_ended_with_its_round(fleet: Fleet) -> None:
    plan(fleet, {"client 1 round 1": "stuck"})
    history, _ = outcome(fleet.play(SETTINGS.format(rounds=3, deadline=10), "stuck"))
    assert [row["client"] for row in history[0].rejected] == [1]
    assert history.last.rejected == []


def test_a_folder_in_use_is_one_sentence(fleet: Fleet) -> None:
    """In the log that the command line follows, and as its error; slow tests have other bad files."""
    out = fleet.folder / "busy"
    out.mkdir()
    lock = lock_folder(out)
    run = fleet.start_run(SETTINGS.format(rounds=1, deadline=240), "busy")
    assert run.process.wait(120) == 1
    unlock_folder(lock)
    sentence = f"{out} is in use by process {os.getpid()}; wait for it, or name another folder"
    assert run.printed.splitlines()[-2:] == [f"error: {sentence}", f"error: the run failed: {sentence}"]
    assert "Traceback" not in run.printed
    assert "Exit Code" not in run.printed


@slow
def test_whatever_clients_and_servers_do_the_run_continues_or_resumes(fleet: Fleet, marked: Marked) -> None:
    """NaN, shapes, sizes, an old round, silence, a killed node, a client on two nodes, a killed server."""
    plan(
        fleet,
        {
            "client 1 round 1": "NaN",
            "client 2 round 1": "wrong shapes",
            "client 3 round 1": "too large",
            "client 1 round 2": "old round",
            "client 2 round 2": "late",
            "client 3 round 2": "late",  # it is killed while it waits
            "client 0 round 3": "pause",  # meanwhile the server is killed
        },
    )
    settings, out = SETTINGS.format(rounds=3, deadline=45), fleet.folder / "faulty"
    faults = {"FEDCOVER_TEST_FAULTS": str(fleet.folder / "faults.json")}  # either of the two may serve client 0
    options = ["--capacity", "1", "--share-labels", "--client", "0"]
    fleet.start_node(4, *options, module=FAULTY_NODE, environment=faults).wait_for("joined")
    run = fleet.start_run(settings, "faulty")
    wait_for(lambda: (fleet.folder / "client 3 round 2").exists(), 200)
    fleet.nodes[3].end(signal.SIGKILL)
    wait_for(lambda: (fleet.folder / "client 0 round 3").exists(), 200)
    fleet.server.end(signal.SIGKILL)
    assert run.process.wait(120) == 1, run.printed
    assert len(History.load(out / "history.jsonl")) == 2
    plan(fleet, {})
    fleet.start_server()
    wait_for(lambda: sum(node.online for node in fleet.registered().values()) >= 2, 90)
    fleet.play(settings, "faulty", "--resume")

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
    assert reasons[1][3]
    assert {3} <= set(reasons[2]) <= {2, 3}  # one is dead, the other may still train for the last round
    assert [record.gamma_min for record in history] == [1, 1, 1]
    expected, expected_theta = serial_run(parse_config(settings), [record.rejected for record in history])
    assert list(history) == expected
    assert same(theta, expected_theta)

    fleet.close()
    assert marked.left(20) == []
