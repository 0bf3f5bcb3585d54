"""A soak of a deployment: a long run of eight nodes, with a random fault every ten rounds.

python -m tests.endtoend.deploy.soak [--rounds 200] [--minutes 60] [--seed 0]: every process is real, and every fault
happens to one. The run must end, with the model of the serial engine over the same answers, and leave nothing behind.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from fedcover.config.schema import parse_config
from fedcover.deploy.processes.keys import revoke_node, rotate_node
from fedcover.errors import FedcoverError
from fedcover.federation.stored_checkpoints import newest_checkpoint
from tests.endtoend.deploy.fleet import ROOT, Fleet, Program, children_named, wait_for
from tests.endtoend.deploy.test_runs import outcome, serial_run
from tests.laws.strategies import same
from tests.small_disk import available, on_small_disk

NODES = 8
CAPACITIES = (1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25)
DEADLINE = 12.0
EVERY = 10
"""Rounds between faults."""
SETTINGS = """
rounds = {rounds}
cohort = 8
[data]
name = "digits"
clients = 8
[policy]
name = "NP"
[local]
epochs = 1
[budgets]
code = "11111111"
[flower]
deadline = {deadline}
quorum = 0.25
tries = 20
gather = 60
"""
NODE = "tests.endtoend.deploy.soak_node"
FAULTS = (
    "node killed", "worker killed", "server killed", "SuperLink killed", "node stopped", "disk full",
    "checkpoint damaged", "clock step", "key revoked", "malicious reply",
)  # fmt: skip


class Soak:
    """A fleet, its run, and the faults that happen to them."""

    def __init__(self, fleet: Fleet, rounds: int, seed: int, disk: bool) -> None:
        self.fleet, self.rounds, self._rng = fleet, rounds, random.Random(seed)
        self.settings = SETTINGS.format(rounds=rounds, deadline=DEADLINE)
        self.folder = fleet.folder / "disk" / "run"
        self.faults: Counter[str] = Counter()
        self.resumed = 0
        self._kinds: list[str] = []
        self._all = [fault for fault in FAULTS if disk or fault != "disk full"]
        self._plan: dict[str, str] = {}
        self._write_plan()

    def start(self) -> None:
        """Start all nodes and the run."""
        for number in range(NODES):
            self.start_node(number)
        self.fleet.join(180)
        self.run = self._start_run()

    def start_node(self, number: int) -> None:
        """Start a node with its capacity, and its own clock."""
        environment = {
            "FEDCOVER_TEST_FAULTS": str(self.fleet.folder / "faults.json"),
            "FEDCOVER_TEST_CLOCK": str(self.fleet.folder / f"clock-{number}"),
        }
        options = ["--capacity", str(CAPACITIES[number]), "--share-labels", "--patience", "300"]
        self.fleet.start_node(number, *options, module=NODE, environment=environment)

    def _start_run(self, *options: str) -> Program:
        config = self.fleet.folder / "soak.toml"
        config.write_text(self.settings)
        arguments = [str(config), "--state", str(self.fleet.state), "--out", str(self.folder), *options]
        return Program(self.fleet.folder / "run.out", "deploy", "run", *arguments)

    def played(self) -> int:
        """Return the number of rounds in the history."""
        try:
            return (self.folder / "history.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def play(self, until: float) -> None:
        """Follow the run to its end, with a fault every ten rounds; resume it whenever it stops."""
        next_fault = EVERY
        while True:
            assert time.monotonic() < until, f"{self.played()} of {self.rounds} rounds: {self.run.printed[-2000:]}"
            if not self.run.running:
                if self.run.process.returncode == 0:
                    return
                self.resume()
            elif next_fault <= self.played() < self.rounds - 2:
                next_fault += EVERY
                self.inject()
            time.sleep(0.2)

    def resume(self) -> None:
        """Start the server if it has ended, and continue the run."""
        if not self.fleet.server.running:
            self.fleet.start_server()
        wait_for(self.fleet.registered, 60, "the server")
        for number, node in self.fleet.nodes.items():
            if not node.running:
                self.start_node(number)
        self.resumed += 1
        self.run = self._start_run(*(["--resume"] if self.folder.exists() else []))

    def inject(self) -> None:
        """Let the next fault happen; each kind happens once before any happens again."""
        if not self._kinds:
            self._kinds = self._rng.sample(self._all, len(self._all))
        kind, number = self._kinds.pop(), self._rng.randrange(1, NODES)
        print(f"round {self.played()}: {kind} (node {number})", flush=True)
        self.faults[kind] += 1
        getattr(self, "_" + kind.lower().replace(" ", "_"))(number)

    def _node_killed(self, number: int) -> None:
        self.fleet.nodes[number].end(signal.SIGKILL)
        time.sleep(2)
        self.start_node(number)

    def _worker_killed(self, number: int) -> None:
        for pid in self.fleet.children(number):
            os.kill(pid, signal.SIGKILL)

    def _server_killed(self, number: int) -> None:
        self.fleet.server.end(signal.SIGKILL)

    def _superlink_killed(self, number: int) -> None:
        for pid in children_named(self.fleet.server.process.pid, "flower-superlink"):
            os.kill(pid, signal.SIGKILL)

    def _node_stopped(self, number: int) -> None:
        process = self.fleet.nodes[number].process
        process.send_signal(signal.SIGSTOP)
        time.sleep(DEADLINE + 15)  # the server has it offline by then
        process.send_signal(signal.SIGCONT)

    def _disk_full(self, number: int) -> None:
        filler = self.folder.parent / "filler"
        try:
            with filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 14))
                    file.flush()
        except OSError:
            pass
        wait_for(lambda: not self.run.running, 120, "the end of the run on a full disk")
        assert "is full" in self.run.printed, self.run.printed[-1000:]
        filler.unlink()

    def _checkpoint_damaged(self, number: int) -> None:
        self.run.end(signal.SIGTERM, 60)
        path = newest_checkpoint(self.folder)
        assert path is not None
        content = bytearray(path.read_bytes())
        content[self._rng.randrange(len(content))] ^= 0xFF
        path.write_bytes(content)

    def _clock_step(self, number: int) -> None:
        ahead = self._rng.choice([-4000, -30, 20, 600])
        (self.fleet.folder / f"clock-{number}").write_text(str(ahead))

    def _key_revoked(self, number: int) -> None:
        revoke_node(self.fleet.folder / "keys", f"node-{number}")
        wait_for(lambda: not self.fleet.nodes[number].running, 60, "the end of the revoked node")
        rotate_node(self.fleet.folder / "keys", f"node-{number}")
        self.start_node(number)

    def _malicious_reply(self, number: int) -> None:
        fault = self._rng.choice(["NaN", "wrong shapes", "too large", "old round"])
        upcoming = self.played() + 2
        self._plan = {f"client {number} round {later}": fault for later in range(upcoming, upcoming + 3)}
        self._write_plan()

    def _write_plan(self) -> None:
        path = self.fleet.folder / "faults.json"
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(self._plan))
        draft.replace(path)


def check(soak: Soak) -> dict[str, Any]:
    """Compare the run with the serial engine over the same answers, and return what happened."""
    history, theta = outcome(soak.folder)
    assert len(history) == soak.rounds
    expected, expected_theta = serial_run(
        parse_config(soak.settings), [record.rejected for record in history], CAPACITIES
    )
    assert list(history) == expected
    assert same(theta, expected_theta)
    reasons = Counter(row["reason"].split(":")[0] for record in history for row in record.rejected)
    return {
        "rounds": len(history),
        "faults": dict(soak.faults),
        "resumed": soak.resumed,
        "left out": sum(reasons.values()),
        "reasons": dict(reasons.most_common(12)),
        "accuracy": history.last.accuracy,
    }


def main() -> None:
    """Soak, print and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.endtoend.deploy.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="an empty folder; a temporary one by default")
    args = parser.parse_args()
    if args.folder is None:
        with tempfile.TemporaryDirectory(prefix="fedcover-soak-") as name:
            disk = Path(name) / "disk"
            disk.mkdir()
            command = [sys.executable, "-m", "tests.endtoend.deploy.soak", *sys.argv[1:], "--folder", name]
            sys.exit(subprocess.call(on_small_disk(disk, "24m", command) if available() else command, cwd=ROOT))
    start = time.monotonic()
    (args.folder / "disk").mkdir(exist_ok=True)
    small = shutil.disk_usage(args.folder / "disk").total < 1 << 25
    with closing(Fleet(args.folder, NODES)) as fleet:
        soak = Soak(fleet, args.rounds, args.seed, small)
        soak.start()
        try:
            soak.play(start + 60 * args.minutes)
        except (AssertionError, FedcoverError):
            print(fleet.server.printed[-3000:], soak.run.printed[-3000:], sep="\n")
            raise
    result = check(soak) | {"minutes": round((time.monotonic() - start) / 60, 1)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
