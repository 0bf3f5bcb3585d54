"""The state of a fleet: what is read from run folders, and how it is written."""

import json
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser

from fedcover.deploy.flower.coverage_plan import PLAN
from fedcover.deploy.processes.control import RegisteredNode
from fedcover.deploy.status.fleet_status import FleetStatus, NodeStatus, read_status, write_status
from fedcover.deploy.status.metrics import metrics_text
from fedcover.deploy.status.panel import StatusPanel
from fedcover.deploy.status.publisher import _current
from fedcover.deploy.status.run_rounds import RunReader, last_records, read_rounds
from fedcover.federation.history import History
from tests.unit.report.conftest import make_record


def write_rounds(folder: Path, rounds: int, rejected: tuple[int, ...] = (), seconds: tuple[float, ...] = ()) -> Path:
    """Write a run folder of clients 0 to 3 at nodes 100 to 103; in every round these clients are rejected."""
    folder.mkdir(exist_ok=True)
    records = []
    for number in range(1, rounds + 1):
        record = make_record(number, keep=(1.0, 0.5, 0.5, 0.5))
        wire = {"down": [4, 3, 2, 1], "up": [1, 2, 3, 4], "full": 4, "attempts": 1}
        if seconds:
            wire["seconds"] = list(seconds)
        left = [{"client": client, "reason": "it was \x1b[31mslow"} for client in rejected]
        records.append(type(record)(**{**vars(record), "cohort": [0, 1, 2, 3], "rejected": left, "wire": wire}))
    (folder / "history.jsonl").write_text(History(records).to_lines())
    rows = [{"number": n, "examples": 10 * n, "capacity": None, "labels": None, "node": 100 + n} for n in range(4)]
    (folder / "clients.json").write_text(json.dumps(rows))
    (folder / "config.toml").write_text("rounds = 99\n")
    return folder


def test_a_run_folder_says_what_its_clients_did(tmp_path: Path) -> None:
    folder = write_rounds(tmp_path / "run", 12, rejected=(3,))
    (folder / PLAN).write_text(json.dumps({"round": 13, "uncovered": 0.0, "without": {"0": 0.5, "1": 0.0}}))
    rounds = read_rounds(folder)
    assert rounds.newest is not None
    assert (rounds.newest.round, rounds.newest.rounds, rounds.newest.planned_round) == (12, 99, 13)
    assert (rounds.newest.down, rounds.newest.up) == (10, 10)
    assert (rounds.newest.total_rejections, rounds.newest.lookback) == (10, 10)
    assert rounds.newest.rejections[0] == {"round": 12, "client": 3, "reason": "it was [31mslow"}
    first, last = rounds.clients[100], rounds.clients[103]
    assert (first.client, first.examples, first.down, first.up, first.seconds) == (0, 0, 4, 1, None)
    assert (first.uncovered_without, rounds.clients[101].uncovered_without, last.uncovered_without) == (0.5, 0.0, None)
    assert (first.flag, last.flag) == ("", "rejected in 10 of 10 rounds")


def test_a_client_that_is_much_slower_is_flagged(tmp_path: Path) -> None:
    rounds = read_rounds(write_rounds(tmp_path / "run", 1, seconds=(1.0, 1.2, 0.9, 5.0)))
    assert [rounds.clients[node].flag for node in (100, 101, 102)] == ["", "", ""]
    assert rounds.clients[103].flag == "5 times slower than the others"
    assert rounds.clients[103].seconds == 5.0


def test_a_client_that_claims_or_changes_too_much_is_flagged(tmp_path: Path) -> None:
    folder = write_rounds(tmp_path / "run", 3)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    limited = [{"client": 2, "factor": 0.1, "reason": "its change is too large"}]
    (folder / "history.jsonl").write_text("".join(json.dumps(line | {"limited": limited}) + "\n" for line in lines))
    rows = json.loads((folder / "clients.json").read_text())
    rows[1] |= {"capacity": 0.5, "claimed_capacity": 1.0}
    (folder / "clients.json").write_text(json.dumps(rows))
    clients = read_rounds(folder).clients
    assert clients[101].flag == "claims a capacity of 1, which was cut to 0.5"
    assert clients[102].flag == "its change or weight was cut in 3 of 3 rounds"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_rounds(tmp_path / "none").newest is None
    folder = write_rounds(tmp_path / "run", 3)
    with open(folder / "history.jsonl", "a") as file:
        file.write('{"round": 4, "cohort"')  # half a line
    assert [record["round"] for record in last_records(folder / "history.jsonl")] == [1, 2, 3]
    for name in ("clients.json", PLAN, "config.toml"):
        (folder / name).write_text("[1, ")
    rounds = read_rounds(folder)
    assert rounds.clients == {}
    assert rounds.newest is not None
    assert rounds.newest.rounds is None
    for name in ("clients.json", PLAN):
        (folder / name).write_text('["a", 3]')
    assert read_rounds(folder).clients == {}


def test_a_folder_is_read_again_only_if_it_changed(tmp_path: Path) -> None:
    folder, reader = write_rounds(tmp_path / "run", 1), RunReader()
    first = reader.read(str(folder))
    assert reader.read(str(folder)) is first
    write_rounds(folder, 2)
    assert reader.read(str(folder)) is not first
    assert reader.read("").clients == {}
    (folder / "clients.json").write_text('[{"node": "x"}]')
    assert reader.read(str(folder)).clients == {}


def status_of(*nodes: NodeStatus, age: float = 0.0) -> FleetStatus:
    return FleetStatus(time.time() - age, 0.0, "127.0.0.1:1", 0, {}, nodes, [])


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    status = status_of(NodeStatus("18446744073709551615", "a", "online", capacity=0.5))
    write_status(tmp_path, status)
    assert read_status(tmp_path).nodes == list(status.nodes)
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o600
    write_status(tmp_path / "none", status)  # a full disk ends no service


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "ü", "{}"])
def test_names_of_nodes_are_escaped(name: str, tmp_path: Path) -> None:
    status = status_of(NodeStatus("1", name, "online"))
    families = parser.text_string_to_metric_families(metrics_text(status, open_metrics=True))
    (online,) = [family for family in families if family.name == "fedcover_node_online"]
    assert [sample.labels["node"] for sample in online.samples] == [name]


def test_the_panel_escapes_what_nodes_send_and_survives_the_servers_end(tmp_path: Path) -> None:
    write_status(tmp_path, status_of(NodeStatus("1", "<b>", "online", flag="<i>")))
    html = StatusPanel(tmp_path).html()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    assert "&lt;i&gt;" in html
    write_status(tmp_path, status_of(age=60))
    assert "has not reported for 60 s" in StatusPanel(tmp_path).html()
    (tmp_path / "status.json").unlink()
    assert "no server has the folder" in StatusPanel(tmp_path).html()


def test_a_node_whose_key_is_replaced_is_listed_once() -> None:
    """Two samples with the same labels would make a scrape of the metrics invalid."""
    old, new = RegisteredNode(1, "node-0", "online"), RegisteredNode(2, "node-0", "offline")
    revoked = RegisteredNode(1, "node-0", "unregistered")
    others = [RegisteredNode(3, "", "online"), RegisteredNode(4, "", "online")]  # without keys
    assert _current([old, new, *others]) == [new, *others]
    assert _current([revoked, new]) == [new]
    assert _current([revoked]) == [revoked]
