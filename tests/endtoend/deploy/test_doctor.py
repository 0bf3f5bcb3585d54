"""``fedcover deploy doctor`` on machines that are set up wrong: each problem is one line, with its remedy."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy.address import free_ports
from fedcover.deploy.gate import gate
from fedcover.deploy.gate.allowed_keys import AllowedKeys
from fedcover.deploy.gate.serve import GateServer
from fedcover.deploy.processes.certificates import (
    certificate_pem,
    create_authority,
    create_server_certificate,
    private_pem,
)
from fedcover.deploy.processes.keys import HOSTS, ServerKeys, make_keys, server_keys
from fedcover.deploy.processes.server import Server
from tests.endtoend.deploy.conftest import Marked
from tests.endtoend.deploy.namespaces import run_in_namespace

Cli = Callable[..., tuple[int, str, str]]
CONFIG = '[data]\nname = "{name}"\nclients = 2\n'
AHEAD = """
import time
real = time.time
time.time = lambda: real() + 20
from fedcover.__main__ import main
main()
"""
"""The command on a machine whose clock is 20 seconds ahead."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the keys of two nodes, of which the server accepts only the first."""
    path = tmp_path_factory.mktemp("doctor")
    make_keys(path / "keys", 2)
    (path / "keys" / "server" / "nodes" / "node-1.pub").unlink()
    return path


@pytest.fixture(scope="module")
def server(folder: Path, marked: Marked) -> Iterator[Server]:
    with closing(Server(server_keys(folder / "keys" / "server"), folder / "state")) as running:
        yield running


def examine(cli: Cli, *options: object) -> dict[str, tuple[str, str]]:
    """Return the level and the text of each finding; the exit code is 0 exactly if there is no problem."""
    code, out, err = cli("deploy", "doctor", *map(str, options), "--json")
    findings = {row["subject"]: (row["level"], row["text"]) for row in json.loads(out)}
    assert code == int("problem" in {level for level, _ in findings.values()}), err
    return findings


def problem(cli: Cli, *options: object) -> tuple[str, str]:
    """Return the subject and the text of the only problem; it fits on one line."""
    findings = examine(cli, *options)
    ((subject, text),) = [(name, text) for name, (level, text) in findings.items() if level == "problem"]
    assert "\n" not in text
    return subject, text


def node_options(server: Server, folder: Path, node: str = "node-0") -> list[object]:
    return ["--server", server.address, "--keys", folder / "keys" / node]


def test_a_good_set_up_has_no_problem(cli: Cli, folder: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.format(name="digits"))
    (tmp_path / "own.py").write_text("x = 1\n")
    more = ["--config", tmp_path / "run.toml", "--client", 1, "--out", tmp_path / "logs", "--file", tmp_path / "own.py"]
    findings = examine(cli, *node_options(server, folder), *more)
    assert {level for level, _ in findings.values()} == {"ok"}
    assert findings["registered"][1] == "the server accepts this node's key"
    assert findings["versions"][1].endswith("as on the server")
    assert findings["data"][1].startswith("client 1 has")
    options = ["--keys", folder / "keys" / "server", "--state", folder / "state", "--running"]
    findings = examine(cli, *options, "--config", tmp_path / "run.toml")
    assert not [text for level, text in findings.values() if level == "problem"]
    assert findings["server"][1] == f"it runs and responds at {server.address}"
    assert findings["nodes"][1] == "1 node may join"
    code, out, _ = cli("deploy", "doctor", *map(str, options))
    assert code == 0
    assert out.splitlines()[-1].startswith("no problem")
    assert not (tmp_path / "logs").exists()  # nothing is changed


def test_1_another_authority(cli: Cli, folder: Path, server: Server, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", 1)
    mixed = shutil.copytree(folder / "keys" / "node-0", tmp_path / "mixed")
    shutil.copy(tmp_path / "other" / "ca.crt", mixed / "ca.crt")
    subject, text = problem(cli, "--server", server.address, "--keys", mixed)
    assert subject == "server"
    assert "was not signed by the authority in" in text
    assert "copy ca.crt again" in text


def serve_certificate(folder: Path, hosts: tuple[str, ...], days: float) -> tuple[ServerKeys, Path]:
    """Write keys whose certificate is for these hosts and so many days; return the server's and the node's folder."""
    make_keys(folder, 1)
    authority, ca = create_authority(30)
    key, certificate = create_server_certificate(hosts, days, authority, ca)  # type: ignore[arg-type]
    for name in ("server", "node-0"):
        (folder / name / "ca.crt").write_bytes(certificate_pem(ca))
    (folder / "server" / "server.key").write_bytes(private_pem(key))
    (folder / "server" / "server.crt").write_bytes(certificate_pem(certificate))
    home = folder / "server"
    return ServerKeys(home / "ca.crt", home / "server.crt", home / "server.key"), folder / "node-0"


@pytest.mark.parametrize(
    ("hosts", "days", "seen", "remedy"),
    [
        (HOSTS, -0.001, "has expired", "create new keys with `fedcover deploy keys`"),
        (("fl.example.org",), 30, "is not for '127.0.0.1'", "create keys with --host 127.0.0.1"),
    ],
    ids=["expired", "host"],
)
def test_2_and_3_a_certificate_that_has_expired_or_is_for_another_host(
    cli: Cli, tmp_path: Path, hosts: tuple[str, ...], days: float, seen: str, remedy: str
) -> None:
    keys, node = serve_certificate(tmp_path / "keys", hosts, days)
    (port,) = free_ports(1)
    with closing(GateServer("127.0.0.1", port, "127.0.0.1:1", keys, AllowedKeys(None))):
        subject, text = problem(cli, "--server", f"127.0.0.1:{port}", "--keys", node)
        assert subject == "server"
        assert seen in text
        assert remedy in text
        joining = ["--server", f"127.0.0.1:{port}", "--keys", str(node), "--client", "0", "--wait", "1"]
        code, _, err = cli("deploy", "client", *joining)  # a node does not join such a server
        assert (code, err.count("\n"), seen in err, remedy in err) == (2, 1, True, True), err
    subject, text = problem(cli, "--keys", tmp_path / "keys" / "server", "--state", tmp_path / "state")
    assert subject == ("keys" if days < 0 else "hosts")  # the server's own machine says it too
    assert ("expired on" if days < 0 else "not for 127.0.0.1") in text


def test_4_a_port_in_use(cli: Cli, folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--keys", folder / "keys" / "server", "--state", tmp_path / "state", "--port", port]
        subject, text = problem(cli, *options)
    assert subject == "server"
    assert text == f"cannot listen on 127.0.0.1:{port} (address already in use); give another --host or --port"
    assert examine(cli, *options)["server"] == ("ok", f"none runs; 127.0.0.1:{port} is free")


def test_5_no_server(cli: Cli, folder: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    subject, text = problem(cli, "--server", f"127.0.0.1:{port}", "--keys", folder / "keys" / "node-0")
    assert subject == "server"
    assert "connection refused" in text
    assert "start `fedcover deploy server` there" in text
    options = ["--keys", folder / "keys" / "server", "--state", tmp_path, "--running"]
    assert "no server runs with the folder" in problem(cli, *options)[1]
    address = {"control": "127.0.0.1:1", "gate": f"127.0.0.1:{port}", "ca": "", "pid": 2**22}
    (tmp_path / "server.json").write_text(json.dumps(address))  # as after a kill -9
    assert "names a server at" in problem(cli, *options)[1]
    level, text = examine(cli, *options[:-1], "--port", port)["server"]  # before a start that is no obstacle
    assert (level, text) == ("ok", f"none runs; 127.0.0.1:{port} is free; the last one was killed")


def test_6_a_key_that_is_not_registered(cli: Cli, folder: Path, server: Server) -> None:
    subject, text = problem(cli, *node_options(server, folder, "node-1"))
    assert subject == "registered"
    assert "it was never registered there, or it was revoked" in text
    assert "copy node.pub into the folder `nodes`" in text


def test_7_a_clock_that_is_20_seconds_ahead(folder: Path, server: Server) -> None:
    command = ["deploy", "doctor", *map(str, node_options(server, folder)), "--json"]
    done = subprocess.run([sys.executable, "-c", AHEAD, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    findings = {row["subject"]: row for row in json.loads(done.stdout)}
    assert [name for name, row in findings.items() if row["level"] == "problem"] == ["clock"]
    assert "clock is 20 seconds ahead of the server's; set the one that is wrong" in findings["clock"]["text"]
    assert findings["registered"]["level"] == "ok"  # requests carry the server's time


def test_8_and_9_a_read_only_folder_and_a_full_disk(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "read-only").mkdir()
    mounts = f"mount -t tmpfs -o size=64k none {tmp_path}/full && head -c 64k /dev/zero > {tmp_path}/full/x"
    mounts += f" && mount --bind {tmp_path}/read-only {tmp_path}/read-only"
    mounts += f" && mount -o remount,bind,ro {tmp_path}/read-only"
    for name, seen, remedy in (
        ("read-only", "read-only file system", "name a folder that this user may write to"),
        ("full", "no space left on device", "make room on the disk"),
    ):
        done = run_in_namespace(
            mounts, "deploy", "doctor", "--keys", str(folder / "keys" / "server"), "--state", str(tmp_path / name),
            "--json",
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        ((subject, text),) = [(r["subject"], r["text"]) for r in json.loads(done.stdout) if r["level"] == "problem"]
        assert subject == "state"
        assert seen in text
        assert remedy in text


@pytest.mark.parametrize("end", ["server", "node"])
def test_10_a_key_that_others_can_read(cli: Cli, end: str, folder: Path, server: Server, tmp_path: Path) -> None:
    name = "server" if end == "server" else "node-0"
    keys = shutil.copytree(folder / "keys" / name, tmp_path / name)
    (keys / f"{end}.key").chmod(0o644)
    where = ["--state", tmp_path / "state"] if end == "server" else ["--server", server.address]
    subject, text = problem(cli, *where, "--keys", keys)
    assert subject == "secret"
    assert text.endswith(f"can be read by others (mode 644); run: chmod 600 {keys / f'{end}.key'}")


def test_11_a_missing_data_set(
    cli: Cli, folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(CONFIG.format(name="mnist"))
    (tmp_path / "data").mkdir()
    wanted = ["--config", tmp_path / "run.toml", "--data", tmp_path / "data"]
    for options in (node_options(server, folder), ["--keys", folder / "keys" / "server", "--state", folder / "state"]):
        subject, text = problem(cli, *options, *wanted)
        assert subject == "data"
        assert "fedcover data get mnist" in text
    assert problem(cli, *node_options(server, folder), "--data", tmp_path / "none.npz")[0] == "data"
    assert problem(cli, *node_options(server, folder), "--file", tmp_path / "none.py")[0] == "file"


def test_12_other_versions(cli: Cli, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    own = gate.installed_versions()
    monkeypatch.setattr(gate, "installed_versions", lambda: own | {"fedcover": "9.9.9"})  # in the server's process
    subject, text = problem(cli, *node_options(server, folder))
    assert subject == "versions"
    assert text.startswith(f"fedcover is {own['fedcover']} here and 9.9.9 on the server; install fedcover==9.9.9 here")
    monkeypatch.setattr(gate, "installed_versions", lambda: own | {"torch": "9.9.9"})
    level, text = examine(cli, *node_options(server, folder))["versions"]
    assert level == "warning"  # runs work
    assert "torch is" in text


def test_13_keys_that_do_not_belong_together(cli: Cli, folder: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", 1)
    keys = shutil.copytree(folder / "keys" / "server", tmp_path / "server")
    shutil.copy(tmp_path / "other" / "server" / "server.key", keys / "server.key")
    subject, text = problem(cli, "--keys", keys, "--state", tmp_path / "state")
    assert (subject, "is not the key of" in text) == ("keys", True)
    shutil.copy(tmp_path / "other" / "ca.crt", keys / "ca.crt")
    assert "was not signed by the authority" in problem(cli, "--keys", keys, "--state", tmp_path / "state")[1]


def test_versions_are_shown_only_to_registered_nodes(folder: Path, server: Server) -> None:
    from fedcover.deploy.processes.probe import check_server
    from fedcover.deploy.versions import VERSIONS_HEADER

    assert VERSIONS_HEADER not in check_server(server.address, folder / "keys" / "ca.crt")


def test_options_of_the_other_end_are_refused(cli: Cli) -> None:
    code, _, err = cli("deploy", "doctor", "--server", "127.0.0.1:1", "--insecure", "--port", "1")
    assert (code, "--port has no effect on a node" in err) == (2, True)
    code, _, err = cli("deploy", "doctor", "--insecure", "--client", "1")
    assert (code, "for a node, give --server" in err) == (2, True)
    assert cli("deploy", "doctor")[0] == 2


def test_without_encryption_a_node_sees_the_versions_too(cli: Cli, tmp_path: Path, marked: Marked) -> None:
    with closing(Server(None, tmp_path / "state")) as server:
        findings = examine(cli, "--server", server.address, "--insecure")
        assert findings["server"] == ("ok", f"it responds at {server.address}")
        assert findings["versions"][1].endswith("as on the server")
    assert os.listdir(tmp_path) == ["state"]
