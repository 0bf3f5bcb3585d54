"""Flower's simulation: every client is a node, trained in Ray's worker processes.

Ray takes over signals, threads and temporary folders of the process that starts it. A simulation therefore runs in a
process of its own (``simulation_process.py``) under a supervisor, and this process only follows it: whatever happens,
one folder is removed and no process is left.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedcover import errors
from fedcover._threads import usable_cores
from fedcover.config.build import build_federation, keeps_in
from fedcover.config.schema import Config
from fedcover.deploy.address import on_loopback, parse_address
from fedcover.deploy.own_files import absolute_files
from fedcover.deploy.processes.child import ChildProcess
from fedcover.deploy.processes.environment import flower_environment
from fedcover.deploy.processes.probe import TIMEOUT
from fedcover.deploy.processes.signals import StopSignal, stop_signals
from fedcover.errors import FedcoverError, InputError, check_extra
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.run_folder import load_history, read_settings
from fedcover.toml import to_toml

TICK = 0.1
"""Seconds between looks at the process of a simulation."""
LONGEST_HOME = 38
"""The most characters of a folder in which Ray's sockets have paths that the system accepts."""


def simulate(
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> History:
    """Play a run on Ray, on this machine or on a cluster, and return its history, bit-identical to the serial engine's.

    On a cluster (``flower.ray_address``) every machine needs fedcover, and the data sets at the same path. A stop
    signal (Ctrl-C, SIGTERM, SIGHUP) ends all processes and raises KeyboardInterrupt.

    Args:
        config: The settings.
        out: The run folder.
        resume: Continue the run in ``out``.
        folder: The folder of the data sets; None for the default.
        on_round: Called with the record of each round.
    """
    if resume and (out / "config.toml").exists() and read_settings(out).get("engine") == "flower":
        raise InputError(
            f"{out} was started on devices with their own examples and budgets; continue it with"
            f" `fedcover deploy run --resume`"
        )
    check_extra("flower", "a simulation on Flower", "flwr", "ray")
    ray_on_network = bool(config.flower.ray_address) and _on_network(config.flower.ray_address)
    keeps = keeps_in(out) if resume else None
    # Report invalid settings before Ray starts.
    federation, _ = build_federation(config.model_copy(update={"engine": "serial"}), folder, keeps)
    num_clients = len(federation.clients)
    if config.flower.clients not in (0, num_clients):
        raise InputError(
            f"flower.clients must be 0 or the number of clients, which is {num_clients}, since a simulation has all"
            f" clients from the start; got {config.flower.clients}; leave flower.clients out"
        )
    if config.data.partition == "natural":  # processes of the simulation read the number from the settings
        config = config.model_copy(update={"data": config.data.model_copy(update={"clients": num_clients})})
    order = {"settings": to_toml(config.complete()), "out": str(out), "resume": resume, "data": folder}
    with _deferred_signals() as stop, _home() as home:
        _run_process(order, home, process_environment(config, home, ray_on_network), stop, on_round)
    return load_history(out)


def _on_network(address: str) -> bool:
    """Return whether a cluster is on the network, not on loopback.

    Raise InputError if it cannot be reached, since Ray would wait for long.
    """
    host, port = parse_address(address)
    try:
        socket.create_connection((host, port), timeout=TIMEOUT).close()
    except OSError as error:
        raise InputError(
            f"no server responds at {address} ({error.strerror or error}); start Ray there, or leave"
            f" flower.ray_address out to start it here"
        ) from error
    return not on_loopback(host)


@contextmanager
def _deferred_signals() -> Iterator[StopSignal]:
    """Yield the stop signals that arrive, which then interrupt nothing; other threads than the main one get none."""
    if threading.current_thread() is not threading.main_thread():
        yield StopSignal()
        return
    with stop_signals(leave=False) as stop:
        stop.deferred = True
        yield stop


@contextmanager
def _home() -> Iterator[Path]:
    """Yield a temporary folder for all files of Flower and Ray."""
    short = len(tempfile.gettempdir()) <= LONGEST_HOME - len("/fedcover-sim-12345678")
    with tempfile.TemporaryDirectory(prefix="fedcover-sim-", dir=None if short else "/tmp") as name:
        yield Path(name)


def process_environment(config: Config, home: Path, ray_on_network: bool) -> dict[str, str]:
    """Return the environment of the process of a simulation; a local Ray keeps its files in ``home``."""
    environment = flower_environment(home, ray_on_network)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if not config.flower.ray_address:
        environment["RAY_TMPDIR"] = str(home)
    return environment


def _run_process(
    order: dict[str, Any],
    home: Path,
    environment: dict[str, str],
    stop: StopSignal,
    on_round: Callable[[RoundRecord], None],
) -> None:
    """Run the process of a simulation to its end, and handle what it reports; raise its error, if there is one."""
    events = home / "events.jsonl"
    events.touch()
    (home / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-P", "-m", "fedcover.deploy.flower.simulation_process", str(home)]
    completed, position = False, 0
    with closing(ChildProcess(command, home / "log", environment)) as process:
        ended = False
        while not ended:
            ended = process.wait(TICK) is not None
            stop.check()
            text = events.read_bytes()[position:]
            lines = text[: text.rfind(b"\n") + 1]
            position += len(lines)
            for line in lines.splitlines():
                completed = handle_event(json.loads(line), on_round) or completed
        if not completed:
            last = (process.printed().strip().splitlines() or ["it printed nothing"])[-1]
            raise FedcoverError(f"the simulation ended with code {process.code}: {last}; continue it with --resume")


def handle_event(event: dict[str, str], on_round: Callable[[RoundRecord], None]) -> bool:
    """Handle what the process of a simulation reports; return whether it is the end of the run.

    Raises:
        FedcoverError: If the event is an error.
    """
    kind, text = event["kind"], event["text"]
    if kind == "round":
        on_round(RoundRecord.from_json(text))
    elif kind == "completed":
        return True
    elif kind == "failed":  # an error that nobody expected, with its traceback
        raise RuntimeError(f"the simulation failed:\n{text}")
    elif issubclass(category := getattr(errors, kind), Warning):
        warnings.warn(text, category, stacklevel=3)
    else:
        raise category(text)
    return False


def backend_config(config: Config) -> Any:
    """Return Flower's options for Ray: the address of a cluster, or the number of cores of a local one."""
    address, cores = config.flower.ray_address, config.workers or usable_cores()
    cluster = {"address": address} if address else {"num_cpus": cores, "include_dashboard": False}
    return {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {**cluster, "log_to_driver": False}}


def simulated_client(config: Config, folder: str | None) -> Any:
    """Return a ClientApp for all clients of a simulation; it carries only settings, and loads data where it runs."""
    from flwr.app import Context

    from fedcover.deploy.flower.client import build_client_app, number_of
    from fedcover.deploy.node.configured_client import local_client
    from fedcover.deploy.node.local_client import LocalClient

    text = to_toml(absolute_files(config.complete()))

    def load(context: Context) -> LocalClient:
        return local_client(text, folder, number_of(context))

    return build_client_app(load, share_labels=True)
