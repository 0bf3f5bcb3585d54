"""Flower's simulation: every client is a node, trained in Ray's worker processes."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcover._threads import usable_cores
from fedcover.config.build import build_federation, keeps_in
from fedcover.config.schema import Config
from fedcover.deploy.address import on_loopback, parse_address
from fedcover.deploy.processes.environment import use_flower_environment
from fedcover.deploy.processes.probe import TIMEOUT
from fedcover.errors import FedcoverError, InputError, check_extra
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.run_folder import read_settings
from fedcover.toml import to_toml


def simulate(
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> History:
    """Play a run on Ray, on this machine or on a cluster, and return its history, bit-identical to the serial engine's.

    On a cluster (``flower.ray_address``) every machine needs fedcover, and the data sets at the same path.

    Args:
        config: The settings.
        out: The run folder.
        resume: Continue the run in ``out``.
        folder: The folder of the data sets; None for the default.
        on_round: Called with the record of each round.
    """
    if config.flower.clients not in (0, config.data.clients):
        raise InputError(
            f"flower.clients must be 0 or data.clients, which is {config.data.clients}, since a simulation has all"
            f" clients from the start; got {config.flower.clients}; leave flower.clients out"
        )
    if resume and (out / "config.toml").exists() and read_settings(out).get("engine") == "flower":
        raise InputError(
            f"{out} was started on devices with their own examples and budgets; continue it with"
            f" `fedcover deploy run --resume`"
        )
    ray_on_network = bool(config.flower.ray_address) and _on_network(config.flower.ray_address)
    keeps = keeps_in(out) if resume else None
    # Report invalid settings before Ray starts.
    build_federation(config.model_copy(update={"engine": "serial"}), folder, keeps)
    with (
        tempfile.TemporaryDirectory(prefix="fedcover-sim-") as home,
        _environment(home, ray_on_network),
    ):
        outcome = _simulate(config, out, resume, folder, on_round)
    if "history" not in outcome:
        raise outcome.get("error") or FedcoverError("the simulation ended without a result; see Flower's lines above")
    history: History = outcome["history"]
    return history


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
def _environment(home: str, ray_on_network: bool) -> Iterator[None]:
    """Set the environment of Flower and Ray inside the block; they must be imported in it, not before."""
    before = dict(os.environ)
    use_flower_environment(home, ray_on_network)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _simulate(
    config: Config, out: Path, resume: bool, folder: str | None, on_round: Callable[[RoundRecord], None]
) -> dict[str, Any]:
    """Play the run and return its ``history`` or its ``error``."""
    check_extra("flower", "a simulation on Flower", "flwr", "ray")
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fedcover.deploy.flower.apps import play_config

    server, outcome = ServerApp(), dict[str, Any]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            outcome["history"] = play_config(grid, config, out, resume, folder, lambda line: None, on_round)
        except BaseException as error:
            outcome["error"] = error
            raise

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # failures are raised as errors instead
    try:
        run_simulation(
            server, simulated_client(config, folder), config.data.clients, backend_config=backend_config(config)
        )
    except Exception as error:
        outcome.setdefault("error", error)
    return outcome


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
    from fedcover.deploy.own_files import absolute_files

    text = to_toml(absolute_files(config.complete()))

    def load(context: Context) -> LocalClient:
        return local_client(text, folder, number_of(context))

    return build_client_app(load, share_labels=True)
