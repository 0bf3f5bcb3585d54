"""Client-steps per second on one GPU of the kernels for chains of linear layers, for several sizes of tiles.

PYTHONPATH=src python -m benchmarks.chain_tiles
"""

import argparse
from itertools import pairwise

import torch

from benchmarks.gpu import bandwidth, seconds_of
from benchmarks.output import add_out, result_path, write_result
from fedcover.engines.vectorized.chain_stacks import AHEAD, ChainStacks, ChainTiles, Clients, Linear
from fedcover.structure.dropout import DropoutCall

FIRST = [
    ChainTiles(),
    ChainTiles(stages=3),
    ChainTiles(stages=4),
    ChainTiles(columns=16, stages=3),
    ChainTiles(rows=16, warps=1),
    ChainTiles(rows=16, warps=1, stages=3),
    ChainTiles(rows=64, warps=4, stages=3),
    ChainTiles(rows=64, warps=4, stages=3, registers=128),
]
"""Choices for the first layer."""
HEADS = [(32, 4), (64, 2), (128, 4)]
"""Columns and warps of the head, each with the default first layer."""
BATCH, EXAMPLES = 10, 12_000
BYTES_PER_ENTRY = 16
"""The least that a step moves for an entry: read and write it and its momentum, which marks pruned entries."""


def stacks_of(sizes: list[int], models: int, steps: int, tiles: ChainTiles) -> ChainStacks:
    """Return stacks of clients that are ready for their first step, on random data, with masks and dropout."""
    pairs = list(pairwise(sizes))
    layers = [Linear(f"{i}.weight", f"{i}.bias", a, b, relu=True) for i, (a, b) in enumerate(pairs)]
    layers = [x._replace(drop=DropoutCall(i, 0.5, (BATCH, x.outputs), torch.float32)) for i, x in enumerate(layers)]
    layers[-1] = layers[-1]._replace(relu=False, drop=None)
    rng = torch.Generator("cuda").manual_seed(0)
    data = (
        torch.randn(EXAMPLES, sizes[0], generator=rng, device="cuda"),
        torch.randint(sizes[-1], (EXAMPLES,), generator=rng, device="cuda"),
    )
    stacks = ChainStacks(layers, data, (steps, models, BATCH), tiles)
    stacks.index[:steps].copy_(torch.randint(EXAMPLES, (steps, models, BATCH), generator=rng, device="cuda"))
    theta = {n: torch.randn(s.shape[1:], generator=rng, device="cuda") * 0.03 for n, s in stacks.theta.items()}
    masks = [{n: torch.rand(t.shape, generator=rng, device="cuda") < 0.75 for n, t in theta.items()} for _ in range(4)]
    zeros, mask_of = torch.zeros(models, dtype=torch.long, device="cuda"), torch.arange(models, device="cuda") % 4
    stacks.start(Clients([theta], zeros, masks, mask_of, [0.01] * models, list(range(models))))
    return stacks


def measure(sizes: list[int], models: int, tiles: ChainTiles, speed: float) -> dict[str, object]:
    """Return the client-steps per second of replayed steps."""
    steps = 6 * AHEAD
    stacks = stacks_of(sizes, models, steps, tiles)
    compiling = seconds_of(lambda: stacks.take_steps(AHEAD, 0.5), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stacks.take_steps(AHEAD, 0.5)

    def loop() -> None:
        stacks.restart()
        for _ in range(0, steps, AHEAD):
            graph.replay()

    loop()
    per_second = models * steps / seconds_of(loop, 3)
    floor = speed / (BYTES_PER_ENTRY * sum(stack[0].numel() for stack in stacks.theta.values()))
    return {
        "models": models, **tiles._asdict(), "first_seconds": round(compiling, 2),
        "client_steps_per_second": round(per_second), "share_of_memory_floor": round(per_second / floor, 3),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser, "chain-tiles.json")
    parser.add_argument("--models", type=int, nargs="*", default=[420, 2280])
    parser.add_argument("--sizes", type=int, nargs="*", default=[784, 200, 10], help="inputs, hidden units and classes")
    args = parser.parse_args()
    speed, runs = bandwidth(), []
    choices = [*FIRST, *(ChainTiles(head_columns=columns, head_warps=warps) for columns, warps in HEADS)]
    for models in args.models:
        for tiles in dict.fromkeys(choices):
            try:
                row = measure(args.sizes, models, tiles, speed)
            except Exception as error:  # such as too much shared memory
                row = {"models": models, **tiles._asdict(), "error": f"{type(error).__name__}: {error}"[:200]}
            print(row, flush=True)
            runs.append(row)
            torch.cuda.empty_cache()
    result = {
        "command": "PYTHONPATH=src python -m benchmarks.chain_tiles",
        "what": "client-steps per second of an MLP on batches of 10, by the sizes of the kernels' tiles",
        "memory_floor": f"{BYTES_PER_ENTRY} bytes for each parameter and step at the measured bandwidth",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes_per_second": round(speed),
        "runs": runs,
    }
    write_result(result_path(parser, args, "chain-tiles.json"), result)


if __name__ == "__main__":
    main()
