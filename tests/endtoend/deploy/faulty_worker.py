"""A worker of a node with planned failures: $FEDCOVER_TEST_FAULTS names a file of clients, rounds and faults."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from fedcover.deploy.node import worker
from fedcover.deploy.wire import open_frame, pack_frame

PAUSES = {"pause": 10.0, "late": 55.0, "stuck": 1e6}
"""Seconds; a late client misses the deadline of the round, and replies nevertheless."""
HONEST = worker.answer


def answer(frame: bytes) -> bytes:
    """Return the honest answer, or the planned fault of this client and round."""
    head, parts = open_frame(frame, 10**9)
    if head["kind"] != "train":
        return HONEST(frame)
    path = Path(os.environ["FEDCOVER_TEST_FAULTS"])
    request, _ = open_frame(bytes(parts["body"]), 10**9)
    key = f"client {head['node']['client']} round {request['round']}"
    fault = json.loads(path.read_text()).get(key)
    if fault in PAUSES:
        path.with_name(key).touch()
        time.sleep(PAUSES[fault])
    if fault == "death":
        os._exit(3)
    reply = HONEST(frame)
    if fault is None or fault in PAUSES:
        return reply
    _, outer = open_frame(reply, 10**9)
    head, inner = open_frame(bytes(outer["body"]), 10**9)
    values = {name: bytes(part) for name, part in inner.items()}
    for name in values:
        if name.startswith("theta/"):
            values[name] = spoil(np.frombuffer(values[name], np.float32), fault).astype(np.float32).tobytes()
    if fault == "old round":
        head["round"] -= 1
    return pack_frame({}, {"body": pack_frame(head, values)})


def spoil(values: np.ndarray, fault: str) -> np.ndarray:
    """Return a client's trained values with a fault."""
    if fault == "NaN":
        return np.full_like(values, np.nan)
    if fault == "wrong shapes":
        return values[:-1]
    return 100 * values + 1 if fault == "too large" else values


if __name__ == "__main__":
    worker.answer = answer
    worker.main(int(sys.argv[1]), int(sys.argv[2]))
