"""Peak memory of the server in a round over Flower, by the size of the cohort.

python -m benchmarks.server_memory: plays one round of ResNet-18 (11.2 million parameters, group norms) for each cohort
and average, each in a process of its own. A second process stands for all clients: it answers every request with the
values that it received plus a little noise, through files as a SuperLink keeps them. Only the server is measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.app.message import make_message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity  # Flower sets it in the processes of a real run

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover.data import Device, DevicePopulation, Examples
from fedcover.deploy.flower.messages import body_content, body_of
from fedcover.deploy.flower.registry import ClientRegistry
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.flower.strategy import FedCover, FlowerEngine
from fedcover.deploy.processes.environment import SERVER
from fedcover.deploy.wire import open_frame, pack_frame
from fedcover.federation.runs import Run, RunSchedule
from fedcover.models.resnet import resnet18_gn

AGGREGATORS: dict[str, Callable[[], fc.Aggregator]] = {"mean": fc.mean, "median": fc.median}
EXAMPLES = 50
DONE = "done"


class FileGrid(Grid):
    """A grid whose messages are files in a folder."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes, self._sent = folder, nodes, dict[str, Message]()
        self.run_id = 1

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """There is no run."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse: a strategy creates its messages itself."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes, which are all online."""
        return range(1000, 1000 + self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Write requests to files."""
        keys = []
        for message in messages:
            key = f"{message.metadata.dst_node_id}"
            message.metadata.__dict__["_message_id"] = key
            message.metadata.__dict__["_src_node_id"] = 1
            draft = self._folder / f"{key}.draft"
            draft.write_bytes(body_of(message))
            draft.rename(self._folder / f"{key}.request")
            self._sent[key] = make_message(message.metadata, body_content(b""))
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Read the replies that are there."""
        replies = []
        for key in message_ids:
            path = self._folder / f"{key}.reply"
            if path.exists():
                replies.append(Message(body_content(path.read_bytes()), reply_to=self._sent.pop(key)))
                path.unlink()
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Refuse: fedcover does not use it."""
        raise NotImplementedError


def answer(folder: Path) -> None:
    """Answer the requests in a folder until the file ``done`` appears."""
    rng = np.random.default_rng(0)
    while not (folder / DONE).exists():
        for path in sorted(folder.glob("*.request")):
            head, parts = open_frame(path.read_bytes(), 1 << 40)
            path.unlink()
            new = {"kind": "reply", "examples": EXAMPLES, "train_loss": 1.0}
            reply = {key: head[key] for key in ("client", "round", "tensors")} | new
            trained = {}
            for name, part in parts.items():
                if name.startswith("theta/"):
                    values = np.frombuffer(part, np.float32)
                    noise = rng.standard_normal(len(values), dtype=np.float32)
                    trained[name] = (values + 0.01 * np.abs(values).mean() * noise).astype(np.float32).tobytes()
            draft = path.with_suffix(".part")
            draft.write_bytes(pack_frame(reply, trained))
            draft.rename(path.with_suffix(".reply"))
        time.sleep(0.02)


def play(cohort: int, aggregator: str) -> dict[str, Any]:
    """Play one round and return what was measured in this process."""
    torch.set_num_threads(1)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    torch.manual_seed(0)
    examples = Examples(torch.zeros(4, 3, 32, 32), torch.arange(4), classes=10)
    devices = [Device(number, EXAMPLES) for number in range(cohort)]
    code = ("1111223344" * cohort)[:cohort]
    federation = fc.Federation(
        fc.Task(resnet18_gn()), DevicePopulation(examples, devices), fc.weight_pruning(), fc.by_slot(code),
        fc.LocalSGD(1, 50, 0.01), cohort, 0, AGGREGATORS[aggregator](),
    )  # fmt: skip
    registry = ClientRegistry({device.number: device for device in devices}, closed=True)
    registry.node_of = {number: 1000 + number for number in range(cohort)}
    schedule = RunSchedule(1)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "messages"
        folder.mkdir()
        clients = subprocess.Popen([sys.executable, "-m", "benchmarks.server_memory", "--answer", str(folder)])
        run = Run(federation, None, lambda record: None, Path(home) / "run")
        try:
            run.open(schedule, FlowerEngine())
            before, start = peak_megabytes(), time.perf_counter()
            strategy = FedCover(run, schedule, registry, RoundRules(deadline=3600, quorum=1))
            history = strategy.run(FileGrid(folder, cohort))
            seconds = time.perf_counter() - start
        finally:
            run.close()
            (folder / DONE).touch()
            clients.wait()
    return {
        "cohort": cohort,
        "average": aggregator,
        "peak_mb_before": round(before),
        "peak_mb": round(peak_megabytes()),
        "seconds": round(seconds, 1),
        "seconds_of_average": round(history.last.seconds["aggregate"], 1),
    }


def peak_megabytes() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server_memory", description=__doc__)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 40, 160])
    parser.add_argument("--averages", nargs="+", choices=list(AGGREGATORS), default=list(AGGREGATORS))
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    add_out(parser, "server-memory.json")
    args = parser.parse_args()
    if args.answer:
        answer(args.answer)
        return
    if args.play:
        print(json.dumps(play(int(args.play[0]), args.play[1])))
        return
    rows = []
    for cohort in args.cohorts:
        for average in args.averages:
            command = [sys.executable, "-m", "benchmarks.server_memory", "--play", str(cohort), average]
            played = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | SERVER)
            rows.append(json.loads(played.stdout))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": "python -m benchmarks.server_memory",
        "machine": machine.facts(),
        "load": machine.load(),
        "parameters": sum(parameter.numel() for parameter in resnet18_gn().parameters()),
        "rounds": rows,
    }
    write_result(result_path(parser, args, "server-memory.json"), result)


if __name__ == "__main__":
    main()
