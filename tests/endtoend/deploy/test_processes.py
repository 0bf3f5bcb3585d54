"""Servers and nodes as processes on loopback: how they end, and how they refuse."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy.address import check_port_free, free_ports
from fedcover.deploy.processes.certificates import certificate_pem, create_authority
from fedcover.deploy.processes.keys import make_keys, server_keys
from fedcover.deploy.processes.probe import NoResponseError, check_server
from fedcover.deploy.processes.server import Server
from fedcover.deploy.processes.superlink import SuperLink
from fedcover.errors import InputError
from tests.endtoend.deploy.conftest import SKIP, Marked, slow
from tests.endtoend.deploy.fleet import Program

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("number", "kind"), [(socket.EAI_AGAIN, NoResponseError), (socket.EAI_NONAME, InputError)], ids=["again", "no name"]
)
def test_only_a_host_that_does_not_exist_is_bad_input(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At boot a name server may not respond yet; a node waits for it."""

    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(number, "an error")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(kind, match=r"fl\.example\.org"):
        check_server("fl.example.org:8000", None)


def test_a_server_that_closes_connections_is_waited_for(keys: Path) -> None:
    """As a gate does that has too many."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def refuse() -> None:
            with closing(server.accept()[0]) as connection:
                connection.recv(10_000)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(NoResponseError, match="closed the connection"):
            check_server(f"127.0.0.1:{server.getsockname()[1]}", keys / "ca.crt")
        thread.join()


@slow
def test_each_fault_of_a_node_is_one_sentence(keys: Path, tmp_path: Path, marked: Marked, cli: Cli) -> None:
    make_keys(tmp_path / "other", 1)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, source in (("ca.crt", tmp_path / "other"), ("node.key", keys), ("node.pub", keys)):
        (mixed / name).write_bytes((source / "node-0" / name).read_bytes())
    expired = tmp_path / "expired"
    shutil.copytree(keys / "node-0", expired)
    (expired / "ca.crt").write_bytes(certificate_pem(create_authority(-0.001)[1]))  # type: ignore[arg-type]
    with closing(Server(server_keys(keys / "server"), tmp_path / "state")) as server:
        (keys / "server" / "nodes" / "node-2.pub").unlink()
        server.update_nodes()
        client = ["deploy", "client", "--server", server.address, "--wait", "1", "--client", "0"]
        for options, fragment in (
            (["--keys", str(keys / "node-2")], "does not accept this node's key"),
            (["--keys", str(mixed)], "not signed by the authority in"),
            (["--keys", str(expired)], "create new keys in a new folder"),
            (["--keys", str(keys / "node-0"), "--insecure"], "exclude each other"),
            (["--insecure"], "plain text"),
            ([], "nothing is encrypted"),
        ):
            code, _, err = cli(*client, *options)
            assert (code, err.count("\n")) == (2, 1), err
            assert fragment in err
        with pytest.raises(InputError, match="another server uses the folder"):
            Server(server_keys(keys / "server"), tmp_path / "state")
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{server.port}"):
            Server(server_keys(keys / "server"), tmp_path / "second", port=server.port)
    (keys / "server" / "nodes" / "node-2.pub").write_bytes((keys / "node-2" / "node.pub").read_bytes())
    assert marked.left(10) == []
    code, _, err = cli(*client, "--keys", str(keys / "node-0"))
    assert code == 1
    assert "no server responds at" in err


def test_without_certificates_nothing_starts_unless_asked(keys: Path, cli: Cli, marked: Marked, tmp_path: Path) -> None:
    code, _, err = cli("deploy", "server", "--state", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    assert "nothing is encrypted" in err
    with closing(Server(None, tmp_path / "state")) as server:
        check_server(server.address, None)
        with pytest.raises(InputError, match="does not use TLS"):
            check_server(server.address, keys / "ca.crt")
        os.kill(server.link.program.pid, signal.SIGKILL)  # the supervisor cannot end what it started
        assert marked.left(10) == []
    assert (tmp_path / "state" / "superlink.log").stat().st_size > 0
    make_keys(tmp_path / "far", 1, ["example.org"])
    with pytest.raises(InputError, match=r"is not for '127.0.0.1'; .*--host 127.0.0.1"):
        SuperLink(server_keys(tmp_path / "far" / "server"), tmp_path)
    assert marked.left() == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=[pytest.mark.slow, SKIP]) for one in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_a_server_and_a_client_end_with_all_they_started(
    number: signal.Signals, keys: Path, marked: Marked, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    temporary = {"TMPDIR": str(tmp_path)}  # SIGKILL leaves files there
    server = Program(
        tmp_path / "server.out", "deploy", "server", "--keys", str(keys / "server"), "--port", str(port), "--node",
        str(keys / "node-0" / "node.pub"), environment=temporary,
    )  # fmt: skip
    programs = [server]
    try:
        server.wait_for("start a client with", 90)
        joining = ["--server", f"127.0.0.1:{port}", "--keys", str(keys / "node-0"), "--client", "0"]
        client = Program(tmp_path / "client.out", "deploy", "client", *joining, environment=temporary)
        programs.insert(0, client)
        client.wait_for("as node")
        for program in programs:
            program.process.send_signal(number)
        for program in programs:
            assert program.process.wait(30) == (-signal.SIGKILL if number == signal.SIGKILL else 0), program.printed
        assert marked.left(15) == []
        check_port_free("127.0.0.1", port)
        if number != signal.SIGKILL:
            assert client.printed.endswith("client stopped\n")
            assert server.printed.endswith("server stopped\n")
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait()


def test_without_flower_one_sentence_has_the_remedy_and_nothing_of_it_is_imported(tmp_path: Path) -> None:
    ends = {"server": ["--insecure"], "client": ["--server", "127.0.0.1:1", "--insecure"], "status": []}
    ends["run"] = ["c.toml", "--out", "x"]
    script = f"""
import sys
from fedcover.cli import main
print({{"flwr", "ray", "cryptography"}} & set(sys.modules))
sys.modules["flwr"] = None
for command, options in {ends}.items():
    sys.argv[1:] = ["deploy", command, *options]
    try:
        main()
    except SystemExit as end:
        print(command, end.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["set()", *(f"{command} 2" for command in ends)], done.stderr
    lines = done.stderr.splitlines()
    assert [line.endswith("pip install 'fedcover[flower]'") for line in lines] == [True] * len(ends), done.stderr


@pytest.mark.parametrize(
    ("more", "fragment"),
    [(["--capacity", "1.5"], "--capacity must be in"), (["--", "device"], "KEY=VALUE"), (["--", "a b=c"], "letters")],
)
def test_node_configs_are_checked(more: list[str], fragment: str, cli: Cli) -> None:
    code, _, err = cli("deploy", "client", "--server", "127.0.0.1:1", "--insecure", *more)
    assert code == 2
    assert fragment in err
