"""fedcover over Flower's simulation on Ray: requests, checks and region averages in place of stock FedAvg."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.player import Player
from benchmarks.workload import WORKLOADS
from fedcover.config.build import build_federation
from fedcover.config.schema import Config, check_config
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.simulate import simulated_client
from fedcover.deploy.flower.strategy import FedCover, FlowerEngine
from fedcover.federation.evaluate import evaluate
from fedcover.federation.runs import Run, RunSchedule


def config_of(workload: str, policy: str, code: str) -> Config:
    """Return the workload as settings."""
    work = WORKLOADS[workload]
    recipe = {"epochs": work.epochs, "batch_size": work.batch_size, "lr": work.lr, "momentum": work.momentum}
    return check_config(
        {
            "seed": work.seed,
            "cohort": work.cohort,
            "data": {"name": work.data, "clients": work.clients},
            "model": {"name": work.model},
            "policy": {"name": policy},
            "budgets": {"code": code},
            "local": recipe,
        }
    )


def main() -> None:
    """Play rounds until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--policy", default="full")
    parser.add_argument("--code", default="1111111111")
    args = parser.parse_args()
    config, server = config_of(args.workload, args.policy, args.code), ServerApp()

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        registry = ClientRegistry()
        registry.gather(grid, config.data.clients, 120, lambda line: print(line, file=sys.stderr))
        federation, test = build_federation(config, devices=list(registry.devices.values()))
        schedule = RunSchedule(10**6, 10**6, 0, 10**6)

        assert test is not None
        task, test_set = federation.task, test

        def score() -> float | None:
            return evaluate(task.model, task.loss, run.state.theta, test_set).accuracy

        def between(record: object) -> None:
            player.done()
            if not player.wait():
                raise KeyboardInterrupt("no more rounds")

        player = Player(score, packages=("flwr", "ray"))
        with tempfile.TemporaryDirectory() as folder:
            run = Run(federation, None, between, Path(folder) / "run")
            run.open(schedule, FlowerEngine())
            player.ready()
            if player.wait():
                FedCover(run, schedule, registry, shrink=config.shrink).run(grid)

    run_simulation(
        server,
        simulated_client(config, None),
        num_supernodes=config.data.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
