"""Orders to a SuperLink, by Flower's own command line: register nodes, start and stop runs, see how they stand.

``flwr`` exits with 0 for much that fails, so what it prints as JSON decides, never its exit status.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.deploy.processes.child import ChildProcess
from fedcover.deploy.processes.closing import Closing
from fedcover.deploy.processes.environment import flower_environment, program
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml, toml_value

HERE = "here"
PATIENCE = 90.0
"""Seconds that one call of ``flwr`` may take."""
LOST = 4
"""How often in a row a run's state may be unknown before following it is given up."""
KNOWN = "Public key already in use"


@dataclass(frozen=True)
class Node:
    """A registered node, and whether it is online."""

    id: int
    status: str
    since: str

    @property
    def online(self) -> bool:
        """Whether it is in touch with the SuperLink."""
        return self.status == "online"


@dataclass(frozen=True)
class RunState:
    """How a run stands: pending, starting, running, or finished:completed, finished:failed, finished:stopped."""

    id: int
    status: str
    details: str
    seconds: float
    since: str

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it got to its end."""
        return self.status == "finished:completed"


class Control(Closing):
    """A connection to a SuperLink at HOST:PORT over TLS, or in plain text without ``ca``; a context manager."""

    def __init__(self, address: str, ca: str | Path | None) -> None:
        self.address, self.ca = address, ca
        self._home = tempfile.TemporaryDirectory(prefix="fedcover-control-")
        self._folder = Path(self._home.name)
        self._environment = flower_environment(self._folder)
        trust = "insecure = true" if ca is None else f"root-certificates = {toml_value(str(Path(ca).absolute()))}"
        (self._folder / "config.toml").write_text(
            f"[superlink]\ndefault = {toml_value(HERE)}\n[superlink.{HERE}]\naddress = {toml_value(address)}\n{trust}\n"
        )

    def register(self, public_key: str | Path) -> int | None:
        """The id of the node with this public key, from now on known to the SuperLink; None if it was known before."""
        path = Path(public_key).absolute()
        if not path.is_file():
            raise InputError(f"there is no public key {path}; name a node.pub that `fedcover deploy keys` made")
        try:
            return int(self._call("supernode", "register", str(path), HERE)["node-id"])
        except FedcoverError as error:
            if KNOWN in str(error):
                return None
            raise

    def nodes(self) -> list[Node]:
        """All registered nodes."""
        rows = self._call("supernode", "list", HERE)["nodes"]
        return [
            Node(int(row["node-id"]), row["status"], row["online-at" if row["status"] == "online" else "offline-at"])
            for row in rows
        ]

    def wait_for_nodes(self, count: int, seconds: float) -> None:
        """Nothing as soon as so many nodes are online; an error after so many seconds."""
        until = time.monotonic() + seconds
        while (online := sum(node.online for node in self.nodes())) < count:
            if time.monotonic() > until:
                raise FedcoverError(f"{online} of {count} nodes are online after {seconds:.0f} s; start the others")
            time.sleep(0.3)

    def run(self, app: str | Path, run_config: Mapping[str, str | int | float | bool]) -> int:
        """The id of a new run of the app in a folder; its ``pyproject.toml`` must name each key of ``run_config``."""
        config = self._folder / "run-config.toml"
        config.write_text(to_toml(run_config))
        answer = self._call("run", str(Path(app).absolute()), HERE, "--run-config", str(config))
        return int(answer["run-id"])

    def runs(self) -> list[RunState]:
        """All runs, the newest first."""
        return [_state(row) for row in self._call("list", HERE)["runs"]]

    def state(self, run: int) -> RunState:
        """How a run stands."""
        rows = self._call("list", HERE, "--run-id", str(run))["runs"]
        if not rows:
            raise FedcoverError(f"the server at {self.address} knows no run {run}")
        return _state(rows[0])

    def stop(self, run: int) -> None:
        """Stop a run."""
        self._call("stop", str(run), HERE)

    def logs(self, run: int) -> ChildProcess:
        """A program that prints the log of a run's server side until the run ends."""
        command = [program("flwr"), "log", str(run), HERE, "--stream"]
        return ChildProcess(command, self._folder / f"run-{run}.log", self._environment)

    def follow(self, run: int, on_line: Callable[[str], None] = lambda line: None, every: float = 5.0) -> RunState:
        """How a run ended, its log's lines told on the way; its state is asked for ``every`` so many seconds."""
        lost = 0
        with self.logs(run) as log:
            while True:
                ask_at = time.monotonic() + every
                while time.monotonic() < ask_at and log.code is None:
                    _tell(log, on_line)
                    time.sleep(0.2)
                if log.code is not None:  # the run ended, or the server is gone
                    _tell(log, on_line)
                try:
                    state, lost = self.state(run), 0
                except FedcoverError:
                    lost += 1
                    if lost >= LOST:
                        raise
                    time.sleep(1.0)
                    continue
                if state.finished:
                    log.wait(3.0)
                    _tell(log, on_line)
                    return state
                if log.code is not None:
                    time.sleep(1.0)

    def close(self) -> None:
        """Remove what was written for the connection."""
        self._home.cleanup()

    def _call(self, *arguments: str) -> dict[str, Any]:
        what = " ".join(arguments[:2] if arguments[0] == "supernode" else arguments[:1])
        with subprocess.Popen(
            [program("flwr"), *arguments, "--format", "json"], text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environment, cwd=self._folder,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, errors = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                raise FedcoverError(f"`flwr {what}` got no answer from {self.address} in {PATIENCE:.0f} s") from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        answer = _json(printed)
        if answer is None or not answer.get("success"):
            told = str(answer.get("error-message", "")) if answer else errors.strip() or printed.strip()
            raise FedcoverError(f"`flwr {what}` at {self.address} failed: {_short(told)}")
        return answer


def _tell(log: ChildProcess, on_line: Callable[[str], None]) -> None:
    for line in log.lines():
        on_line(line)


def _json(text: str) -> dict[str, Any] | None:
    start = text.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else (None, 0)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _short(told: str) -> str:
    lines = [line.strip() for line in re.sub(r"[╭╮╰╯│─]", " ", told).splitlines()]
    kept = [line for line in lines if line and not re.match(r"Using SuperLink:|Listing all runs", line)]
    return " ".join(kept) or "it did not say why"


def _state(row: Mapping[str, Any]) -> RunState:
    details = "" if row["status-details"] == "N/A" else str(row["status-details"])
    return RunState(int(row["run-id"]), row["status"], details, float(row["elapsed"]), row["pending-at"])
