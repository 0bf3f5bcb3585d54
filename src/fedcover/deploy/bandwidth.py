"""How fast a link is: bytes per second down and up, between two machines that run fedcover, over plain TCP.

One end serves, the other measures. A message is a magic word, one letter and a length, all of fixed size; ``D``
asks for that many bytes, ``U`` is followed by that many and answered when the last has come. The bytes are random,
so that a link that compresses gains nothing. Both ends hold one small buffer, whatever is sent.
"""

import os
import socket
import struct
import time
from collections.abc import Callable

from fedcover.errors import InputError, check_number, check_whole

MAGIC = b"fedcover-link-1\n"
HEADER = struct.Struct(f">{len(MAGIC)}scQ")
DOWN, UP = b"D", b"U"

MEGABYTE = 1_000_000
MOST_MEGABYTES = 256
"""The most that one message may ask for or bring."""
CHUNK = 1 << 16
SILENCE = 10.0
"""Seconds without a byte after which an end gives up."""
LONGEST = 600.0
"""Seconds after which an end gives up on a peer, however many bytes still drip."""


def address_of(text: str) -> tuple[str, int]:
    """The host and the port that HOST:PORT names, or PORT alone, which is on this machine.

    >>> address_of("10.0.0.7:5201"), address_of("5201")
    (('10.0.0.7', 5201), ('127.0.0.1', 5201))
    """
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal() or not port.isascii() or len(port) > 5 or int(port) > 65535:
        raise InputError(f"'{text}' is no address; give HOST:PORT with a port of at most 65535, such as 10.0.0.7:5201")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(
    port: int,
    once: bool = True,
    host: str = "127.0.0.1",
    silence: float = SILENCE,
    ready: Callable[[int], None] | None = None,
    refused: Callable[[str], None] | None = None,
) -> None:
    """Answer one peer that measures, or with ``once=False`` one after another, for good.

    Only this machine is heard unless ``host`` says otherwise. Port 0 takes a free one; ``ready`` is told which. A
    peer that does not keep to the protocol is hung up on: with ``once`` that is an error, else ``refused`` is told.
    """
    _check_port(port, 0)
    check_number("silence", silence, 0, LONGEST, f"a positive number of seconds, below {LONGEST:g}")
    try:
        listening = socket.create_server((host, port), family=_family(host), backlog=1)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}:{port} ({_why(error)}); choose another port") from error
    with listening:
        if ready is not None:
            ready(listening.getsockname()[1])
        while True:
            peer, address = listening.accept()
            who = f"the peer {address[0]}"
            try:
                with peer:
                    _answer(_Wire(peer, who, silence))
            except InputError as error:
                if once:
                    raise
                if refused is not None:
                    refused(str(error))
            if once:
                return


def measure(host: str, port: int, megabytes: int = 8, silence: float = SILENCE) -> tuple[float, float]:
    """Bytes per second down and up, each over one transfer to the last byte, a first one of 64 KiB left out.

    The way there and back is in it, as it is in a round; take more megabytes for a fast link.
    """
    _check_port(port, 1)
    check_whole("megabytes", megabytes, 1)
    check_number("silence", silence, 0, LONGEST, f"a positive number of seconds, below {LONGEST:g}")
    if megabytes > MOST_MEGABYTES:
        raise InputError(f"megabytes must be at most {MOST_MEGABYTES}; got {megabytes}; fewer measure a link as well")
    who = f"what answers at {host}:{port}"
    try:
        peer = socket.create_connection((host, port), timeout=silence)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"nothing answers at {host}:{port} ({_why(error)}); run `fedcover calibrate serve {port}` there first"
        ) from error
    with peer:
        wire = _Wire(peer, who, silence)
        _down(wire, CHUNK)
        down = _down(wire, megabytes * MEGABYTE)
        _up(wire, CHUNK)
        return down, _up(wire, megabytes * MEGABYTE)


class _Wire:
    """A connection whose every failure is one sentence about the peer."""

    def __init__(self, peer: socket.socket, who: str, silence: float) -> None:
        peer.settimeout(silence)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer, self._who, self._silence = peer, who, silence
        self._buffer = memoryview(bytearray(os.urandom(CHUNK)))
        self._until = time.monotonic() + LONGEST

    def say(self, kind: bytes, length: int) -> None:
        """Send one header."""
        self._send(HEADER.pack(MAGIC, kind, length))

    def hear(self) -> tuple[bytes, int] | None:
        """The next header; None if the peer has hung up instead of sending one."""
        head = bytearray()
        while len(head) < HEADER.size:
            count = self._receive(HEADER.size - len(head))
            if not count:
                if not head:
                    return None
                raise self.fault(f"hung up after {len(head)} bytes of a message")
            head += self._buffer[:count]
            if head[: len(MAGIC)] != MAGIC[: len(head)]:
                raise self.fault(f"does not speak fedcover's protocol, it sent {bytes(head[:16])!r}")
        _, kind, length = HEADER.unpack(head)
        if length > MOST_MEGABYTES * MEGABYTE:
            raise self.fault(f"wants to move {length} bytes, more than {MOST_MEGABYTES} MB")
        return kind, length

    def give(self, length: int) -> None:
        """Send this many bytes of no meaning."""
        for start in range(0, length, CHUNK):
            self._send(self._buffer[: min(CHUNK, length - start)])

    def take(self, length: int) -> None:
        """Receive this many bytes and forget them."""
        left = length
        while left:
            count = self._receive(min(CHUNK, left))
            if not count:
                raise self.fault(f"hung up {left} bytes before the end")
            left -= count

    def fault(self, what: str) -> InputError:
        """The error that says what the peer did."""
        return InputError(f"{self._who} {what}; see that the same fedcover runs at both ends, and measure again")

    def _send(self, data: bytes | memoryview) -> None:
        self._check_time()
        try:
            self._peer.sendall(data)
        except OSError as error:
            raise self._broken(error) from error

    def _receive(self, most: int) -> int:
        self._check_time()
        try:
            return self._peer.recv_into(self._buffer, most)
        except OSError as error:
            raise self._broken(error) from error

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise self.fault(f"has taken more than {LONGEST:g} seconds")

    def _broken(self, error: OSError) -> InputError:
        if isinstance(error, TimeoutError):
            return self.fault(f"was silent for {self._silence:g} seconds")
        return self.fault(f"broke off ({_why(error)})")


def _answer(wire: _Wire) -> None:
    """Do what a peer asks until it hangs up."""
    asked = False
    while (message := wire.hear()) is not None:
        kind, length = message
        if kind not in (DOWN, UP):
            raise wire.fault(f"asks for {kind!r}, which is neither down nor up")
        if kind == UP:
            wire.take(length)
        wire.say(kind, length)
        if kind == DOWN:
            wire.give(length)
        asked = True
    if not asked:
        raise wire.fault("hung up without a word")


def _down(wire: _Wire, length: int) -> float:
    begun = time.perf_counter()
    wire.say(DOWN, length)
    _confirm(wire, DOWN, length)
    wire.take(length)
    return length / (time.perf_counter() - begun)


def _up(wire: _Wire, length: int) -> float:
    begun = time.perf_counter()
    wire.say(UP, length)
    wire.give(length)
    _confirm(wire, UP, length)
    return length / (time.perf_counter() - begun)


def _confirm(wire: _Wire, kind: bytes, length: int) -> None:
    heard = wire.hear()
    if heard is None:
        raise wire.fault("hung up instead of answering")
    if heard != (kind, length):
        raise wire.fault(f"was asked for {kind!r} {length} and answers {heard[0]!r} {heard[1]}")


def _check_port(port: int, least: int) -> None:
    check_whole("port", port, least)
    if port > 65535:
        raise InputError(f"port must be at most 65535; got {port}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
