"""What a deployment does on the network: it works with loopback alone, and uses only the two ports that docs name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.endtoend.deploy import network
from tests.endtoend.deploy.conftest import SKIP, Marked
from tests.endtoend.deploy.fleet import ROOT

NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.slow
@SKIP
@pytest.mark.timeout(600)
def test_a_deployment_needs_loopback_only_and_uses_two_ports(tmp_path: Path, marked: Marked) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no network namespaces")
    command = [*NAMESPACE, sys.executable, "-m", network.__name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    gate, superlink = str(result["gate"]), str(result["superlink"])
    notes = {tuple(note[:3]) for note in result["notes"]}
    assert {(host, port) for kind, host, port in notes if kind == "connect"} == {
        ("127.0.0.1", gate),
        ("127.0.0.1", superlink),
    }
    bound = {(host, port) for kind, host, port in notes if kind == "bind"}
    looks = {("127.0.0.1", "0"), ("::1", "0")}  # for a free port, and for IPv6 by urllib3
    assert bound <= looks | {("0.0.0.0", "0"), ("0.0.0.0", gate), ("127.0.0.1", superlink)}
    assert {host for kind, host, _ in notes if kind == "getaddrinfo"} <= {"127.0.0.1"}
    assert not [note for note in notes if note[0] == "sendto"]
    nodes = [note for note in result["notes"] if "deploy client" in note[3] or "node.worker" in note[3]]
    assert {note[0] for note in nodes} <= {"connect", "getaddrinfo"}
    assert {note[2] for note in nodes if note[0] == "connect"} == {gate}
    assert len(nodes) >= 1
    check_scans(result["scans"], result["gate"], result["superlink"])
    assert marked.left(10) == []


def check_scans(scans: dict[str, dict[str, list[int]]], gate: int, superlink: int) -> None:
    """Check what a stranger finds: only the gate at the machine's address, and the SuperLink only on loopback."""
    nothing = {"127.0.0.1": [], "192.0.2.1": [], "udp": [0]}
    assert scans["before"] == scans["after"] == nothing
    assert scans["running"] == nothing | {"127.0.0.1": sorted([gate, superlink]), "192.0.2.1": [gate]}
