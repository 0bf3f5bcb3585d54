"""The life of a fleet while its server runs: keys added, revoked and replaced, wrong clocks, a SuperLink that dies."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.endtoend.deploy.conftest import SKIP, Marked, slow
from tests.endtoend.deploy.fleet import FEDCOVER, ROOT, Fleet, children_named, wait_for
from tests.endtoend.deploy.test_runs import SETTINGS

pytestmark = [pytest.mark.timeout(600)]
SHIFTED_NODE = "tests.endtoend.deploy.shifted_node"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path_factory.mktemp("fleet"), 3)) as fleet:
        yield fleet


def start(fleet: Fleet, number: int, module: str = FEDCOVER, ahead: float = 0.0) -> None:
    options = ["--capacity", "1", "--share-labels"]
    node = fleet.start_node(number, *options, module=module, environment={"FEDCOVER_TEST_CLOCK": str(ahead)})
    node.wait_for("joined")


def test_a_revoked_key_is_refused_at_once_and_after_a_restart(fleet: Fleet, cli: Cli) -> None:
    start(fleet, 0)
    start(fleet, 1)
    assert fleet.registered()["node-1"].online
    code, _, err = cli("deploy", "keys", str(fleet.folder / "keys"), "--revoke", "node-1")
    assert code == 0, err
    assert fleet.nodes[1].process.wait(60) == 2  # by its next heartbeat, and a busy machine may be slow to end it
    assert "does not accept this node's key" in fleet.nodes[1].printed
    wait_for(lambda: "node-1" not in fleet.registered(), 60, "its registration")
    assert "node node-1 is revoked" in fleet.server.printed
    code, printed, err = cli("deploy", "status", "--state", str(fleet.state))
    assert code == 0, err
    assert "node-0" in printed
    assert fleet.server.end() == 0
    fleet.start_server()
    again = fleet.start_node(1, "--wait", "5")
    assert again.process.wait(60) == 2
    assert "does not accept this node's key" in again.printed
    wait_for(lambda: fleet.registered()["node-0"].online, 60, "the other node")  # it has waited for the server


def test_keys_are_added_and_replaced_while_the_server_runs(fleet: Fleet, cli: Cli) -> None:
    code, printed, err = cli("deploy", "keys", str(fleet.folder / "keys"), "--add", "--nodes", "1")
    assert code == 0, err
    assert "follows by itself" in printed
    start(fleet, 3)
    assert fleet.registered()["node-3"].online
    before = fleet.registered()["node-3"].id
    code, _, err = cli("deploy", "keys", str(fleet.folder / "keys"), "--rotate", "node-3")
    assert code == 0, err
    assert fleet.nodes[3].process.wait(60) == 2  # it still has the old key
    start(fleet, 3)
    assert fleet.registered()["node-3"].id != before
    code, _, err = cli("deploy", "keys", str(fleet.folder / "keys"), "--rotate", "node-9")
    assert (code, "has no node 'node-9'; the nodes are node-0, node-2, node-3" in err) == (2, True)


@pytest.mark.parametrize("ahead", [20.0, pytest.param(-400.0, marks=[pytest.mark.slow, SKIP])])
def test_a_node_whose_clock_is_wrong_joins_and_trains(ahead: float, fleet: Fleet) -> None:
    """Flower refuses a clock that is 5 s ahead or 305 s behind."""
    if 2 in fleet.nodes and fleet.nodes[2].running:
        fleet.nodes[2].end()
    if not fleet.nodes.get(0) or not fleet.nodes[0].running:
        start(fleet, 0)
    start(fleet, 2, SHIFTED_NODE, ahead)
    length, side = ("20 seconds", "ahead of") if ahead > 0 else ("7 minutes", "behind")
    assert f"clock is {length} {side} the server's" in " ".join(fleet.nodes[2].printed.split())
    settings = SETTINGS.format(rounds=1, deadline=60).replace("cohort = 4", "cohort = 2") + "clients = 2\n"
    settings = settings.replace("quorum = 0.25", "quorum = 1").replace('code = "1111"', 'code = "11"')
    run = fleet.play(settings, f"clock{ahead:.0f}")
    assert '"rejected": []' in (run / "history.jsonl").read_text()


@slow
def test_a_model_and_data_of_ones_own_on_nodes(fleet: Fleet) -> None:
    """The files of the guide, with nodes that have them, and one whose file differs."""
    guide = (ROOT / "docs" / "how-to" / "own-files-on-nodes.md").read_text()
    python, toml = (re.findall(rf"```{kind}\n(.*?)```", guide, re.DOTALL)[0] for kind in ("python", "toml"))
    for number in (0, 2, 3):
        if number in fleet.nodes and fleet.nodes[number].running:
            fleet.nodes[number].end()
    (fleet.folder / "own.py").write_text(python)
    (fleet.folder / "device").mkdir()
    (fleet.folder / "device" / "own.py").write_text(python.replace("20", "30"))
    options = ["--capacity", "1", "--share-labels", "--file"]
    fleet.start_node(0, *options, str(fleet.folder / "own.py"))
    fleet.start_node(2, *options, str(fleet.folder / "device" / "own.py"), "--client", "1")
    for number in (0, 2):
        fleet.nodes[number].wait_for("joined")
    run = fleet.start_run(toml, "own")
    run.wait_for("own.py is not the server's: its SHA-256 is", 60)
    (fleet.folder / "device" / "own.py").write_text(python)  # it is queried again
    assert run.process.wait(120) == 0, run.printed
    assert "round 2/2: accuracy" in run.printed


@slow
def test_a_superlink_that_is_killed_is_started_again(fleet: Fleet) -> None:
    if not fleet.nodes.get(0) or not fleet.nodes[0].running:
        start(fleet, 0)
    (link,) = children_named(fleet.server.process.pid, "flower-superlink")
    os.kill(link, signal.SIGKILL)
    fleet.server.wait_for("it is started again", 30)
    wait_for(lambda: any(node.online for node in fleet.registered().values()), 60, "a node")
