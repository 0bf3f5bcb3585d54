"""The bandwidth of a link: bytes per second down and up between two machines that run fedcover, over plain TCP.

One end serves, the other measures. A message is a magic word, one letter and a length, all of fixed size. ``D``
requests that many bytes; ``U`` is followed by that many bytes and confirmed when the last has arrived. The bytes are
random, so that compression on the link has no effect. Both ends use one small buffer, whatever the length.
"""

import os
import socket
import struct
import time
from collections.abc import Callable

from fedcover.deploy.address import LOOPBACK_HOST, MAX_PORT, address_family
from fedcover.errors import InputError, check_number, check_whole

MAGIC = b"fedcover-link-1\n"
HEADER = struct.Struct(f">{len(MAGIC)}scQ")
DOWN, UP = b"D", b"U"

MEGABYTE = 1_000_000
MAX_MEGABYTES = 256
"""The size limit of one transfer."""
CHUNK = 1 << 16
SILENCE = 10.0
"""Seconds without a byte after which an end gives up."""
MAX_SECONDS = 600.0
"""Seconds after which an end gives up on a peer, even if bytes still arrive."""


def serve(
    port: int,
    host: str = LOOPBACK_HOST,
    silence: float = SILENCE,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serve one peer that measures the link, and return.

    Args:
        port: The port to listen on; 0 chooses a free one.
        host: The address to listen on; by default only this machine can connect.
        silence: Seconds without a byte after which the peer is disconnected.
        ready: Called with the port once the server listens.

    Raises:
        InputError: If the port cannot be used, or if the peer violates the protocol.
    """
    _check_port(port, 0)
    check_number("silence", silence, 0, MAX_SECONDS, f"a positive number of seconds, below {MAX_SECONDS:g}")
    try:
        listener = socket.create_server((host, port), family=address_family(host), backlog=1)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}:{port} ({_reason(error)}); choose another port") from error
    with listener:
        if ready is not None:
            ready(listener.getsockname()[1])
        peer, address = listener.accept()
        with peer:
            _serve_peer(_Connection(peer, f"the peer {address[0]}", silence))


def measure(host: str, port: int, megabytes: int = 8, silence: float = SILENCE) -> tuple[float, float]:
    """Return the bytes per second down and up, each timed over one transfer after a warm-up of 64 KiB.

    The time includes one round trip, as that of a training round does; use more megabytes for a fast link.

    Args:
        host: The host at which ``serve`` runs.
        port: Its port.
        megabytes: The size of each transfer.
        silence: Seconds without a byte after which the measurement is given up.

    Raises:
        InputError: If the server cannot be reached or violates the protocol.
    """
    _check_port(port, 1)
    check_whole("megabytes", megabytes, 1)
    check_number("silence", silence, 0, MAX_SECONDS, f"a positive number of seconds, below {MAX_SECONDS:g}")
    if megabytes > MAX_MEGABYTES:
        raise InputError(f"megabytes must be at most {MAX_MEGABYTES}; got {megabytes}; less is accurate enough")
    try:
        peer = socket.create_connection((host, port), timeout=silence)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"no server responds at {host}:{port} ({_reason(error)}); run `fedcover calibrate serve 0.0.0.0:{port}`"
            f" there first"
        ) from error
    with peer:
        connection = _Connection(peer, f"the server at {host}:{port}", silence)
        _time_download(connection, CHUNK)
        down = _time_download(connection, megabytes * MEGABYTE)
        _time_upload(connection, CHUNK)
        return down, _time_upload(connection, megabytes * MEGABYTE)


class _Connection:
    """A connection whose failures are InputErrors about the peer."""

    def __init__(self, peer: socket.socket, label: str, silence: float) -> None:
        peer.settimeout(silence)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer, self._label, self._silence = peer, label, silence
        self._buffer = memoryview(bytearray(os.urandom(CHUNK)))
        self._until = time.monotonic() + MAX_SECONDS

    def send_header(self, kind: bytes, length: int) -> None:
        """Send one header."""
        self._send(HEADER.pack(MAGIC, kind, length))

    def receive_header(self) -> tuple[bytes, int] | None:
        """Return the kind and the length of the next header; None if the peer closed the connection before it."""
        head = bytearray()
        while len(head) < HEADER.size:
            count = self._receive(HEADER.size - len(head))
            if not count:
                if not head:
                    return None
                raise self.error(f"closed the connection after {len(head)} bytes of a message")
            head += self._buffer[:count]
            if head[: len(MAGIC)] != MAGIC[: len(head)]:
                raise self.error(f"does not use fedcover's protocol; it sent {bytes(head[:16])!r}")
        _, kind, length = HEADER.unpack(head)
        if length > MAX_MEGABYTES * MEGABYTE:
            raise self.error(f"requests a transfer of {length} bytes, more than {MAX_MEGABYTES} MB")
        return kind, length

    def send_filler(self, length: int) -> None:
        """Send this many random bytes."""
        for start in range(0, length, CHUNK):
            self._send(self._buffer[: min(CHUNK, length - start)])

    def discard(self, length: int) -> None:
        """Receive this many bytes and discard them."""
        left = length
        while left:
            count = self._receive(min(CHUNK, left))
            if not count:
                raise self.error(f"closed the connection {left} bytes before the end")
            left -= count

    def error(self, event: str) -> InputError:
        """Return the error that describes what the peer did."""
        return InputError(f"{self._label} {event}; check that both ends run the same fedcover, and measure again")

    def _send(self, data: bytes | memoryview) -> None:
        self._check_time()
        try:
            self._peer.sendall(data)
        except OSError as error:
            raise self._connection_error(error) from error

    def _receive(self, limit: int) -> int:
        self._check_time()
        try:
            return self._peer.recv_into(self._buffer, limit)
        except OSError as error:
            raise self._connection_error(error) from error

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise self.error(f"has taken more than {MAX_SECONDS:g} seconds")

    def _connection_error(self, error: OSError) -> InputError:
        if isinstance(error, TimeoutError):
            return self.error(f"was silent for {self._silence:g} seconds")
        return self.error(f"broke the connection ({_reason(error)})")


def _serve_peer(connection: _Connection) -> None:
    """Serve transfers until the peer closes the connection."""
    transfers = 0
    while (header := connection.receive_header()) is not None:
        kind, length = header
        if kind not in (DOWN, UP):
            raise connection.error(f"requests {kind!r}, which is neither down nor up")
        if kind == UP:
            connection.discard(length)
        connection.send_header(kind, length)
        if kind == DOWN:
            connection.send_filler(length)
        transfers += 1
    if not transfers:
        raise connection.error("closed the connection without a request")


def _time_download(connection: _Connection, length: int) -> float:
    start = time.perf_counter()
    connection.send_header(DOWN, length)
    _check_confirmation(connection, DOWN, length)
    connection.discard(length)
    return length / (time.perf_counter() - start)


def _time_upload(connection: _Connection, length: int) -> float:
    start = time.perf_counter()
    connection.send_header(UP, length)
    connection.send_filler(length)
    _check_confirmation(connection, UP, length)
    return length / (time.perf_counter() - start)


def _check_confirmation(connection: _Connection, kind: bytes, length: int) -> None:
    header = connection.receive_header()
    if header is None:
        raise connection.error("closed the connection without a response")
    if header != (kind, length):
        raise connection.error(f"was sent {kind!r} {length} and responded {header[0]!r} {header[1]}")


def _check_port(port: int, least: int) -> None:
    check_whole("port", port, least)
    if port > MAX_PORT:
        raise InputError(f"port must be at most {MAX_PORT}; got {port}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
