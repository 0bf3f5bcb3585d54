"""Flower's simulation: every client a node, trained in Ray's worker processes."""

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
from fedcover.deploy.bandwidth import address_of
from fedcover.deploy.processes.environment import use_flower_environment
from fedcover.deploy.processes.probe import SILENCE, on_loopback
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
    """Play a run on Ray, on this machine's cores or on a cluster; the result is the serial engine's, bit for bit.

    On a cluster (``flower.ray_address``) every machine needs fedcover and the data sets, the latter at the same path.
    """
    if config.flower.clients not in (0, many := config.data.clients):
        raise InputError(
            f"flower.clients is {config.flower.clients}, and a simulation has all {many} of data.clients, none of whom"
            f" comes late; leave flower.clients out"
        )
    if resume and (out / "config.toml").exists() and read_settings(out).get("engine") == "flower":
        raise InputError(
            f"{out} was begun by devices, with examples and budgets of their own; go on with"
            f" `fedcover deploy run --resume`"
        )
    elsewhere = bool(config.flower.ray_address) and _on_network(config.flower.ray_address)
    keeps = keeps_in(out) if resume else None
    # Before Ray starts, so that errors are reported at once.
    build_federation(config.model_copy(update={"engine": "serial"}), folder, keeps)
    with (
        tempfile.TemporaryDirectory(prefix="fedcover-sim-") as home,
        _environment(home, elsewhere),
    ):
        ended = _simulated(config, out, resume, folder, on_round)
    if "history" not in ended:
        raise ended.get("error") or FedcoverError("the simulation ended without a result; see Flower's lines above")
    history: History = ended["history"]
    return history


def _on_network(address: str) -> bool:
    """Whether a cluster is on the network, not on loopback; an error if nothing is there, since Ray waits for long."""
    host, port = address_of(address)
    try:
        socket.create_connection((host, port), timeout=SILENCE).close()
    except OSError as error:
        raise InputError(
            f"nothing answers at {address} ({error.strerror or error}); start Ray there, or leave"
            f" flower.ray_address out to have it started here"
        ) from error
    return not on_loopback(host)


@contextmanager
def _environment(home: str, on_network: bool) -> Iterator[None]:
    """Flower and Ray silent, on loopback unless asked, and in a folder of ours, from before they are imported."""
    before = dict(os.environ)
    use_flower_environment(home, on_network)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _simulated(
    config: Config, out: Path, resume: bool, folder: str | None, on_round: Callable[[RoundRecord], None]
) -> dict[str, Any]:
    """What came of the run: its history, or its error."""
    check_extra("flower", "a simulation on Flower", "flwr", "ray")
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fedcover.deploy.flower.apps import play_config

    server, ended = ServerApp(), dict[str, Any]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            ended["history"] = play_config(grid, config, out, resume, folder, lambda line: None, on_round)
        except BaseException as error:
            ended["error"] = error
            raise

    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what goes wrong comes back as an error
    try:
        run_simulation(server, simulated_client(config, folder), config.data.clients, backend_config=backend_of(config))
    except Exception as error:
        ended.setdefault("error", error)
    return ended


def backend_of(config: Config) -> Any:
    """What Flower is told of Ray: where it is, or with how many of this machine's cores to start it."""
    address, cores = config.flower.ray_address, config.workers or usable_cores()
    where = {"address": address} if address else {"num_cpus": cores, "include_dashboard": False}
    return {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {**where, "log_to_driver": False}}


def simulated_client(config: Config, folder: str | None) -> Any:
    """A ClientApp for all clients of a simulation; it carries settings alone, and finds its data where it runs."""
    from flwr.app import Context

    from fedcover.deploy.flower.apps import device_of
    from fedcover.deploy.flower.client import LocalClient, app_of, number_of

    text = to_toml(config.model_dump())

    def device(context: Context) -> LocalClient:
        return device_of(text, folder, number_of(context))

    return app_of(device, share_labels=True)
