"""Seconds per round of a deployment on this machine, and where they go.

python -m benchmarks.deployed_rounds [--rounds 20]: a server and three nodes as real processes on loopback, with TLS and
keys, train the MLP on 8x8 digits. The same run is then played with Flower's own SuperNodes, which pass the same gate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover.deploy.address import free_ports
from fedcover.deploy.processes.environment import find_program, flower_environment
from fedcover.deploy.processes.keys import make_keys
from fedcover.federation.history import History

NODES = 3
SETTINGS = """
rounds = {rounds}
[data]
name = "digits"
clients = 3
[policy]
name = "NP"
[budgets]
code = "111"
"""


@contextmanager
def started(commands: list[list[str]], folder: Path, ready: str) -> Iterator[None]:
    """Run commands while the block runs, once each has printed that it is ready."""
    processes, logs = [], []
    for number, command in enumerate(commands):
        log = folder / f"{Path(command[0]).name}-{number}-{time.monotonic_ns()}.log"
        with log.open("wb") as file:
            environment = flower_environment(folder / "home") | {"OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder))
        logs.append(log)
    try:
        until = time.monotonic() + 120
        while not all(ready in log.read_text() for log in logs):
            if time.monotonic() > until or any(process.poll() is not None for process in processes):
                raise SystemExit("\n".join(log.read_text() for log in logs))
            time.sleep(0.1)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def fedcover(*arguments: object) -> list[str]:
    """Return a command of fedcover."""
    return [sys.executable, "-m", "fedcover", "deploy", *map(str, arguments)]


def own_nodes(folder: Path, port: int) -> list[list[str]]:
    """Return the commands of fedcover's nodes."""
    joining = ("client", "--server", f"127.0.0.1:{port}", "--capacity", 0.5)
    return [
        fedcover(*joining, "--keys", f"keys/node-{n}", "--client", n, "--out", folder / f"node-{n}")
        for n in range(NODES)
    ]


def stock_nodes(folder: Path, port: int) -> list[list[str]]:
    """Return the commands of Flower's own SuperNodes, which serve the same run."""
    return [
        [
            find_program("flower-supernode"), "--superlink", f"127.0.0.1:{port}", "--root-certificates", "keys/ca.crt",
            "--auth-supernode-private-key", f"keys/node-{n}/node.key", "--host", "127.0.0.1", "--port", str(own),
            "--node-config", f"client={n} capacity=0.5",
        ]
        for n, own in enumerate(free_ports(NODES))
    ]  # fmt: skip


def seconds_of_rounds(folder: Path, rounds: int, name: str) -> list[float]:
    """Play a run and return the seconds of each round after the first, which loads data and traces the step."""
    config, out = folder / f"{name}.toml", folder / name
    config.write_text(SETTINGS.format(rounds=rounds))
    subprocess.run(fedcover("run", config, "--out", out, "--quiet"), cwd=folder, check=True)
    return [sum(record.seconds.values()) for record in History.load(out / "history.jsonl")][1:]


def parts(folder: Path, rounds: list[float], server: list[float]) -> list[dict[str, Any]]:
    """Return where the median round goes: what nodes do, what the server does, and waiting."""
    events = [
        json.loads(line)
        for n in range(NODES)
        for line in (folder / f"node-{n}" / "events.jsonl").read_text().splitlines()
    ]
    replies = [event for event in events if event["event"] == "reply" and event["kind"] == "train"]
    median = {
        key: statistics.median(event[key] for event in replies) for key in ("seconds", "seconds_pull", "seconds_push")
    }
    whole, own = statistics.median(rounds), statistics.median(server)
    rest = whole - own - sum(median.values())
    return [
        {"part": "a node receives its request (5 objects by HTTP)", "seconds": median["seconds_pull"]},
        {"part": "a node trains", "seconds": median["seconds"]},
        {"part": "a node sends its reply (5 objects by HTTP)", "seconds": median["seconds_push"]},
        {"part": "the server plans, averages and evaluates", "seconds": own},
        {"part": "the server sends and receives, and polls of 0.25 and 0.3 s", "seconds": rest},
        {"part": "the whole round", "seconds": whole},
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployed_rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds with fedcover's nodes")
    parser.add_argument("--stock-rounds", type=int, default=5, help="rounds with Flower's own SuperNodes; 0 for none")
    add_out(parser, "deployed-rounds.json")
    args = parser.parse_args()
    load = machine.load()
    with tempfile.TemporaryDirectory(prefix="fedcover-rounds-") as name:
        folder, (port,) = Path(name), free_ports(1)
        make_keys(folder / "keys", NODES)
        serving = fedcover("server", "--keys", "keys/server", "--port", port)
        with started([serving], folder, "start a client with"):
            with started(own_nodes(folder, port), folder, "joined"):
                rounds = seconds_of_rounds(folder, args.rounds, "own")
            records = list(History.load(folder / "own" / "history.jsonl"))[1:]
            server = [sum(record.seconds.values()) - record.seconds["train"] for record in records]
            stock: list[float] = []
            if args.stock_rounds:
                time.sleep(21)  # until Flower has the nodes offline
                with started(stock_nodes(folder, port), folder, "SuperNode ID"):
                    stock = seconds_of_rounds(folder, args.stock_rounds, "stock")
        table = parts(folder, rounds, server)
    result = {
        "command": " ".join(["python -m benchmarks.deployed_rounds", *sys.argv[1:]]),
        "machine": machine.facts(),
        "load": load,
        "seconds": rounds,
        "median": statistics.median(rounds),
        "seconds_stock": stock,
        "median_stock": statistics.median(stock) if stock else None,
        "table": table,
    }
    print(json.dumps({key: result[key] for key in ("median", "median_stock", "table")}, indent=1))
    write_result(result_path(parser, args, "deployed-rounds.json"), result)


if __name__ == "__main__":
    main()
