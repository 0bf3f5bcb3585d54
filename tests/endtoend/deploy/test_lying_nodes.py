"""Nodes that lie, as real processes: each is named with what it sent, and the run continues without it."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.federation.history import History
from tests.endtoend.deploy.conftest import SKIP, Marked
from tests.endtoend.deploy.fleet import FEDCOVER, Fleet
from tests.endtoend.deploy.hostile_node import FACTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, SKIP]
HOSTILE_NODE = "tests.endtoend.deploy.hostile_node"
SETTINGS = """
rounds = 2
cohort = 4
[data]
name = "digits"
clients = 4
[policy]
name = "NP"
[local]
epochs = 1
[aggregation]
weighting = "examples"
[budgets]
code = "1111"
[flower]
deadline = 60
quorum = 0.5
gather = 15
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path_factory.mktemp("lies"), 4)) as fleet:
        for number in range(3):
            fleet.start_node(number, "--capacity", "1")
        fleet.join()
        yield fleet


def lie(fleet: Fleet, kind: str) -> tuple[str, History]:
    """Play a run with a fourth node that lies, and return what was printed and the records."""
    if 3 in fleet.nodes:
        fleet.nodes[3].end()
    environment = {"FEDCOVER_TEST_LIE": kind}
    fleet.start_node(3, module=HOSTILE_NODE if kind else FEDCOVER, environment=environment).wait_for("joined")
    name = kind.replace(" ", "-")
    run = fleet.start_run(SETTINGS, name)
    assert run.process.wait(200) == 0, run.printed
    return run.printed, History.load(fleet.folder / name / "history.jsonl")


@pytest.mark.parametrize("kind", [kind for kind in FACTS if kind != "many examples"])
def test_false_facts_leave_out_one_node(kind: str, fleet: Fleet) -> None:
    printed, history = lie(fleet, kind)
    (line,) = {line for line in printed.splitlines() if line.startswith("node") and "is left out" in line}
    assert {"capacity 5": "5", "negative capacity": "-1", "many labels": "label", "control characters": "bad"}[
        kind
    ] in line
    assert len(line) < 500
    assert line.isprintable()
    assert "Traceback" not in printed
    assert all(sorted(record.cohort) == [0, 1, 2] for record in history)


def test_a_claim_of_examples_is_cut(fleet: Fleet) -> None:
    _, history = lie(fleet, "many examples")
    for record in history:
        reasons = json.dumps([record.rejected, getattr(record, "limited", None)])
        assert '"client": 3' in reasons, reasons  # it trained on fewer, or counts with at most twice the median
    assert (history.last.accuracy or 0) > 0.5


def test_an_array_that_claims_93_gib_is_rejected(fleet: Fleet) -> None:
    _, history = lie(fleet, "huge array")
    for record in history:
        (row,) = record.rejected
        assert row["client"] == 3
        assert "100000000000" in row["reason"] or "bytes" in row["reason"]
    assert not list(Path(fleet.folder).rglob("core*"))
