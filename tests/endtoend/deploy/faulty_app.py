"""The stock apps with planned failures: $FEDCOVER_TEST_FAULTS names a file of clients, rounds and faults."""

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcover.deploy.flower import apps as stock
from fedcover.deploy.flower.messages import body_content, body_of
from fedcover.deploy.wire import open_frame, pack_frame

PAUSES = {"pause": 10.0, "late": 55.0}
"""Seconds; a late client misses the deadline of the round, and replies nevertheless."""

server = stock.server
client = ClientApp()


@client.query()
def query(message: Message, context: Context) -> Message:
    return stock.client(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    path = Path(os.environ["FEDCOVER_TEST_FAULTS"])
    request, _ = open_frame(body_of(message), 10**9)
    key = f"client {context.node_config['client']} round {request['round']}"
    fault = json.loads(path.read_text()).get(key)
    if fault in PAUSES:
        path.with_name(key).touch()
        time.sleep(PAUSES[fault])
    reply = stock.client(message, context)
    if fault is None or fault in PAUSES:
        return reply
    head, parts = open_frame(body_of(reply), 10**9)
    values = {name: bytes(part) for name, part in parts.items()}
    for name in values:
        if name.startswith("theta/"):
            values[name] = spoil(np.frombuffer(values[name], np.float32), fault).astype(np.float32).tobytes()
    if fault == "old round":
        head["round"] -= 1
    return Message(body_content(pack_frame(head, values)), reply_to=message)


def spoil(values: np.ndarray, fault: str) -> np.ndarray:
    """Return a client's trained values with a fault."""
    if fault == "NaN":
        return np.full_like(values, np.nan)
    if fault == "wrong shapes":
        return values[:-1]
    return 100 * values + 1 if fault == "too large" else values
