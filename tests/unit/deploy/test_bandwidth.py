"""The link: both ends on loopback, and peers that are silent, or violate the protocol."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedcover.deploy import bandwidth
from fedcover.errors import InputError

PATIENCE = 20.0


class Server:
    """``serve`` in a thread, on a free port, and the error that it ended with."""

    def __init__(self, silence: float = 5.0) -> None:
        self.port, self.error = 0, ""
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(silence,), daemon=True)
        self._thread.start()
        assert self._bound.wait(PATIENCE)

    def _run(self, silence: float) -> None:
        try:
            bandwidth.serve(0, silence=silence, ready=self._ready)
        except InputError as error:
            self.error = str(error)

    def _ready(self, port: int) -> None:
        self.port = port
        self._bound.set()

    def ended(self) -> str:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.error

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


@contextmanager
def peer(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield a port at which another server responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                act(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(PATIENCE)
        assert not thread.is_alive()


def header(kind: bytes, length: int, magic: bytes = bandwidth.MAGIC) -> bytes:
    return bandwidth.HEADER.pack(magic, kind, length)


def test_both_ends_measure() -> None:
    server = Server()
    down, up = bandwidth.measure("127.0.0.1", server.port, megabytes=4)
    assert server.ended() == ""
    assert 1e5 < down < 1e12
    assert 1e5 < up < 1e12


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it sent b'GET / HTTP/1.1"),
        (header(b"D", 1, b"fedcover-link-0\n"), "does not use"),
        (header(b"D", 1)[:-3], "after 22 bytes of a message"),
        (b"", "without a request"),
        (header(b"X", 1), "b'X', which is neither down nor up"),
        (header(b"D", bandwidth.MAX_MEGABYTES * bandwidth.MEGABYTE + 1), "256000001 bytes, more than 256 MB"),
        (header(b"U", 2**64 - 1), "18446744073709551615 bytes"),
        (header(b"U", 100) + bytes(40), "60 bytes before the end"),
    ],
)
def test_bad_clients_get_one_sentence(sent: bytes, words: str) -> None:
    server = Server()
    with server.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert words in server.ended()
    assert "\n" not in server.error
    assert "measure again" in server.error


def test_a_silent_client_is_released() -> None:
    server = Server(silence=0.2)
    with server.connect():
        assert "was silent for 0.2 seconds" in server.ended()


def test_a_client_that_never_reads_is_released() -> None:
    server = Server(silence=0.2)
    with server.connect() as client:
        client.sendall(header(b"D", 100 * bandwidth.MEGABYTE))
        assert "was silent for 0.2 seconds" in server.ended()


def test_a_client_that_drips_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MAX_SECONDS", 0.3)
    server = Server(silence=0.2)
    with server.connect() as client:
        client.sendall(header(b"U", 1000))
        for _ in range(50):
            try:
                client.sendall(b"x")
            except OSError:
                break
            time.sleep(0.02)
        assert "has taken more than 0.3 seconds" in server.ended()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it sent b'SSH-2.0-OpenSSH_"),
        (b"", "without a response"),
        (header(b"D", 5), "responded b'D' 5"),
        (header(b"U", bandwidth.CHUNK), "responded b'U' 65536"),
        (header(b"D", 2**63), "requests a transfer of"),
        (header(b"D", bandwidth.CHUNK) + bytes(10), "65526 bytes before the end"),
    ],
)
def test_bad_servers_get_one_sentence(sent: bytes, words: str) -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(bandwidth.HEADER.size, socket.MSG_WAITALL)
        connection.sendall(sent)

    with peer(act) as port, pytest.raises(InputError, match=r"the server at 127\.0\.0\.1") as caught:
        bandwidth.measure("127.0.0.1", port)
    assert words in str(caught.value)


def test_a_server_that_resets_gets_one_sentence() -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(bandwidth.HEADER.size, socket.MSG_WAITALL)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with peer(act) as port, pytest.raises(InputError, match=r"Connection reset"):
        bandwidth.measure("127.0.0.1", port)


def test_a_server_that_hangs_is_released() -> None:
    released = threading.Event()
    with peer(lambda _: released.wait(PATIENCE) and None) as port:
        begun = time.monotonic()
        with pytest.raises(InputError, match=r"was silent for 0\.2 seconds"):
            bandwidth.measure("127.0.0.1", port, silence=0.2)
        assert time.monotonic() - begun < PATIENCE
        released.set()


def test_a_missing_server_gets_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            bandwidth.serve(port)
    with pytest.raises(InputError, match=f"no server responds at 127.0.0.1:{port}.*serve 0.0.0.0:{port}`"):
        bandwidth.measure("127.0.0.1", port)
    with pytest.raises(InputError, match=r"no server responds at no-such-host\.invalid"):
        bandwidth.measure("no-such-host.invalid", port)
    with pytest.raises(InputError, match="no server responds"):
        bandwidth.measure("x" * 300, port)


@pytest.mark.parametrize("megabytes", [0, -1, 257, 1.5, True, "8"])
def test_sizes_out_of_range_get_one_sentence(megabytes: int) -> None:
    with pytest.raises(InputError, match="megabytes must be"):
        bandwidth.measure("127.0.0.1", 1, megabytes)


@pytest.mark.parametrize("port", [-1, 65536, "80", 1.0])
def test_ports_out_of_range_get_one_sentence(port: int) -> None:
    with pytest.raises(InputError, match="port must be"):
        bandwidth.measure("127.0.0.1", port)
    with pytest.raises(InputError, match="port must be"):
        bandwidth.serve(port)


@pytest.mark.parametrize("silence", [0, -1, float("nan"), float("inf")])
def test_waits_out_of_range_get_one_sentence(silence: float) -> None:
    with pytest.raises(InputError, match="silence must be"):
        bandwidth.measure("127.0.0.1", 1, silence=silence)


def test_by_default_only_this_machine_can_connect() -> None:
    server = Server()
    with server.connect() as client:
        assert client.getpeername()[0] == "127.0.0.1"
    assert "without a request" in server.ended()
