"""The stock apps with clients that fail on cue: the file in $FEDCOVER_TEST_FAULTS says who, in which round, and how."""

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcover.deploy.flower import apps as stock
from fedcover.deploy.flower.messages import body_of, content_of
from fedcover.deploy.wire import open_frame, pack_frame

PAUSES = {"pause": 10.0, "late": 55.0}
"""Seconds; who is late misses the deadline of the round, and answers all the same."""

server = stock.server
client = ClientApp()


@client.query()
def query(message: Message, context: Context) -> Message:
    return stock.client(message, context)


@client.train()
def train(message: Message, context: Context) -> Message:
    path = Path(os.environ["FEDCOVER_TEST_FAULTS"])
    order, _ = open_frame(body_of(message), 10**9)
    who = f"client {context.node_config['client']} round {order['round']}"
    fault = json.loads(path.read_text()).get(who)
    if fault in PAUSES:
        path.with_name(who).touch()
        time.sleep(PAUSES[fault])
    reply = stock.client(message, context)
    if fault is None or fault in PAUSES:
        return reply
    head, parts = open_frame(body_of(reply), 10**9)
    made = {name: bytes(part) for name, part in parts.items()}
    for name in made:
        if name.startswith("theta/"):
            made[name] = spoilt(np.frombuffer(made[name], np.float32), fault).astype(np.float32).tobytes()
    if fault == "old round":
        head["round"] -= 1
    return Message(content_of(pack_frame(head, made)), reply_to=message)


def spoilt(values: np.ndarray, fault: str) -> np.ndarray:
    """A client's trained values, as it would rather send them."""
    if fault == "NaN":
        return np.full_like(values, np.nan)
    if fault == "wrong shapes":
        return values[:-1]
    return 100 * values + 1 if fault == "too large" else values
