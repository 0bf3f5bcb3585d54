"""fedcover: whole rounds of a Federation (plan, coverage, training, aggregation, record) with one of its engines."""

import argparse
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace

from benchmarks.player import Player
from benchmarks.workload import WORKLOADS, Workload
from fedcover import Federation, LocalSGD, Policy, Task, data, full
from fedcover.budgets import Budgets
from fedcover.engines.base import Engine
from fedcover.federation.evaluate import evaluate
from fedcover.models import build


def find_engine(name: str, **options: object) -> Engine:
    """Return the engine with this name, built with those of the options that it accepts."""
    module = importlib.import_module(f"fedcover.engines.{name}")
    kind: Callable[..., Engine] = next(
        kind for kind in vars(module).values() if isinstance(kind, type) and getattr(kind, "name", None) == name
    )
    wanted = {key: value for key, value in options.items() if value is not None}
    return kind(**{key: value for key, value in wanted.items() if key in inspect.signature(kind).parameters})


def federation_of(
    work: Workload, split: data.Split, engine: Engine, policy: Policy | None = None, budgets: Budgets | None = None
) -> Federation:
    """Return the workload as a federation, by default of full models."""
    model = build(work.model, split.train.input_shape, split.train.classes, work.seed)
    return Federation(
        Task(model),
        data.iid(split.train, work.clients, seed=work.seed),
        policy or full(),
        budgets,
        local=LocalSGD(work.epochs, work.batch_size, work.lr, work.momentum),
        cohort=work.cohort,
        seed=work.seed,
        engine=engine,
    )


def main() -> None:
    """Play rounds until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--engine", default="serial")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--cohort", type=int)
    args = parser.parse_args()
    changes = {key: value for key in ("clients", "cohort") if (value := getattr(args, key)) is not None}
    work = replace(WORKLOADS[args.workload], **changes)
    engine = find_engine(args.engine, workers=args.workers)
    split = data.load(work.data)
    federation = federation_of(work, split, engine)
    state = federation.start()
    player = Player(lambda: evaluate(federation.task.model, federation.task.loss, state.theta, split.test).accuracy)
    player.ready()
    try:
        while player.wait():
            state, _ = federation.play_round(state)
            player.done()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
