"""Real SuperLinks and SuperNodes on loopback, encrypted and authenticated: what they do, and that they end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedcover.cli.deploy import node_config, submit
from fedcover.errors import FedcoverError, InputError
from fedcover.flower.keys import NodeKeys, make_keys, node_keys, server_keys
from fedcover.flower.probe import check_answers
from fedcover.flower.processes import SuperLink, SuperNode, check_free, free_ports
from fedcover.flower.program import close_all
from tests.flower.conftest import Marked

Cli = Callable[..., tuple[int, str, str]]


@dataclass
class Federation:
    link: SuperLink
    nodes: list[SuperNode]

    def close(self) -> None:
        close_all([node.program for node in self.nodes])
        for served in (*self.nodes, self.link):
            served.close()


@pytest.fixture(scope="module")
def federation(keys: Path, tiny: str, marked: Marked) -> Iterator[Federation]:
    with SuperLink(server_keys(keys / "server")) as link:
        link.register(server_keys(keys / "server").nodes[:2])
        nodes = [SuperNode(link.address, node_keys(keys / f"node-{n}"), node_config(n, "", 0.5, [])) for n in range(2)]
        made = Federation(link, nodes)
        try:
            for node in nodes:
                node.join()
            yield made
        finally:
            made.close()


def test_a_federation_from_its_start_to_its_end(
    federation: Federation, keys: Path, tiny: str, marked: Marked, tmp_path: Path, cli: Cli
) -> None:
    link = federation.link
    link.control.wait_for_nodes(2, 30)
    out = tmp_path / "out.txt"
    state = submit(link.control, 'text = "a b"\n', out, apps=tiny)
    assert (state.status, state.details) == ("finished:completed", "")
    assert json.loads(out.read_text()) == [0.0, 3.0, 6.0]

    state = submit(link.control, "fail = true\n", out, apps=tiny)
    assert not state.completed
    assert state.status == "finished:failed"
    assert "asked to fail" in state.details

    again = link.register(server_keys(keys / "server").nodes[:2])
    assert list(again.values()) == [node.node for node in federation.nodes]
    assert link.control.register(keys / "node-0" / "node.pub") is None

    code, told, err = cli("deploy", "status", "--server", link.address, "--keys", str(keys / "server"))
    assert code == 0, err
    assert "2 of 2 nodes online" in told
    assert "finished:failed" in told

    started = [*link.program.processes(), *(pid for node in federation.nodes for pid in node.program.processes())]
    assert len(started) >= 9  # a warden, a program and its superexec each
    federation.close()
    assert marked.left() == []
    assert not link.folder.exists()


def test_what_is_wrong_with_a_node_is_one_sentence(keys: Path, tmp_path: Path, marked: Marked, cli: Cli) -> None:
    make_keys(tmp_path / "other", 1)
    own, other = node_keys(keys / "node-2"), node_keys(tmp_path / "other" / "node-0")
    with SuperLink(server_keys(keys / "server")) as link:
        cases = [
            (own, False, r"does not know this node's key.*copy .*node-2/node.pub to the server"),
            (None, True, r"does not answer in plain text.*give --keys"),
            (None, False, r"nothing is encrypted.*give --keys FOLDER/node-0"),
            (own, True, r"exclude each other"),
            (
                NodeKeys(other.ca, own.key, own.public),
                False,
                r"not signed by the authority in .*other.*copy ca.crt anew",
            ),
        ]
        for found, insecure, sentence in cases:
            with (
                pytest.raises(InputError, match=sentence),
                SuperNode(link.address, found, {}, insecure=insecure) as node,
            ):
                node.join()
        client = ["deploy", "client", "--server", link.address]
        code, _, err = cli(*client, "--keys", str(keys / "node-2"))
        assert (code, err.count("\n")) == (2, 1), err
        assert "does not know this node's key" in err
        code, _, err = cli("deploy", "status", "--server", link.address, "--keys", str(tmp_path / "other" / "server"))
        assert code == 2
        assert "not signed by the authority" in err
        with pytest.raises(InputError, match=rf"127.0.0.1:{link.port} cannot be listened on"):
            SuperLink(server_keys(keys / "server"), port=link.port)
    assert marked.left() == []
    with pytest.raises(FedcoverError, match="nothing answers at"):
        SuperNode(link.address, own, {}, wait=0.0)


def test_without_certificates_nothing_starts_unless_asked(keys: Path, cli: Cli, marked: Marked, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --keys FOLDER/server"):
        SuperLink(None)
    code, _, err = cli("deploy", "server")
    assert (code, err.count("\n")) == (2, 1)
    assert "nothing is encrypted" in err
    with SuperLink(None, tmp_path / "state", insecure=True) as link:
        check_answers(link.address, None)
        with pytest.raises(InputError, match="does not speak TLS"):
            check_answers(link.address, keys / "ca.crt")
    assert (tmp_path / "state" / "superlink.log").stat().st_size > 0
    make_keys(tmp_path / "far", 1, ["example.org"])
    with pytest.raises(InputError, match=r"is not for '127.0.0.1'; .* make keys with --host 127.0.0.1"):
        SuperLink(server_keys(tmp_path / "far" / "server"))
    assert marked.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_and_a_client_end_with_all_they_started(
    number: signal.Signals, keys: Path, marked: Marked, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    public = str(keys / "node-0" / "node.pub")
    server = _start("server", "--keys", str(keys / "server"), "--port", str(port), "--node", public)
    client = None
    try:
        assert "server at" in _read_until(server, "start a client with")
        client = _start("client", "--server", f"127.0.0.1:{port}", "--keys", str(keys / "node-0"), "--client", "0")
        assert "as node" in _read_until(client, "joined")
        for process in (client, server):
            process.send_signal(number)
        for process in (client, server):
            assert process.wait(20) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert marked.left(15 if number == signal.SIGKILL else 0) == []
        check_free("127.0.0.1", port)
    finally:
        for process in (server, client):
            if process is not None:
                process.kill()
                process.communicate()


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedcover", "deploy", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"ended with {process.wait()} before '{text}': {read}")
