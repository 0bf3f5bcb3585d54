"""Your own model and data on Flower: each node trains the part of the model that it can afford."""

from collections.abc import Sequence

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

import fedcover as fc
from fedcover.data import DevicePopulation
from fedcover.deploy.flower.client import client_app, number_of
from fedcover.deploy.flower.server import FederationSetup, play
from fedcover.federation.runs import RunSchedule

torch.manual_seed(0)
task = fc.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)))
split = fc.data.load("digits")
KEEPS = (1.0, 0.75, 0.5, 0.25)


def data(context: Context) -> fc.Examples:
    """Return the examples of this node: here a part of a data set, on a real device its own data."""
    nodes = int(context.run_config["nodes"])
    return fc.data.iid(split.train, nodes).examples_of(number_of(context) % nodes)


client = client_app(task, data)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    nodes, rounds = int(context.run_config["nodes"]), int(context.run_config["rounds"])

    def make(devices: Sequence[fc.data.Device]) -> FederationSetup:
        budgets = fc.by_client([KEEPS[number % len(KEEPS)] for number in range(len(devices))])
        clients = DevicePopulation(split.train, devices)
        return fc.Federation(task, clients, fc.neuron_pruning(), budgets, cohort=nodes), split.test, None

    history = play(grid, make, RunSchedule(rounds), least=nodes)
    print(f"accuracy {history.last.accuracy:.2%}, least coverage {history.gamma_min}", flush=True)
