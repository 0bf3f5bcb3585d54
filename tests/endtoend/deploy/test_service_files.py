"""The units and the container recipe in packaging/: their commands exist, and what they ask for works here."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fedcover.cli import app
from fedcover.deploy.address import free_ports
from fedcover.deploy.processes.keys import make_keys
from tests.endtoend.deploy.conftest import Marked, slow
from tests.endtoend.deploy.fleet import ROOT, wait_for
from tests.endtoend.deploy.namespaces import hardened

PACKAGING = ROOT / "packaging"
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))
DOCKERFILE = PACKAGING / "container" / "Dockerfile"
COMPOSE = yaml.safe_load((PACKAGING / "container" / "compose.yaml").read_text())
SETTINGS = """
rounds = 2
cohort = 1
[data]
name = "digits"
clients = 1
[local]
epochs = 1
[budgets]
code = "1"
"""


def unit_lines(unit: Path, key: str) -> list[str]:
    """Return the values of a key in a unit."""
    return re.findall(rf"^{key}=-?(.*)$", unit.read_text(), re.MULTILINE)


def check_command(words: list[str]) -> None:
    """Fail unless the command line accepts these words after `fedcover`; nothing is executed."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    context = command.make_context("fedcover", list(words))  # parses, and raises on an option that is unknown
    assert context.params


def expanded(unit: Path, line: str) -> list[str]:
    """Return a command of a unit after `fedcover`, with its variables as in the unit or in the example in it."""
    assignments = [word for text in unit_lines(unit, "Environment") for word in text.split()]
    assignments += re.findall(r"^#   (\w+=.*)$", unit.read_text(), re.MULTILINE)
    variables = dict(assignment.split("=", 1) for assignment in assignments)
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], line)
    program, *words = shlex.split(text)
    assert program == "/opt/fedcover/bin/fedcover"
    return words


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_hardened_and_their_commands_exist(unit: Path) -> None:
    for key, value in {
        "User": "fedcover", "ProtectSystem": "strict", "PrivateTmp": "yes", "NoNewPrivileges": "yes",
        "Restart": "on-failure", "CapabilityBoundingSet": "", "Type": "notify",
    }.items():  # fmt: skip
        assert unit_lines(unit, key) == [value], key
    for key in ("ExecStart", "ExecStartPre"):
        for line in unit_lines(unit, key):
            check_command(expanded(unit, line))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_no_failure_is_final(unit: Path) -> None:
    """A full disk, a clock that is not set yet or a name server that is down would otherwise need a visit."""
    assert unit_lines(unit, "StartLimitIntervalSec") == ["0"]
    assert unit_lines(unit, "RestartPreventExitStatus") == []
    assert "ExecStartPre=/" not in unit.read_text()  # with a dash, its failure is ignored


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze; Debian has it in systemd")
    installed = Path(sys.executable).parent / "fedcover"
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/fedcover/bin/fedcover", str(installed)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", str(copy)]  # 2.5 of 10
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_image_has_what_its_recipe_copies_and_is_not_root() -> None:
    text = DOCKERFILE.read_text()
    sources = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [project["readme"], *project["license-files"]]
    assert set(needed) <= set(sources)  # or the build fails
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == [*project["scripts"]]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]


@pytest.mark.parametrize("name", ["server", "node"])
def test_containers_are_hardened_and_their_commands_exist(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    check_command(service["command"])
    kind, program, *words = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "fedcover")
    check_command(words)
    mounted = {volume.split(":")[1] for volume in service["volumes"]} | {
        mount.split(":")[0] for mount in service["tmpfs"]
    }
    for option in ("--keys", "--state", "--data", "--out"):
        for command in (service["command"], words):
            if option in command:
                assert command[command.index(option) + 1] in mounted
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
    assert named <= set(COMPOSE["volumes"])


def test_an_option_that_is_unknown_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command(["deploy", "server", "--no-such-option"])


class Confined:
    """Commands as user 65534 with one folder to write to, in a file system that is otherwise read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tmp", "cache"):
            (folder / name).mkdir(parents=True)
        self.environment = {
            **os.environ, "HOME": str(folder), "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    @contextmanager
    def start(self, log: str, *words: str, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a command of fedcover, and end it."""
        command = hardened([sys.executable, "-m", "fedcover", *words], [self.folder])
        with open(self.folder / log, "wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**self.environment, **more},
                cwd=self.folder,
            )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, self.printed(log)
        finally:
            process.kill()
            process.wait()

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end."""
        return subprocess.run(
            hardened(command, [self.folder]), capture_output=True, text=True, timeout=240, env=self.environment,
            cwd=self.folder,
        )  # fmt: skip

    def fedcover(self, *words: str) -> str:
        """Run a command of fedcover that must succeed, and return what it prints."""
        done = self.run(sys.executable, "-m", "fedcover", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def printed(self, log: str) -> str:
        """Return what a command has printed."""
        return (self.folder / log).read_text()


@slow
@pytest.mark.timeout(600)
def test_a_fleet_runs_without_privileges_on_a_read_only_file_system(tmp_path: Path, marked: Marked) -> None:
    make_keys(tmp_path / "keys", 1)
    keys, confined, (port,) = tmp_path / "keys", Confined(tmp_path / "writable"), free_ports(1)
    done = confined.run("sh", "-c", f"id -u; touch {tmp_path}/x {ROOT}/x /usr/x ok; grep CapEff /proc/self/status")
    assert done.stdout.split() == ["65534", "CapEff:", "0000000000000000"]
    assert done.stderr.count("Read-only file system") == 3, done.stderr
    state = str(confined.folder / "state")
    server_options = ["--keys", str(keys / "server"), "--state", state, "--port", str(port)]
    node_options = ["--server", f"127.0.0.1:{port}", "--keys", str(keys / "node-0"), "--out"]
    node_options.append(str(confined.folder / "logs"))
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(confined.folder / "notify"))
        manager.settimeout(60)
        notify = {"NOTIFY_SOCKET": str(confined.folder / "notify")}
        with confined.start("server.out", "deploy", "server", *server_options, **notify) as server:
            wait_for(lambda: "start a client" in confined.printed("server.out") or server.poll() is not None, 90)
            assert manager.recv(100) == b"READY=1", confined.printed("server.out")
            assert manager.recv(100) == b"WATCHDOG=1"
            confined.fedcover("deploy", "doctor", *server_options, "--running")  # the health checks
            with confined.start("node.out", "deploy", "client", *node_options, "--client", "0") as node:
                wait_for(lambda: "joined" in confined.printed("node.out") or node.poll() is not None, 90)
                confined.fedcover("deploy", "doctor", *node_options)
                (confined.folder / "run.toml").write_text(SETTINGS)
                printed = confined.fedcover("deploy", "run", "run.toml", "--state", state, "--out", "runs/first")
                assert "round 2/2" in printed
                assert json.loads((confined.folder / "runs" / "first" / "summary.json").read_text())["rounds"] == 2
                assert "node-0" in confined.fedcover("deploy", "status", "--state", state)
                for process in (server, node):
                    lines = Path(f"/proc/{process.pid}/status").read_text()
                    assert re.search(r"CapEff:\s0+$", lines, re.MULTILINE)
    assert marked.left(10) == []
