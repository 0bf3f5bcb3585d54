"""The time of designing masks: for eleven million parameters, and as part of a round of ResNet-18.

python -m benchmarks.design [--examples 500]
"""

import argparse
import json
import platform
import time
from statistics import median

import torch

import fedcover as fc
from benchmarks.output import add_out, result_path, write_result
from fedcover.masks.design import frontier
from fedcover.masks.design.frontier import RankedList
from fedcover.masks.design.ranking import Ranking
from fedcover.models import build
from fedcover.policies.optimal import designed

KEEPS = (1.0, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)


def one_list(size: int, repeats: int = 5) -> dict[str, float]:
    """Return the seconds from weights and budgets to the frontier, and to the masks at its best point."""
    weights = torch.randn(size, generator=torch.Generator().manual_seed(0))
    budgets = tuple(int(keep * size) for keep in KEEPS)
    to_frontier, to_masks = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        ranking = Ranking(weights.square())
        best = frontier([RankedList(size, budgets, ranking.energy)]).best()
        to_frontier.append(time.perf_counter() - start)
        designed(ranking, budgets, best.gamma)
        to_masks.append(time.perf_counter() - start)
    return {
        "parameters": size,
        "seconds to the frontier": median(to_frontier),
        "seconds to the masks": median(to_masks),
    }


def resnet_round(examples: int) -> dict[str, float]:
    """Return the seconds of planning and of a whole round of ResNet-18, with designed masks and with weight pruning."""
    images = torch.randn(20 * examples, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    clients = fc.data.iid((images, torch.arange(len(images)) % 10), clients=20, seed=0)
    seconds: dict[str, float] = {"examples of a client": examples}
    for name, policy in (("design", fc.optimal_masks()), ("WP", fc.weight_pruning())):
        task = fc.Task(build("resnet18_gn", (3, 32, 32), 10, 0))
        federation = fc.Federation(
            task, clients, policy, fc.by_slot(list(KEEPS)), fc.LocalSGD(epochs=1, batch_size=50), engine=fc.Processes(2)
        )
        record = federation.run(1).last
        seconds[f"plan, {name}"] = record.seconds["plan"]
        seconds[f"round, {name}"] = sum(record.seconds.values())
    seconds["share of planning"] = seconds["plan, design"] / seconds["round, design"]
    return seconds


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser, "design.json")
    parser.add_argument("--examples", type=int, default=500, help="examples of each client in the round of ResNet-18")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "command": f"python -m benchmarks.design --examples {args.examples}",
        "machine": f"{platform.machine()}, one thread for planning, two workers for training",
        "torch": torch.__version__,
        "one list": one_list(11_173_962),
        "a round of ResNet-18": resnet_round(args.examples),
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "design.json"), result)


if __name__ == "__main__":
    main()
