"""The batches of many clients as one table: those of serial training, whatever else is in the table."""

import random

import pytest
import torch

import fedcover as fc
from fedcover.budgets import Budget
from fedcover.engines.vectorized import client_indices
from fedcover.engines.vectorized.batch_table import batch_table
from fedcover.engines.vectorized.client_indices import ClientIndices
from fedcover.training.client import Job, epoch_orders
from tests.conftest import small_net

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 10


def population(sizes: list[int], seed: int) -> fc.Population:
    total = sum(sizes)
    data = fc.Examples(torch.zeros(total, 1), torch.zeros(total, dtype=torch.long), classes=1)
    return fc.data.from_parts(data, torch.randperm(total, generator=torch.Generator().manual_seed(seed)).split(sizes))


def some_jobs(seed: int) -> list[Job]:
    """Return jobs of three runs in lockstep, some of which share a seed; every third case has equal clients."""
    rng = random.Random(seed)
    sizes = [20] * 4 if seed % 3 == 0 else [rng.choice([1, 3, 9, 10, 17, 30]) for _ in range(4)]
    populations, task = [population(sizes, n) for n in range(2)], fc.Task(small_net())
    local_steps = [None] if seed % 3 == 0 else [None, 1, 4, 7]
    recipes = [fc.LocalSGD(rng.choice([1, 3]), BATCH, local_steps=rng.choice(local_steps)) for _ in range(2)]
    rounds = [fc.Round(seed + 1, run_seed) for run_seed in (0, 0, 1)]
    return [
        Job(task, rng.choice(populations), fc.Client(n, n, Budget(1.0)), {}, {}, recipes[n % 2], this_round)
        for this_round in rounds
        for n in range(len(sizes))
    ]


def check(jobs: list[Job], indices: ClientIndices) -> None:
    table = batch_table(jobs, indices)
    shown = table.index.cpu().tolist()
    for client, job in enumerate(jobs):
        orders = epoch_orders(job, job.population.indices(job.client.id))
        batches = [rows.tolist() for order in orders for rows in order.split(BATCH)]
        ours = [[row for row in step[client] if row >= 0] for step in shown]
        assert ours == batches + [[]] * (len(shown) - len(batches))
        last = len(orders[-1].split(BATCH))
        assert table.last_epoch[:, client].nonzero().flatten().tolist() == list(
            range(len(batches) - last, len(batches))
        )
    assert table.full == all(job.examples % BATCH == 0 for job in jobs)


@pytest.mark.parametrize("seed", range(12))
def test_a_table_has_the_batches_of_serial_training(seed: int) -> None:
    jobs, indices = some_jobs(seed), ClientIndices(DEVICE)
    check(jobs[:3], indices)
    check(jobs, indices)  # with further clients
    check(jobs[5:] + jobs[:2], indices)


def test_indices_of_other_clients_are_dropped_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_indices, "MOST_KEPT", 200)
    indices = ClientIndices(DEVICE)
    for seed in range(8):
        check(some_jobs(seed), indices)
        assert len(indices.all) <= 400
