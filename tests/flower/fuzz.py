"""Fuzzing of what comes from outside: ``python -m tests.flower.fuzz --seconds 600 --seed 0``, or ``--inputs N``.

Whatever the bytes are, ``decode_request`` gives a sound order or an InputError, and ``read_answer`` a sound update or
Rejected; neither takes a second or memory out of proportion. Anything else is printed with the input and ends it.
"""

import argparse
import copy
import json
import math
import random
import re
import resource
import struct
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.deploy.wire import (
    Limits,
    Rejected,
    Sent,
    TrainRequest,
    decode_request,
    encode_reply,
    encode_request,
    read_answer,
)
from fedcover.deploy.wire.frame import MAGIC
from fedcover.errors import InputError
from fedcover.params import Mask, Params, all_finite, check_mask
from fedcover.training.options import check_options
from tests.flower.orders import answer_to, random_order

SEEDS = 60
MOST_SECONDS, MOST_GROWTH = 1.0, 64 << 20
START = len(MAGIC) + 8
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 2**31, 2**32, 2**53, 2**62, -(2**62), 2**63 - 1, 2**63, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), "", "a", "\ud800", "é\0\n", "x" * 3000, [],
    {}, [[]], [None], [["a", -1]], {"": {}}, [1, 2], [0.5, 1], [2**40, 2**40], ["float32"], {"a": {"b": [1]}},
)  # fmt: skip


@dataclass
class Target:
    """One entrance and valid messages for it."""

    name: str
    call: Callable[[bytes], object]
    allowed: type[Exception]
    valid: bytes
    found: Counter[str] = field(default_factory=Counter)


def targets() -> list[Target]:
    """Both entrances for orders of all kinds."""
    made = []
    for seed in range(SEEDS):
        order = random_order(seed)
        update = answer_to(order)
        sent, limits = Sent.of(order, update.examples if seed % 2 else None), Limits(10.0 if seed % 3 else float("inf"))

        def decode(data: bytes, like: Params = order.theta) -> None:
            order = decode_request(data, like)
            try:
                check_order(order, like)
            except InputError as error:  # which would pass for a refusal
                raise AssertionError("an order that does not fit was taken") from error

        def read(data: bytes, sent: Sent = sent, limits: Limits = limits) -> None:
            check_update(read_answer(data, sent, limits), sent)

        made.append(Target("decode_request", decode, InputError, encode_request(order)))
        made.append(Target("read_answer", read, Rejected, encode_reply(update, order)))
    return made


def check_order(order: TrainRequest, like: Params) -> None:
    """What a client relies on."""
    recipe = order.recipe
    for value in (order.client, order.slot, order.round, order.seed, recipe.epochs, recipe.batch_size):
        assert type(value) is int
    assert min(order.client, order.slot, order.round - 1) >= 0
    assert type(order.shrink) is bool
    assert 0 < recipe.lr < math.inf
    assert 0 <= recipe.momentum < 1
    check_theta(order.theta, like, order.mask)
    check_mask(order.mask, like, "it")
    check_options(order.options, like, order.mask, "it")
    if order.options:
        numbers = [*order.options.gains.values(), *order.options.thresholds.values(), order.options.distil]
        assert all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
        assert type(order.options.report) is type(order.options.rest) is bool


def check_update(update: ClientUpdate, sent: Sent) -> None:
    """What a server relies on."""
    assert update.client == sent.client
    assert type(update.examples) is int
    assert update.examples == sent.examples if sent.examples else update.examples >= 1
    assert type(update.train_loss) is float
    assert math.isfinite(update.train_loss)
    check_theta(update.theta, sent.theta, update.mask)
    assert all_finite(update.theta)
    if sent.regrows:
        check_mask(update.mask, sent.theta, "it")
        assert {n: int(k.sum()) for n, k in update.mask.items()} == {n: int(k.sum()) for n, k in sent.mask.items()}
    else:
        assert update.mask is sent.mask
    assert (update.report is not None) == sent.reports
    if update.report is not None:
        check_theta(update.report, sent.theta, {})
        assert all(bool((t >= 0).all()) and bool(t.isfinite().all()) for t in update.report.values())


def check_theta(theta: Params, like: Params, mask: Mask) -> None:
    """Tensors like others in all but values, which are 0 outside the mask."""
    assert list(theta) == list(like)
    for name, tensor in theta.items():
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
        assert name not in mask or not bool(tensor[~mask[name]].any())


def framed(text: bytes, body: bytes, rng: random.Random) -> bytes:
    """A frame whose check sum is right, or rarely not."""
    size = struct.pack("<I", len(text))
    check = zlib.crc32(body, zlib.crc32(text, zlib.crc32(size))) ^ (rng.random() < 0.01)
    return MAGIC + size + struct.pack("<I", check) + text + body


def split(frame: bytes) -> tuple[bytes, bytes]:
    """A frame's head, as text, and its body."""
    (size,) = struct.unpack_from("<I", frame, len(MAGIC))
    return frame[START : START + size], frame[START + size :]


def odd_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few flipped, cut out, doubled, or replaced."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, many = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 4, 8, 40))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + many]
        elif kind == 2:
            found[at:at] = found[at : at + many]
        elif kind == 3:
            found[at : at + many] = rng.randbytes(many)
        elif kind == 4:
            found[at : at + many] = rng.choice((b"\0", b"\xff", b"\x80", b"[", b'"', b"9", b"-")) * many
        else:
            found = found[:at]
    return bytes(found)


def odd_value(rng: random.Random) -> Any:
    if rng.random() < 0.02:
        deep: Any = []
        for _ in range(rng.choice((10, 300, 900))):
            deep = [deep] if rng.random() < 0.9 else {"a": deep}
        return deep
    return copy.deepcopy(rng.choice(ODD))


def odd_json(text: bytes, rng: random.Random) -> bytes:
    """A head with values, keys or rows changed somewhere in the tree."""
    top = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        node: Any = (
            top if rng.random() < 0.1 else top[rng.choice(("head", "head", "parts"))] if isinstance(top, dict) else top
        )
        while True:
            if not isinstance(node, dict | list) or not node:
                break
            key: Any = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
                node = node[key]
                continue
            _change(node, key, rng)
            break
        if not isinstance(top, dict) or "head" not in top or "parts" not in top:
            break
    try:
        return json.dumps(top, separators=(",", ":")).encode()
    except RecursionError:
        return b"[" * 5000


def _change(node: Any, key: Any, rng: random.Random) -> None:
    kind = rng.randrange(6)
    old = node[key]
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, list):
        node.insert(key, old)
    elif kind == 1:
        node[rng.choice(("mask", "report", "more", "a", "layer1.weight", "\ud800"))] = odd_value(rng)
    elif kind == 2 and type(old) is int:
        node[key] = old + rng.choice((-1, 1, 8, -8, 2**31, -(2**31)))
    elif kind == 3 and isinstance(old, str):
        node[key] = rng.choice((old + "x", old[:-1], old.upper(), "theta/" + old, "mask/" + old, "width/0/" + old))
    else:
        node[key] = odd_value(rng)


def odd_number(text: bytes, rng: random.Random) -> bytes:
    """A head with one number written in a way that Python would not write it."""
    start, end = rng.choice([found.span() for found in re.finditer(rb"-?[0-9][0-9.e+-]*", text)])
    odd = (b"1e999", b"-1E400", b"1e-999", b"-0", b"0x10", b"01", b"1_0", b"1.", b"NaN", b"-Infinity", b"9" * 5000)
    return text[:start] + rng.choice(odd) + text[end:]


def mutate(valid: bytes, other: bytes, rng: random.Random) -> bytes:
    """An input: rarely pure noise, mostly a valid frame with something changed and its check sum repaired."""
    kind = rng.randrange(20)
    text, body = split(valid)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return MAGIC + rng.randbytes(rng.randrange(100))
    if kind == 2:
        return odd_bytes(valid, rng)
    if kind == 3:
        at, to = rng.randrange(len(valid)), rng.randrange(len(other))
        return valid[:at] + other[to:]
    if kind == 4:
        return framed(rng.randbytes(rng.randrange(60)), body, rng)
    if kind == 5:
        return framed(split(other)[0], body, rng)
    if kind < 7:
        return framed(odd_bytes(text, rng), body, rng)
    if kind == 7:
        return framed(odd_number(text, rng), body, rng)
    if kind < 11:  # values and masks of the same length
        return framed(text, _same_length(body, rng), rng)
    if kind < 13:
        return framed(text, odd_bytes(body, rng), rng)
    if kind == 13:
        return framed(odd_json(text, rng), _same_length(body, rng), rng)
    return framed(odd_json(text, rng), body, rng)


def _same_length(body: bytes, rng: random.Random) -> bytes:
    found = bytearray(body)
    for _ in range(rng.choice((1, 1, 3, 10)) if found else 0):
        found[rng.randrange(len(found))] = rng.choice((0, 1, 2, 3, 4, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(found)


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(seed: int, inputs: int | None = None, seconds: float | None = None) -> list[Target]:
    """Run until the inputs or the seconds are used up; the targets, with what came of their inputs."""
    rng, made = random.Random(seed), targets()
    for target in made:
        target.call(target.valid)
    before, done, begun = peak(), 0, time.monotonic()
    while (inputs is None or done < inputs) and (seconds is None or time.monotonic() - begun < seconds):
        target = rng.choice(made)
        data = mutate(target.valid, rng.choice(made).valid, rng)
        start = time.perf_counter()
        try:
            target.call(data)
            target.found["taken"] += 1
        except target.allowed:
            target.found["refused"] += 1
        except BaseException:
            traceback.print_exc()
            raise SystemExit(f"{target.name} failed on input {done} of seed {seed}: {data.hex()}") from None
        took, now = time.perf_counter() - start, peak()
        if took > MOST_SECONDS or now - before > MOST_GROWTH:
            what = f"took {took:.2f} s and {(now - before) >> 20} MiB"
            raise SystemExit(f"{target.name} {what} on input {done} of seed {seed}: {data.hex()}")
        before, done = now, done + 1
    return made


def main() -> None:
    """Fuzz, and say how many inputs were taken and refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.seconds is None and options.inputs is None:
        options.seconds = 60.0
    torch.set_num_threads(1)
    begun = time.monotonic()
    made = fuzz(options.seed, options.inputs, options.seconds)
    took = time.monotonic() - begun
    total = 0
    for name in ("decode_request", "read_answer"):
        found = sum((target.found for target in made if target.name == name), Counter[str]())
        total += found.total()
        print(f"{name}: {found['taken']} taken, {found['refused']} refused")
    print(f"{total} inputs in {took:.0f} s, {total / took:.0f} a second; nothing else happened")


if __name__ == "__main__":
    sys.exit(main())
