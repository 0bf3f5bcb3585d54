"""Flower's simulation: every client a node, trained in Ray's worker processes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcover.config import Config
from fedcover.errors import InputError
from fedcover.history import History, RoundRecord
from fedcover.settings import to_toml


def simulate(
    config: Config,
    out: Path,
    resume: bool = False,
    folder: str | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
) -> History:
    """Play a run on Ray, on this machine's cores; the result is the serial engine's, bit for bit."""
    try:
        from flwr.app import Context
        from flwr.serverapp import Grid, ServerApp
        from flwr.simulation import run_simulation
    except ImportError as error:
        raise InputError(
            "engine flower-sim needs Flower and Ray; install them: pip install 'fedcover[flower]'"
        ) from error
    from fedcover.flower.apps import play_config

    server, ended = ServerApp(), dict[str, Any]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            ended["history"] = play_config(grid, config, out, resume, folder, lambda line: None, on_round)
        except BaseException as error:
            ended["error"] = error
            raise

    cores = config.workers or len(os.sched_getaffinity(0))
    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "include_dashboard": False, "log_to_driver": False},
    }
    try:
        run_simulation(server, simulated_client(config, folder), config.data.clients, backend_config=backend)  # type: ignore[arg-type]
    except Exception as error:
        raise ended.get("error", error) from None
    if "history" not in ended:
        raise ended.get("error") or InputError("the simulation ended without a result; see Flower's lines above")
    history: History = ended["history"]
    return history


def simulated_client(config: Config, folder: str | None) -> Any:
    """A ClientApp for all clients of a simulation; it carries settings alone, and finds its data where it runs."""
    from flwr.app import Context

    from fedcover.flower.apps import device_of
    from fedcover.flower.client import Device, app_of, number_of

    text = to_toml(config.model_dump())

    def device(context: Context) -> Device:
        return device_of(text, folder, number_of(context))

    return app_of(device, share_labels=True)
