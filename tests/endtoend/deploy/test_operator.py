"""What an operator sees of a real fleet, one node of which dies in a run: status, metrics and the live page."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from fedcover.deploy.address import free_ports
from fedcover.deploy.status.fleet_status import FleetStatus, read_status
from fedcover.deploy.status.metrics import OPEN_METRICS, TEXT
from fedcover.federation.history import History
from fedcover.report.format import percent
from tests.endtoend.browser import NARROW, WIDE, Browser
from tests.endtoend.deploy.conftest import SKIP, Marked
from tests.endtoend.deploy.fleet import Fleet, Program, wait_for
from tests.endtoend.test_watch import watching

Cli = Callable[..., tuple[int, str, str]]
CAPACITIES = (1.0, 0.5, 0.25)
SETTINGS = """
rounds = 400
cohort = 3
[data]
name = "digits"
clients = 3
[policy]
name = "NP"
[local]
epochs = 1
[budgets]
code = "111"
[flower]
deadline = 120
quorum = 0.3
"""
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, SKIP]


@dataclass
class Operated:
    """A fleet with a run that takes longer than the tests, and the port of its metrics."""

    fleet: Fleet
    run: Program
    metrics_port: int

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.fleet.folder / "run"

    def status(self) -> FleetStatus:
        """Return the published state."""
        return read_status(self.fleet.state)

    def node(self, number: int) -> Any:
        """Return the published state of a node."""
        return next(node for node in self.status().nodes if node.name == f"node-{number}")

    def rounds(self) -> int:
        """Return the rounds that are published."""
        newest = self.status().newest
        return newest.round if newest else 0

    def scrape(self, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
        """Return the status, the content type and the text of the metrics."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=10)
        with closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.headers["Content-Type"], response.read().decode()


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Operated]:
    folder, (port,) = tmp_path_factory.mktemp("fleet"), free_ports(1)
    with closing(Fleet(folder, 5, "--metrics-port", str(port))) as fleet:
        for number, capacity in enumerate(CAPACITIES):
            fleet.start_node(number, "--capacity", str(capacity))
        fleet.join()
        (fleet.folder / "keys" / "server" / "nodes" / "node-4.pub").unlink()  # revoked
        run = fleet.start_run(SETTINGS, "run")
        here = Operated(fleet, run, port)
        try:
            wait_for(lambda: here.rounds() >= 2 or not run.running, 120)
            assert run.running, run.printed
            yield here
        finally:
            run.end(signal.SIGTERM, 60)


def printed_status(state: Path) -> str:
    """Return what the command prints on a terminal of 80 columns."""
    command = [sys.executable, "-m", "fedcover", "deploy", "status", "--state", str(state)]
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_fits_80_columns_and_shows_the_fleet(operated: Operated, cli: Cli) -> None:
    text = printed_status(operated.fleet.state)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, text
    assert f"server at {operated.fleet.address}: 3 of 4 nodes online, 1 revoked" in lines
    run = operated.status().runs[0]
    assert any(line.startswith(run.id) and "running" in line for line in lines), text  # not broken
    rows = {line.split()[0]: line for line in lines if line.startswith("node-")}
    assert "revoked" in text
    for number, capacity in enumerate(CAPACITIES):
        node = operated.node(number)
        assert (node.state, node.client, node.capacity) == ("online", number, capacity)
        assert 400 < node.examples < 500
        assert time.time() - node.last_seen < 30
        assert node.received > 0
        assert node.up > 0
        assert node.seconds > 0
    assert operated.node(3).client is None
    assert rows["node-0"].endswith("%")  # the last table has the share that is lost without it
    code, out, _ = cli("deploy", "status", "--state", str(operated.fleet.state), "--json")
    assert code == 0
    assert {node["name"]: node["state"] for node in json.loads(out)["nodes"]}["node-4"] == "revoked"


def test_what_is_lost_without_a_node_is_what_only_it_holds(operated: Operated) -> None:
    """The masks of NP are nested: without the full model, the second largest is all that is trained."""
    record = History.load(operated.out / "history.jsonl").last
    kept = dict(zip(record.cohort, record.kept, strict=True))
    assert operated.node(0).uncovered_without == pytest.approx(1 - kept[1])
    assert operated.node(1).uncovered_without == 0
    assert operated.node(2).uncovered_without == 0
    assert operated.node(3).uncovered_without is None
    assert percent(1 - kept[1], 1) in printed_status(operated.fleet.state)


def samples(families: Any) -> dict[tuple[str, str], float]:
    """Return the value of each sample by its name and the value of its only label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_are_read_by_the_parsers_of_prometheus(operated: Operated) -> None:
    status, kind, text = operated.scrape()
    assert (status, kind) == (200, TEXT)
    old = samples(parser.text_string_to_metric_families(text))
    status, kind, text = operated.scrape(Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert (status, kind) == (200, OPEN_METRICS)
    new = samples(openmetrics_parser.text_string_to_metric_families(text))
    assert set(old) == set(new)
    assert [old["fedcover_nodes", state] for state in ("online", "offline", "revoked")] == [3, 1, 1]
    assert old["fedcover_node_online", "node-0"] == 1
    assert old["fedcover_node_received_bytes_total", "node-0"] > 1000
    assert abs(time.time() - old["fedcover_node_last_seen_timestamp_seconds", "node-1"]) < 30
    assert old["fedcover_superlink_restarts_total", ""] == 0
    run = operated.status().runs[0].id
    record = History.load(operated.out / "history.jsonl")[int(old["fedcover_run_round", run]) - 1]
    assert old["fedcover_run_accuracy_ratio", run] == record.accuracy
    assert old["fedcover_run_gamma_min", run] == record.gamma_min
    assert old["fedcover_run_uncovered_ratio", run] == record.uncovered
    assert old["fedcover_run_planned_rounds", run] == 400
    assert old["fedcover_run_round_seconds", run] == pytest.approx(sum(record.seconds.values()))
    assert old["fedcover_runs_active", ""] == 1


def test_metrics_are_only_for_this_machine(operated: Operated, cli: Cli) -> None:
    assert operated.scrape(Host="evil.example")[0] == 403
    assert operated.scrape(Host=f"localhost:{operated.metrics_port}")[0] == 200
    assert operated.scrape("/")[0] == 404
    hexadecimal = f"{operated.metrics_port:04X}"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    assert [address for address in listening if address.endswith(hexadecimal)] == [f"0100007F:{hexadecimal}"]
    keys = str(operated.fleet.folder / "keys" / "server")
    (port,) = free_ports(1)
    options = ["--state", str(operated.fleet.folder / "other"), "--port", str(port), "--metrics-port"]
    code, _, err = cli("deploy", "server", "--keys", keys, *options, str(operated.metrics_port))
    assert (code, "give another --metrics-port" in err) == (2, True)


def test_the_page_shows_a_node_that_dies(operated: Operated, browser: Browser) -> None:
    """The last test with this fleet: node 2 is killed, and node 4's key is refused at the gate."""
    text = "return document.getElementById('part')?.textContent || ''"
    cell = "return [...document.querySelectorAll('#part tbody tr')].map((row) => row.textContent)"

    def row(number: int) -> str:
        return next((text for text in browser.script(cell) if text.startswith(f"node-{number}")), "")

    browser.resize(WIDE, 900)
    browser.log()
    with watching(operated.fleet.state) as (url, _):
        browser.visit(url)
        wait_for(lambda: "online" in row(2), 30, "node 2 on the page")
        assert "0.25" in row(2)
        wait_for(lambda: browser.script("return document.querySelectorAll('figure > svg').length") >= 5, 30, "curves")
        refused = operated.fleet.start_node(4, "--wait", "0")
        assert refused.process.wait(60) == 2
        killed = time.monotonic()
        operated.fleet.nodes[2].end(signal.SIGKILL)
        wait_for(lambda: "offline" in row(2), 60, "the death of node 2 on the page")
        assert time.monotonic() - killed < 45
        wait_for(lambda: "client 2 (node-2) is left out" in browser.script(text), 60, "its rejection, with the reason")
        assert "online" in row(0)
        before = operated.rounds()
        wait_for(lambda: operated.rounds() >= before + 2, 60, "rounds without it")
        wait_for(lambda: "rejected in" in browser.script(text), 60, "the flag")
        assert "1 the key is not registered, or was revoked" in browser.script(text)
        colour = "return getComputedStyle([...document.querySelectorAll('#part td.bad')][0]).color"
        assert browser.script(colour) != browser.script("return getComputedStyle(document.body).color")
        browser.resize(NARROW, 844, phone=True)
        wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert browser.script(wide) is False
        browser.screenshot(operated.fleet.folder / "page.png")
        assert [entry for entry in browser.log() if entry["level"] == "SEVERE"] == []
    values = samples(parser.text_string_to_metric_families(operated.scrape()[2]))
    assert values["fedcover_nodes", "offline"] == 2
    assert values["fedcover_gate_refused_requests_total", "the key is not registered, or was revoked"] >= 1
    assert values["fedcover_node_flagged", "node-2"] == 1
    printed = printed_status(operated.fleet.state)
    assert "client 2 (node-2) is left out" in printed
    assert "node-2: rejected in" in printed


def test_a_server_that_has_ended_is_not_shown_as_running(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("deploy", "status", "--state", str(tmp_path))
    assert (code, "no server has the folder" in err) == (2, True)
    old = FleetStatus(time.time() - 60, 0.0, "127.0.0.1:1", 0, {}, [], [])
    (tmp_path / "status.json").write_text(old.to_json())
    code, _, err = cli("deploy", "status", "--state", str(tmp_path))
    assert (code, "has not reported for 60 s" in err) == (1, True)
