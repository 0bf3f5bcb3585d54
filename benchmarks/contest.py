"""A contest: contenders in separate processes play rounds in turn, so that a noisy machine disturbs all alike."""

import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-bench" / "bin" / "python"
LIMIT = 600.0
"""Seconds after which a contender that does not reply has failed."""


@dataclass(frozen=True)
class Entry:
    """A contender: a module under benchmarks.contenders, its arguments, and the interpreter that runs it."""

    label: str
    module: str
    arguments: tuple[str, ...]
    peer: bool = False
    threads: int | None = None
    """Intra-op threads; None if the contender sets them itself."""


class Contender:
    """A running entry, which plays rounds on request."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry, self.log = entry, folder / f"{entry.module}-{len(list(folder.iterdir()))}.log"
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.facts: dict[str, Any] = {}
        self.error = ""
        start = time.perf_counter()
        command = [str(PEERS if entry.peer else sys.executable), "-m", f"benchmarks.contenders.{entry.module}"]
        environment = {**os.environ, **offline(folder)}
        if entry.threads is not None:
            environment["OMP_NUM_THREADS"] = str(entry.threads)
        with self.log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, *entry.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, self._process.stdout
        self.facts = self._read()
        self.startup = time.perf_counter() - start

    def ask(self, command: str) -> dict[str, Any]:
        """Return the reply to a command; an empty one once the contender has failed."""
        if self.error:
            return {}
        with contextlib.suppress(OSError):  # it has ended; _read records why
            os.write(self._commands.fileno(), f"{command}\n".encode())
        return self._read()

    def play(self) -> None:
        """Play one round, and record its seconds by the contender's own clock and its processor time."""
        before = processes.cpu_seconds(self._process.pid)
        if "seconds" in (reply := self.ask("play")):
            self.seconds.append(reply["seconds"])
            self.cpu.append(processes.cpu_seconds(self._process.pid) - before)

    def close(self) -> dict[str, float]:
        """End all its processes and return the memory that they used."""
        pid = self._process.pid
        memory = {}
        if not self.error:
            memory = {
                "peak_mb": processes.peak_mb(pid),
                "peak_mb_main": self.ask("memory").get("peak_kib", 0) / 1024,
                "proportional_mb": processes.proportional_mb(pid),
                "processes": len(processes.descend(pid)),
            }
        starts = {member: processes.started(member) for member in processes.descend(pid)}
        self._commands.close()
        self._replies.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.terminate()
        if forced := processes.end(starts):
            print(f"{self.entry.label}: {len(forced)} processes had to be ended", flush=True)
        self._process.wait()
        return memory

    def _read(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._replies], [], [], LIMIT)
        line = self._replies.readline() if ready else b""
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        last = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()][-1:]
        self.error = last[0][-200:] if last else "no reply"
        return {}


def offline(folder: Path) -> dict[str, str]:
    """Return environment variables that keep Flower and Ray offline, quiet and inside a folder."""
    return {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TMPDIR": str(folder),
    }


@dataclass
class Result:
    """Measurements of a contender in the rounds after the warm-up."""

    label: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Processor time of those rounds, summed over all processes."""
    first_round: float = 0.0
    startup: float = 0.0
    accuracy: float | None = None
    memory: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def median(self) -> float:
        """The median seconds of a round."""
        return statistics.median(self.seconds)


def run_contest(
    entries: Sequence[Entry], repeats: int, folder: Path, score_after: int = 0, longest: float = math.inf
) -> list[Result]:
    """Play one warm-up round and ``repeats`` timed rounds with each entry, in turn (A B C, B C A, ...).

    Args:
        entries: The contenders.
        repeats: The number of timed rounds.
        folder: A folder for logs and temporary files.
        score_after: The number of rounds after which accuracies are measured; 0 for never.
        longest: Seconds of a round after which a contender is left out.

    Returns:
        One result per entry; that of a contender that failed has the reason in ``error``.
    """
    running: list[Contender] = []
    try:
        for entry in entries:
            running.append(Contender(entry, folder))
            print(f"  {entry.label}: {running[-1].error or f'ready after {running[-1].startup:.1f} s'}", flush=True)
        accuracy: dict[int, float | None] = {}
        for turn in range(repeats + 1):
            shift = turn % len(running)
            for contender in [*running[shift:], *running[:shift]]:
                contender.play()
                if not contender.error and contender.seconds[-1] > longest:
                    contender.error = f"a round took {contender.seconds[-1]:.0f} s; the machine is too busy for it"
            if turn + 1 == score_after:
                accuracy = {id(contender): contender.ask("score").get("accuracy") for contender in running}
            times = ", ".join(f"{contender.seconds[-1]:.2f}" if contender.seconds else "-" for contender in running)
            print(f"  round {turn}: {times}", flush=True)
    finally:
        memory = [contender.close() for contender in running]
    return [
        Result(
            label=contender.entry.label,
            seconds=contender.seconds[1:],
            cpu=contender.cpu[1:],
            first_round=contender.seconds[0] if contender.seconds else 0.0,
            startup=contender.startup,
            accuracy=accuracy.get(id(contender)),
            memory=used,
            facts=contender.facts,
            error=contender.error,
        )
        for contender, used in zip(running, memory, strict=True)
    ]
