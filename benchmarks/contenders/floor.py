"""The matrix products of a round and nothing else: no activations, losses, updates or copies.

``large`` multiplies many batches at once, which SGD cannot do, since each step needs the previous one. ``skinny`` keeps
the real shapes: a batch of 10 at a time, all clients of the cohort side by side. Convolutions are computed as products
on unfolded images, without the unfolding.
"""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.player import Player
from benchmarks.workload import WORKLOADS, Workload

# Outputs and inputs of each layer's weights, and the rows of one example: the positions of a convolution.
LAYERS = {
    "mlp": [(200, 784, 1), (10, 200, 1)],
    "lenet": [(6, 75, 28 * 28), (16, 150, 10 * 10), (120, 400, 1), (100, 120, 1), (10, 100, 1)],
}
AT_ONCE = {"mlp": 100, "lenet": 2}  # batches; more would leave the caches
Call = Callable[[], object]


def flops(work: Workload) -> float:
    """Return the floating-point operations of a round: forward, by weights, and by all inputs but the first layer's."""
    macs = sum(o * i * rows * (3 if layer else 2) for layer, (o, i, rows) in enumerate(LAYERS[work.model]))
    return 2.0 * macs * work.batch_size * work.steps


def products(outputs: int, inputs: int, rows: int, models: int, first: bool) -> list[Call]:
    """Return the products of a layer for several models side by side, convolutions in their fastest order."""
    x, w, dy = (torch.randn(models, *shape) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    y, dw, dx = torch.empty_like(dy), torch.empty_like(w), torch.empty_like(x)
    xt, yt = x.transpose(1, 2).contiguous(), y.transpose(1, 2).contiguous()
    forward: Call = lambda: torch.bmm(x, w.transpose(1, 2), out=y)  # noqa: E731
    if outputs < 20 < rows:
        forward = lambda: torch.bmm(w, xt, out=yt)  # noqa: E731
    calls: list[Call] = [forward, lambda: torch.bmm(dy.transpose(1, 2), x, out=dw)]
    return calls if first else [*calls, lambda: torch.bmm(dy, w, out=dx)]


def make_round(work: Workload, kind: str, cores: int) -> Call:
    """Return a function that computes the products of a round, in one independent thread per core."""
    at_once = AT_ONCE[work.model]
    models, batch = (work.cohort // cores, work.batch_size) if kind == "skinny" else (1, work.batch_size * at_once)
    repeats = round(work.steps * work.batch_size / (models * batch * cores))
    pool = ThreadPoolExecutor(cores)

    def share(calls: list[Call]) -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    shares: list[list[Call]] = [[] for _ in range(cores)]
    for calls in shares:
        for layer, (outputs, inputs, rows) in enumerate(LAYERS[work.model]):
            calls += products(outputs, inputs, rows * batch, models, first=layer == 0)
    return lambda: list(pool.map(share, shares))


def main() -> None:
    """Play rounds until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("kind", choices=("large", "skinny"))
    args = parser.parse_args()
    play = make_round(WORKLOADS[args.workload], args.kind, len(os.sched_getaffinity(0)))
    player = Player(lambda: None)
    player.ready()
    while player.wait():
        play()
        player.done()


if __name__ == "__main__":
    main()
