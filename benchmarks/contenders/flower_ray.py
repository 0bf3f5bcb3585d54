"""Flower's simulation on Ray: stock FedAvg, one virtual client per CPU core at a time.

Batches are slices of shuffled tensors, so that Flower is measured and not the DataLoader. Flower samples its own
cohorts; all clients have the same number of examples, so the work is the same.
"""

import os
import random
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.player import Player
from benchmarks.workload import Prepared

client_app, server_app = ClientApp(), ServerApp()
FOLDER = "BENCH_FOLDER"  # an environment variable, since Ray's workers import this module again


@cache
def prepared_arrays() -> tuple[Prepared, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the workload, with the training set mapped into memory: a client reads its own part."""
    prepared = Prepared.open(os.environ[FOLDER])
    images, labels, parts = (prepared.array(name, mapped=True) for name in ("train_images", "train_labels", "parts"))
    return prepared, images, labels, parts


def batches(images: Tensor, labels: Tensor, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return shuffled batches of tensors."""
    order = torch.randperm(len(labels))
    return zip(images[order].split(batch_size), labels[order].split(batch_size), strict=True)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    prepared, images, labels, parts = prepared_arrays()
    work = prepared.workload
    part = parts[int(context.node_config["partition-id"])]
    x, y = torch.from_numpy(images[part]), torch.from_numpy(labels[part])
    net = prepared.model()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr, momentum=work.momentum)
    for _ in range(work.epochs):
        for inputs, targets in batches(x, y, work.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg; the server-side evaluation hook delays each round until the contest requests it."""
    prepared, *_ = prepared_arrays()
    work = prepared.workload
    net = prepared.model()
    random.seed(0)

    def between(server_round: int, arrays: ArrayRecord) -> None:
        net.load_state_dict(arrays.to_torch_state_dict())
        player.done() if server_round else player.ready()
        if not player.wait():
            raise KeyboardInterrupt("no more rounds")

    player = Player(lambda: prepared.accuracy(net), packages=("flwr", "ray"))
    strategy = FedAvg(
        fraction_train=work.cohort / work.clients, fraction_evaluate=0.0, min_available_nodes=work.clients
    )
    strategy.start(grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=10**6, evaluate_fn=between)


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv[1]
    from benchmarks.contenders import flower_ray as app  # so that Ray's workers find the apps by a name they can import

    cores = len(os.sched_getaffinity(0))
    run_simulation(
        app.server_app,
        app.client_app,
        num_supernodes=Prepared.open(sys.argv[1]).workload.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False},
        },
    )
