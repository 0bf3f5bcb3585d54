"""What certificates add to a round: the server's seconds with and without them.

python -m benchmarks.certify --data FOLDER: MNIST, MLP, ten full clients of 600 examples, five epochs, engine processes.
"""

import argparse
import json
from statistics import median
from typing import Any

import fedcover as fc
from benchmarks.machine import facts
from benchmarks.output import add_out, result_path, write_result
from fedcover.models import build

WARM_UP = 1
"""Rounds at the start that are not counted: the first one builds what later ones reuse."""


def play(train: fc.Examples, rounds: int, certify: bool) -> fc.History:
    """Return the history of a run with the paper's MNIST settings."""
    clients = fc.data.iid(train, clients=100, seed=0)
    task = fc.Task(build("mlp", (1, 28, 28), 10, seed=0))
    federation = fc.Federation(task, clients, cohort=10, seed=0, engine=fc.Processes(), certify=certify)
    return federation.run(rounds)


def seconds_of(history: fc.History) -> dict[str, float]:
    """Return the median seconds of the server's part of a round, and of a whole round."""
    rounds = history.column("seconds")[WARM_UP:]
    server = median(seconds["plan"] + seconds["aggregate"] for seconds in rounds)
    return {"server": round(server, 4), "round": round(median(sum(seconds.values()) for seconds in rounds), 4)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--rounds", type=int, default=12)
    add_out(parser, "certify.json")
    args = parser.parse_args()
    train = fc.data.load("mnist", args.data).train
    plain, certified = play(train, args.rounds, certify=False), play(train, args.rounds, certify=True)
    certificate: dict[str, Any] = certified[1].certificate or {}
    result = {
        "command": f"python -m benchmarks.certify --rounds {args.rounds}",
        "machine": facts(),
        "plain": seconds_of(plain),
        "certified": seconds_of(certified),
        "after_two_rounds": {key: certificate[key] for key in ("step_size", "largest_step")},
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "certify.json"), result)


if __name__ == "__main__":
    main()
