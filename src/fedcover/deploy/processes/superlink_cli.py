"""Commands to a SuperLink, by Flower's own command line: register nodes, start and stop runs, query their state.

``flwr`` exits with 0 for many failures, so the JSON that it prints decides, never its exit status.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.deploy.processes.child import ChildProcess
from fedcover.deploy.processes.environment import find_program, flower_environment
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml, toml_value

CONNECTION = "here"
"""The name of the connection in Flower's configuration."""
CALL_SECONDS = 90.0
"""Seconds that one call of ``flwr`` may take."""
MAX_FAILURES = 4
"""How often in a row a run's state may be unavailable before following it is given up."""
ALREADY_REGISTERED = "Public key already in use"


@dataclass(frozen=True)
class Node:
    """A registered node, and whether it is online."""

    id: int
    status: str
    since: str

    @property
    def online(self) -> bool:
        """Whether it is connected to the SuperLink."""
        return self.status == "online"


@dataclass(frozen=True)
class RunState:
    """The state of a run: pending, starting, running, or finished:completed, finished:failed, finished:stopped."""

    id: int
    status: str
    details: str
    seconds: float
    since: str

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether the run has ended with success."""
        return self.status == "finished:completed"


class Control:
    """A connection to the SuperLink at HOST:PORT over TLS, or in plain text without ``ca``.

    Close it, or use it with ``contextlib.closing``.
    """

    def __init__(self, address: str, ca: str | Path | None) -> None:
        self.address, self.ca = address, ca
        self._home = tempfile.TemporaryDirectory(prefix="fedcover-control-")
        self._folder = Path(self._home.name)
        self._environment = flower_environment(self._folder)
        trust = "insecure = true" if ca is None else f"root-certificates = {toml_value(str(Path(ca).absolute()))}"
        (self._folder / "config.toml").write_text(
            f"[superlink]\ndefault = {toml_value(CONNECTION)}\n[superlink.{CONNECTION}]\n"
            f"address = {toml_value(address)}\n{trust}\n"
        )

    def register(self, public_key: str | Path) -> int | None:
        """Register a public key and return the id of its node; None if it was registered before."""
        path = Path(public_key).absolute()
        if not path.is_file():
            raise InputError(f"there is no public key {path}; name a node.pub that `fedcover deploy keys` created")
        try:
            return int(self._call("supernode", "register", str(path), CONNECTION)["node-id"])
        except FedcoverError as error:
            if ALREADY_REGISTERED in str(error):
                return None
            raise

    def nodes(self) -> list[Node]:
        """Return all registered nodes."""
        rows = self._call("supernode", "list", CONNECTION)["nodes"]
        return [
            Node(int(row["node-id"]), row["status"], row["online-at" if row["status"] == "online" else "offline-at"])
            for row in rows
        ]

    def run(self, app: str | Path, run_config: Mapping[str, str | int | float | bool]) -> int:
        """Start a run of the app in a folder and return its id; the app's ``pyproject.toml`` must name all keys."""
        config = self._folder / "run-config.toml"
        config.write_text(to_toml(run_config))
        reply = self._call("run", str(Path(app).absolute()), CONNECTION, "--run-config", str(config))
        return int(reply["run-id"])

    def runs(self) -> list[RunState]:
        """Return the states of all runs, the newest first."""
        return [_run_state(row) for row in self._call("list", CONNECTION)["runs"]]

    def state(self, run: int) -> RunState:
        """Return the state of a run."""
        rows = self._call("list", CONNECTION, "--run-id", str(run))["runs"]
        if not rows:
            raise FedcoverError(
                f"there is no run {run} at the server {self.address}; `fedcover deploy status` lists the runs"
            )
        return _run_state(rows[0])

    def stop(self, run: int) -> None:
        """Stop a run."""
        self._call("stop", str(run), CONNECTION)

    def logs(self, run: int) -> ChildProcess:
        """Start a program that prints the log of a run's server side until the run ends, and return it."""
        command = [find_program("flwr"), "log", str(run), CONNECTION, "--stream"]
        return ChildProcess(command, self._folder / f"run-{run}.log", self._environment)

    def follow(self, run: int, on_line: Callable[[str], None] = lambda line: None, every: float = 20.0) -> RunState:
        """Wait until a run ends, pass the lines of its log to ``on_line``, and return its final state.

        Args:
            run: The id of the run.
            on_line: Called with each line of the log.
            every: Seconds between queries of the state while the log goes on; it ends with the run.
        """
        failures = 0
        with closing(self.logs(run)) as log:
            while True:
                self._forward_log(log, on_line, every)
                try:
                    state, failures = self.state(run), 0
                except FedcoverError:
                    failures += 1
                    if failures >= MAX_FAILURES:
                        raise
                    time.sleep(1.0)
                    continue
                if state.finished:
                    log.wait(3.0)
                    _forward_lines(log, on_line)
                    return state
                if log.code is not None:
                    time.sleep(1.0)

    @staticmethod
    def _forward_log(log: ChildProcess, on_line: Callable[[str], None], seconds: float) -> None:
        """Forward lines of a log for so many seconds, or until its program ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and log.code is None:
            _forward_lines(log, on_line)
            time.sleep(0.2)
        if log.code is not None:  # the run has ended, or the server is gone
            _forward_lines(log, on_line)

    def close(self) -> None:
        """Remove the files of the connection."""
        self._home.cleanup()

    def _call(self, *arguments: str) -> dict[str, Any]:
        name = " ".join(arguments[:2] if arguments[0] == "supernode" else arguments[:1])
        with subprocess.Popen(
            [find_program("flwr"), *arguments, "--format", "json"], text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self._environment, cwd=self._folder,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, errors = process.communicate(timeout=CALL_SECONDS)
            except subprocess.TimeoutExpired:
                raise FedcoverError(
                    f"`flwr {name}` got no reply from {self.address} within {CALL_SECONDS:.0f} s; see the server's log"
                ) from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        reply = _parse_json(printed)
        if reply is None or not reply.get("success"):
            message = str(reply.get("error-message", "")) if reply else errors.strip() or printed.strip()
            raise FedcoverError(f"`flwr {name}` at {self.address} failed: {_short_message(message)}")
        return reply


def _forward_lines(log: ChildProcess, on_line: Callable[[str], None]) -> None:
    for line in log.lines():
        on_line(line)


def _parse_json(text: str) -> dict[str, Any] | None:
    start = text.find("{")
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else (None, 0)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _short_message(text: str) -> str:
    lines = [line.strip() for line in re.sub(r"[╭╮╰╯│─]", " ", text).splitlines()]
    kept = [line for line in lines if line and not re.match(r"Using SuperLink:|Listing all runs", line)]
    return " ".join(kept) or "it printed no reason"


def _run_state(row: Mapping[str, Any]) -> RunState:
    details = "" if row["status-details"] == "N/A" else str(row["status-details"])
    return RunState(int(row["run-id"]), row["status"], details, float(row["elapsed"]), row["pending-at"])
