"""A fuzzer of the message decoders: ``python -m tests.unit.deploy.fuzz --seconds 600 --seed 0``, or ``--inputs N``.

Whatever the bytes are, ``decode_request`` returns a valid request or raises InputError, and ``decode_reply`` returns a
valid update or raises InvalidReplyError; neither takes a second, or memory out of proportion. Any other outcome ends
the fuzzer and is printed with its input.
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
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.wire import (
    ExactValues,
    InvalidReplyError,
    KeptCopy,
    Limits,
    PendingRequest,
    QuantizedValues,
    SentComplement,
    TrainRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from fedcover.deploy.wire.frame import MAGIC
from fedcover.errors import InputError
from fedcover.params import Mask, Params, all_finite, check_mask
from fedcover.training.options import check_options
from fedcover.training.quantization import BITS, quantize
from tests.unit.deploy.requests import random_request, reply_to, seeing

SEEDS = 60
MOST_SECONDS, MOST_GROWTH = 1.0, 64 << 20
START = len(MAGIC) + 8
DIGEST = "0123456789abcdef" * 4
"""The digest of the copy that the client has."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 2**31, 2**32, 2**53, 2**62, -(2**62), 2**63 - 1, 2**63, 10**30, 10**400,
    0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), "", "a", "\ud800", "é\0\n", "x" * 3000, [],
    {}, [[]], [None], [["a", -1]], {"": {}}, [1, 2], [0.5, 1], [2**40, 2**40], ["float32"], {"a": {"b": [1]}},
)  # fmt: skip


@dataclass
class Target:
    """One decoder and a valid message for it."""

    name: str
    call: Callable[[bytes], object]
    allowed: type[Exception]
    valid: bytes
    outcomes: Counter[str] = field(default_factory=Counter)


def targets() -> list[Target]:
    """Return both decoders for requests of all kinds."""
    decoders = []
    for seed in range(SEEDS):
        request, sent = random_request(seed), None
        if seed % 2:
            request, sent = random_complement(seeing(request), seed)
        update = reply_to(request)
        pending = PendingRequest.of(request, update.examples if seed % 2 else None)
        limits = Limits(10.0 if seed % 3 else float("inf"))

        def decode(data: bytes, like: Params = request.theta, frozen: tuple[str, ...] = request.frozen) -> None:
            request = decode_request(data, like, frozen, lambda digest: like if digest == DIGEST else None)
            try:
                check_request(request, like)
            except InputError as error:  # which would pass for a refusal
                raise AssertionError("an invalid request was accepted") from error

        def read(data: bytes, pending: PendingRequest = pending, limits: Limits = limits) -> None:
            check_update(decode_reply(data, pending, limits), pending)

        decoders.append(Target("decode_request", decode, InputError, encode_request(request, sent)))
        decoders.append(Target("decode_reply", read, InvalidReplyError, encode_reply(update, request)))
    return decoders


def random_complement(request: TrainRequest, seed: int) -> tuple[TrainRequest, SentComplement]:
    """Return a request with what it carries of the entries outside its mask, of any kind."""
    theta, bits = request.theta, BITS[seed % 3]
    codes = QuantizedValues(bits, {name: quantize(tensor, bits) for name, tensor in theta.items()})
    exact = ExactValues({name: -tensor for name, tensor in theta.items()})
    sent = (codes, exact, KeptCopy(DIGEST))[seed // 2 % 3]
    return replace(request, keeps_copy=sent is not codes), sent


def check_request(request: TrainRequest, like: Params) -> None:
    """Assert what a client relies on."""
    recipe = request.recipe
    for value in (request.client, request.slot, request.round, request.seed, recipe.epochs, recipe.batch_size):
        assert type(value) is int
    assert min(request.client, request.slot, request.round - 1) >= 0
    assert type(request.shrink) is bool
    assert 0 < recipe.lr < math.inf
    assert recipe == type(recipe)(**{field.name: getattr(recipe, field.name) for field in fields(recipe)})
    check_theta(request.theta, like, {} if request.sees else request.mask)
    check_mask(request.mask, like, "it")
    assert request.sees or not request.keeps_copy
    check_options(request.options, like, request.mask, "it")
    if request.options:
        numbers = [*request.options.gains.values(), *request.options.thresholds.values(), request.options.distil]
        assert all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
        assert type(request.options.report) is bool


def check_update(update: ClientUpdate, pending: PendingRequest) -> None:
    """Assert what a server relies on."""
    assert update.client == pending.client
    assert type(update.examples) is int
    assert update.examples == pending.examples if pending.examples else update.examples >= 1
    assert type(update.train_loss) is float
    assert math.isfinite(update.train_loss)
    check_theta(update.theta, pending.theta, update.mask)
    assert all_finite(update.theta)
    if pending.regrows:
        check_mask(update.mask, pending.theta, "it")
        assert {n: int(k.sum()) for n, k in update.mask.items()} == {n: int(k.sum()) for n, k in pending.mask.items()}
    else:
        assert update.mask is pending.mask
    assert (update.report is not None) == pending.reports
    if update.report is not None:
        check_theta(update.report, pending.theta, {})
        assert all(bool((t >= 0).all()) and bool(t.isfinite().all()) for t in update.report.values())


def check_theta(theta: Params, like: Params, mask: Mask) -> None:
    """Assert that tensors are like others except in their values, which are 0 outside the mask."""
    assert list(theta) == list(like)
    for name, tensor in theta.items():
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
        assert name not in mask or not bool(tensor[~mask[name]].any())


def framed(text: bytes, body: bytes, rng: random.Random) -> bytes:
    """Return a frame whose checksum is right, or rarely not."""
    size = struct.pack("<I", len(text))
    check = zlib.crc32(body, zlib.crc32(text, zlib.crc32(size))) ^ (rng.random() < 0.01)
    return MAGIC + size + struct.pack("<I", check) + text + body


def split(frame: bytes) -> tuple[bytes, bytes]:
    """Return a frame's head, as text, and its body."""
    (size,) = struct.unpack_from("<I", frame, len(MAGIC))
    return frame[START : START + size], frame[START + size :]


def odd_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few flipped, cut out, doubled, or replaced."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, count = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 8, 40))
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + count]
        elif kind == 2:
            changed[at:at] = changed[at : at + count]
        elif kind == 3:
            changed[at : at + count] = rng.randbytes(count)
        elif kind == 4:
            changed[at : at + count] = rng.choice((b"\0", b"\xff", b"\x80", b"[", b'"', b"9", b"-")) * count
        else:
            changed = changed[:at]
    return bytes(changed)


def odd_value(rng: random.Random) -> Any:
    if rng.random() < 0.02:
        deep: Any = []
        for _ in range(rng.choice((10, 300, 900))):
            deep = [deep] if rng.random() < 0.9 else {"a": deep}
        return deep
    return copy.deepcopy(rng.choice(ODD))


def odd_json(text: bytes, rng: random.Random) -> bytes:
    """Return a head with values, keys or rows changed somewhere in the tree."""
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
    """Return a head with one number written in a way that Python would not write it."""
    start, end = rng.choice([match.span() for match in re.finditer(rb"-?[0-9][0-9.e+-]*", text)])
    odd = (b"1e999", b"-1E400", b"1e-999", b"-0", b"0x10", b"01", b"1_0", b"1.", b"NaN", b"-Infinity", b"9" * 5000)
    return text[:start] + rng.choice(odd) + text[end:]


def mutate(valid: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return an input: rarely noise, mostly a valid frame with something changed and its checksum repaired."""
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
    changed = bytearray(body)
    for _ in range(rng.choice((1, 1, 3, 10)) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 4, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def peak() -> int:
    """Return the largest memory use of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz(seed: int, inputs: int | None = None, seconds: float | None = None) -> list[Target]:
    """Run until the inputs or the seconds are used up; return the targets with the outcomes of their inputs."""
    rng, decoders = random.Random(seed), targets()
    for target in decoders:
        target.call(target.valid)
    before, done, begun = peak(), 0, time.monotonic()
    while (inputs is None or done < inputs) and (seconds is None or time.monotonic() - begun < seconds):
        target = rng.choice(decoders)
        data = mutate(target.valid, rng.choice(decoders).valid, rng)
        start = time.perf_counter()
        try:
            target.call(data)
            target.outcomes["accepted"] += 1
        except target.allowed:
            target.outcomes["refused"] += 1
        except BaseException:
            traceback.print_exc()
            raise SystemExit(f"{target.name} failed on input {done} of seed {seed}: {data.hex()}") from None
        took, now = time.perf_counter() - start, peak()
        if took > MOST_SECONDS or now - before > MOST_GROWTH:
            what = f"took {took:.2f} s and {(now - before) >> 20} MiB"
            raise SystemExit(f"{target.name} {what} on input {done} of seed {seed}: {data.hex()}")
        before, done = now, done + 1
    return decoders


def main() -> None:
    """Fuzz, and print how many inputs were accepted and refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--inputs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.seconds is None and options.inputs is None:
        options.seconds = 60.0
    torch.set_num_threads(1)
    begun = time.monotonic()
    decoders = fuzz(options.seed, options.inputs, options.seconds)
    took = time.monotonic() - begun
    total = 0
    for name in ("decode_request", "decode_reply"):
        outcomes = sum((target.outcomes for target in decoders if target.name == name), Counter[str]())
        total += outcomes.total()
        print(f"{name}: {outcomes['accepted']} accepted, {outcomes['refused']} refused")
    print(f"{total} inputs in {took:.0f} s, {total / took:.0f} a second; no other outcome")


if __name__ == "__main__":
    sys.exit(main())
