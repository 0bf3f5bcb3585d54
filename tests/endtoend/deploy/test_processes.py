"""Real SuperLinks and SuperNodes on loopback, encrypted and authenticated: their work and their end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from fedcover.cli import deploy
from fedcover.deploy.address import check_port_free, free_ports
from fedcover.deploy.processes.keys import NodeKeys, make_keys, node_keys, server_keys
from fedcover.deploy.processes.launch import SuperLink, SuperNode
from fedcover.deploy.processes.node_config import node_config
from fedcover.deploy.processes.probe import check_server
from fedcover.errors import FedcoverError, InputError
from tests.endtoend.deploy.conftest import SKIP, Marked, close_all, slow, wait_for_nodes

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
    with closing(SuperLink(server_keys(keys / "server"))) as link:
        link.register(server_keys(keys / "server").nodes[:2])
        nodes = [SuperNode(link.address, node_keys(keys / f"node-{n}"), node_config(n, "", 0.5, [])) for n in range(2)]
        federation = Federation(link, nodes)
        try:
            for node in nodes:
                node.join()
            yield federation
        finally:
            federation.close()


@slow
def test_a_federation_from_its_start_to_its_end(
    federation: Federation,
    keys: Path,
    tiny: str,
    marked: Marked,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = federation.link
    wait_for_nodes(link.control, 2, 30)
    monkeypatch.setattr(deploy, "submit", partial(deploy.submit, apps=tiny))
    out, config = tmp_path / "out.txt", tmp_path / "config.toml"
    config.write_text("rounds = 7\n")
    connection = ["--server", link.address, "--keys", str(keys / "server")]
    run = ["deploy", "run", str(config), *connection, "--out", str(out), "--set"]
    code, printed, err = cli(*run, "name=a b")
    assert code == 0, err
    assert "rounds = 7" in printed  # the log of the server's app
    assert 'name = "a b"' in printed
    assert "completed in" in printed
    assert json.loads(out.read_text()) == [0.0, 3.0, 6.0]

    code, printed, err = cli(*run, "name=please-fail")
    assert code == 1
    assert err.startswith("error: the run failed: ")
    assert "asked to fail" in err
    assert err.count("\n") == 1

    out.unlink()
    alarm = Thread(target=_signal_self_when, args=(out,), daemon=True)
    alarm.start()
    code, printed, err = cli(*run, "name=please-wait")
    assert code == 130
    alarm.join(1)
    assert "stopping run" in printed
    assert link.control.runs()[0].status == "finished:stopped"

    again = link.register(server_keys(keys / "server").nodes[:2])
    assert list(again.values()) == [node.node for node in federation.nodes]
    assert link.control.register(keys / "node-0" / "node.pub") is None

    code, printed, err = cli("deploy", "status", *connection)
    assert code == 0, err
    assert "2 of 2 nodes online" in printed
    assert "finished:failed" in printed

    started = [*link.program.processes(), *(pid for node in federation.nodes for pid in node.program.processes())]
    assert len(started) >= 9  # a supervisor, a program and its superexec each
    federation.close()
    assert marked.left() == []
    assert not link.folder.exists()


@slow
def test_each_fault_of_a_node_is_one_sentence(keys: Path, tmp_path: Path, marked: Marked, cli: Cli) -> None:
    make_keys(tmp_path / "other", 1)
    own, other = node_keys(keys / "node-2"), node_keys(tmp_path / "other" / "node-0")
    with closing(SuperLink(server_keys(keys / "server"))) as link:
        cases = [
            (own, False, r"not registered.*copy .*node-2/node.pub to the server"),
            (None, True, r"plain text.*give --keys"),
            (None, False, r"nothing is encrypted.*give --keys FOLDER/node-0"),
            (own, True, r"exclude each other"),
            (
                NodeKeys(other.ca, own.key, own.public),
                False,
                r"not signed by the authority in .*other.*ca.crt",
            ),
        ]
        for key_files, insecure, fragment in cases:
            with (
                pytest.raises(InputError, match=fragment),
                closing(SuperNode(link.address, key_files, {}, insecure=insecure, wait=1.0)) as node,
            ):
                node.join()
        client = ["deploy", "client", "--server", link.address]
        code, _, err = cli(*client, "--keys", str(keys / "node-2"), "--wait", "1")
        assert (code, err.count("\n")) == (2, 1), err
        assert "key is not registered" in err
        code, _, err = cli("deploy", "status", "--server", link.address, "--keys", str(tmp_path / "other" / "server"))
        assert code == 2
        assert "not signed by the authority" in err
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{link.port}"):
            SuperLink(server_keys(keys / "server"), port=link.port)
        with closing(SuperNode(link.address, node_keys(keys / "node-0"), {}, patience=1)) as node:
            Thread(target=lambda: (time.sleep(3), link.register([keys / "node-0" / "node.pub"]))).start()
            node.join()  # it starts before its key is registered, and waits
            link.close()
            assert "unreachable" in str(node.follow())
    assert marked.left() == []
    with pytest.raises(FedcoverError, match="no server responds at"):
        SuperNode(link.address, own, {}, wait=0.0)


def test_without_certificates_nothing_starts_unless_asked(keys: Path, cli: Cli, marked: Marked, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --keys FOLDER/server"):
        SuperLink(None)
    code, _, err = cli("deploy", "server")
    assert (code, err.count("\n")) == (2, 1)
    assert "nothing is encrypted" in err
    with closing(SuperLink(None, tmp_path / "state", insecure=True)) as link:
        check_server(link.address, None)
        with pytest.raises(InputError, match="does not use TLS"):
            check_server(link.address, keys / "ca.crt")
        os.kill(link.program.pid, signal.SIGKILL)  # the supervisor cannot end what it started
        assert marked.left(10) == []
    assert (tmp_path / "state" / "superlink.log").stat().st_size > 0
    make_keys(tmp_path / "far", 1, ["example.org"])
    with pytest.raises(InputError, match=r"is not for '127.0.0.1'; .*--host 127.0.0.1"):
        SuperLink(server_keys(tmp_path / "far" / "server"))
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
    public = str(keys / "node-0" / "node.pub")
    server = _start(tmp_path, "server", "--keys", str(keys / "server"), "--port", str(port), "--node", public)
    client = None
    try:
        assert "server at" in _read_until(server, "start a client with")
        if number != signal.SIGINT:
            joining = ["--server", f"127.0.0.1:{port}", "--keys", str(keys / "node-0")]
            client = _start(tmp_path, "client", *joining, "--client", "0")
            assert "as node" in _read_until(client, "joined")
        started = [process for process in (client, server) if process is not None]
        for process in started:
            process.send_signal(number)
        for process in started:
            assert process.wait(20) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
        assert marked.left(15 if number == signal.SIGKILL else 0) == []
        check_port_free("127.0.0.1", port)
    finally:
        for process in (server, client):
            if process is not None:
                process.kill()
                process.communicate()


def test_without_flower_one_sentence_has_the_remedy_and_nothing_of_it_is_imported(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcover.deploy.processes.environment.shutil.which", lambda *args, **kwargs: None)
    ends = {"server": [], "client": ["--server", "x:1"], "status": ["--server", "x:1"]}
    ends["run"] = ["c.toml", "--server", "x:1", "--out", "x"]
    for command, options in ends.items():
        code, _, err = cli("deploy", command, *options)
        assert code == 2
        assert err.endswith("pip install 'fedcover[flower]'\n")
    script = "import fedcover.cli, sys; print({'flwr', 'ray', 'cryptography'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("more", "fragment"),
    [(["--capacity", "1.5"], "--capacity must be in"), (["--", "device"], "KEY=VALUE"), (["--", "a b=c"], "letters")],
)
def test_node_configs_are_checked(more: list[str], fragment: str, cli: Cli) -> None:
    code, _, err = cli("deploy", "client", "--server", "127.0.0.1:1", "--insecure", *more)
    assert code == 2
    assert fragment in err


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}  # SIGKILL leaves files there
    return subprocess.Popen(
        [sys.executable, "-m", "fedcover", "deploy", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


def _signal_self_when(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"ended with {process.wait()} before '{text}': {read}")
