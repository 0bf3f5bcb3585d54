"""The link: both ends on loopback, and peers that are silent, rude or too greedy."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fedcover.deploy import bandwidth as link
from fedcover.errors import InputError

PATIENCE = 20.0


class Server:
    """``serve`` in a thread, on a free port, and the error it ended with."""

    def __init__(self, once: bool = True, silence: float = 5.0) -> None:
        self.port, self.error, self.refused = 0, "", list[str]()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(once, silence), daemon=True)
        self._thread.start()
        assert self._bound.wait(PATIENCE)

    def _run(self, once: bool, silence: float) -> None:
        try:
            link.serve(0, once, silence=silence, ready=self._ready, refused=self.refused.append)
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
    """A port at which somebody else answers, in their own way."""
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


def header(kind: bytes, length: int, magic: bytes = link.MAGIC) -> bytes:
    return link.HEADER.pack(magic, kind, length)


def test_both_ends_measure() -> None:
    server = Server()
    down, up = link.measure("127.0.0.1", server.port, megabytes=4)
    assert server.ended() == ""
    assert 1e5 < down < 1e12
    assert 1e5 < up < 1e12


def test_a_lasting_server_survives_rude_peers() -> None:
    server = Server(once=False)
    for _ in range(2):
        assert all(rate > 0 for rate in link.measure("localhost", server.port, megabytes=1))
        with server.connect() as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert rude.recv(99) == b""
    deadline = time.monotonic() + PATIENCE
    while len(server.refused) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ["does not speak fedcover's protocol" in said for said in server.refused] == [True, True]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak fedcover's protocol, it sent b'GET / HTTP/1.1"),
        (header(b"D", 1, b"fedcover-link-0\n"), "does not speak"),
        (header(b"D", 1)[:-3], "hung up after 22 bytes of a message"),
        (b"", "hung up without a word"),
        (header(b"X", 1), "asks for b'X', which is neither down nor up"),
        (header(b"D", link.MOST_MEGABYTES * link.MEGABYTE + 1), "wants to move 256000001 bytes, more than 256 MB"),
        (header(b"U", 2**64 - 1), "wants to move 18446744073709551615 bytes"),
        (header(b"U", 100) + bytes(40), "hung up 60 bytes before the end"),
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


def test_a_silent_client_is_given_up() -> None:
    server = Server(silence=0.2)
    with server.connect():
        assert "was silent for 0.2 seconds" in server.ended()


def test_a_client_that_never_reads_is_given_up() -> None:
    server = Server(silence=0.2)
    with server.connect() as client:
        client.sendall(header(b"D", 100 * link.MEGABYTE))
        assert "was silent for 0.2 seconds" in server.ended()


def test_a_client_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LONGEST", 0.3)
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
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak fedcover's protocol, it sent b'SSH-2.0-OpenSSH_"),
        (b"", "hung up instead of answering"),
        (header(b"D", 5), "was asked for b'D' 65536 and answers b'D' 5"),
        (header(b"U", link.CHUNK), "answers b'U' 65536"),
        (header(b"D", 2**63), "wants to move"),
        (header(b"D", link.CHUNK) + bytes(10), "hung up 65526 bytes before the end"),
    ],
)
def test_bad_servers_get_one_sentence(sent: bytes, words: str) -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(link.HEADER.size, socket.MSG_WAITALL)
        connection.sendall(sent)

    with peer(act) as port, pytest.raises(InputError, match=r"what answers at 127\.0\.0\.1") as caught:
        link.measure("127.0.0.1", port)
    assert words in str(caught.value)


def test_a_server_that_resets_gets_one_sentence() -> None:
    def act(connection: socket.socket) -> None:
        connection.recv(link.HEADER.size, socket.MSG_WAITALL)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with peer(act) as port, pytest.raises(InputError, match=r"broke off \(Connection reset"):
        link.measure("127.0.0.1", port)


def test_a_server_that_hangs_is_given_up() -> None:
    given_up = threading.Event()
    with peer(lambda _: given_up.wait(PATIENCE) and None) as port:
        begun = time.monotonic()
        with pytest.raises(InputError, match=r"was silent for 0\.2 seconds"):
            link.measure("127.0.0.1", port, silence=0.2)
        assert time.monotonic() - begun < 10
        given_up.set()


def test_nobody_there_gets_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            link.serve(port)
    with pytest.raises(InputError, match=f"nothing answers at 127.0.0.1:{port}.*serve {port}` there first"):
        link.measure("127.0.0.1", port)
    with pytest.raises(InputError, match=r"nothing answers at no-such-host\.invalid"):
        link.measure("no-such-host.invalid", port)
    with pytest.raises(InputError, match="nothing answers"):
        link.measure("x" * 300, port)


@pytest.mark.parametrize("megabytes", [0, -1, 257, 1.5, True, "8"])
def test_sizes_out_of_range_get_one_sentence(megabytes: int) -> None:
    with pytest.raises(InputError, match="megabytes must be"):
        link.measure("127.0.0.1", 1, megabytes)


@pytest.mark.parametrize("port", [-1, 65536, "80", 1.0])
def test_ports_out_of_range_get_one_sentence(port: int) -> None:
    with pytest.raises(InputError, match="port must be"):
        link.measure("127.0.0.1", port)
    with pytest.raises(InputError, match="port must be"):
        link.serve(port)


@pytest.mark.parametrize("silence", [0, -1, float("nan"), float("inf")])
def test_waits_out_of_range_get_one_sentence(silence: float) -> None:
    with pytest.raises(InputError, match="silence must be"):
        link.measure("127.0.0.1", 1, silence=silence)


def test_addresses() -> None:
    assert link.address_of("[::1]:70") == ("::1", 70)
    for bad in ("", "host", "host:", "host:x", "host:70000", "host:-1", "host:٣"):
        with pytest.raises(InputError, match="is no address"):
            link.address_of(bad)


def test_only_this_machine_is_heard() -> None:
    server = Server()
    with server.connect() as client:
        assert client.getpeername()[0] == "127.0.0.1"
    assert "hung up without a word" in server.ended()
