"""`fedcover` whose nodes lie: $FEDCOVER_TEST_LIE says how."""

import os
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedcover.__main__ import main
from fedcover.deploy.flower.messages import BODY
from fedcover.deploy.node import node
from fedcover.deploy.node.worker_process import WorkerProcess

FACTS = {
    "capacity 5": {"capacity": 5.0},
    "negative capacity": {"capacity": -1.0},
    "many labels": {"labels": [1] * 1_000_000},
    "many examples": {"examples": 2**53 - 1},
    "control characters": {"error": "\x1b[31m bad \u202e news\n" + "x" * 10_000},
}
LIE = os.environ.get("FEDCOVER_TEST_LIE", "")
HONEST = WorkerProcess.facts


def lying_facts(self: WorkerProcess, *arguments: Any) -> dict[str, Any]:
    """Return false facts."""
    return HONEST(self, *arguments) | FACTS[LIE]


def huge_array(body: bytes) -> RecordDict:
    """Return a reply whose header claims 93 GiB."""
    array = Array(np.frombuffer(body, np.uint8))
    array.data = array.data.replace(f"({len(body)},)".encode(), b"(100000000000,)", 1)
    return RecordDict({BODY: ArrayRecord({BODY: array})})


if __name__ == "__main__":
    if LIE in FACTS:
        WorkerProcess.facts = lying_facts
    elif LIE == "huge array":
        node.body_content = huge_array
    main()
