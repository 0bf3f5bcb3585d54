"""What a run folder says about the newest rounds of a run and about its clients.

Files are read as they are, without checks of their version: a server shows what it can, and leaves out the rest.
"""

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fedcover.deploy.flower.coverage_plan import PLAN
from fedcover.deploy.flower.registry_file import CLAIMED, FILE, NODE
from fedcover.deploy.status.fleet_status import RoundOverview
from fedcover.deploy.text import one_line

LOOKBACK = 10
"""The rounds whose rejections are counted."""
SHOWN = 10
"""The most rejections that are listed."""
TAIL = 1 << 20
"""Bytes of a history that are read at most."""
SLOW = 3.0
"""A client is flagged if it takes this many times the median of its round."""
UNRELIABLE = 0.3
"""A client is flagged if more than this share of the last rounds, and more than one, rejected it or cut its change."""


@dataclass(frozen=True)
class ClientRounds:
    """A client of a run, as the run folder describes it."""

    client: int
    examples: int | None = None
    capacity: float | None = None
    seconds: float | None = None
    down: int | None = None
    up: int | None = None
    rejections: int = 0
    uncovered_without: float | None = None
    flag: str = ""


@dataclass(frozen=True)
class RunRounds:
    """The newest rounds of a run, and its clients by the id of their node."""

    newest: RoundOverview | None = None
    clients: dict[int, ClientRounds] = field(default_factory=dict)


class RunReader:
    """Reads a run folder again when its files have changed."""

    def __init__(self) -> None:
        self._seen: object = None
        self._rounds = RunRounds()

    def read(self, folder: str) -> RunRounds:
        """Return the newest rounds of the run in a folder; empty if it cannot be read."""
        if not folder:
            return RunRounds()
        path = Path(folder)
        signature = folder, *(_stamp(path / name) for name in (FILE, PLAN, "history.jsonl", "config.toml"))
        if signature != self._seen:
            try:
                self._rounds = read_rounds(path)
            except (LookupError, TypeError, ValueError, AttributeError):  # a damaged file ends no service
                self._rounds = RunRounds()
            self._seen = signature
        return self._rounds


def read_rounds(folder: Path) -> RunRounds:
    """Return the newest rounds of the run in a folder."""
    rows = [row for row in _json(folder / FILE, []) if isinstance(row, dict) and NODE in row]
    plan, records = _json(folder / PLAN, {}), last_records(folder / "history.jsonl")
    if not isinstance(plan, dict):
        plan = {}
    without = plan.get("without", {})
    last = _by_client(records[-1]) if records else {}
    rejected = [(record["round"], entry) for record in records for entry in record.get("rejected", [])]
    clients = {}
    for row in rows:
        number = int(row["number"])
        seen = last.get(number, {})
        rejections = len({index for index, entry in rejected if entry.get("client") == number})
        clients[int(row[NODE])] = ClientRounds(
            number, row.get("examples"), row.get("capacity"), seen.get("seconds"), seen.get("down"), seen.get("up"),
            rejections, without.get(str(number)), _flag(row, records, rejections, last),
        )  # fmt: skip
    return RunRounds(_overview(folder, records, rejected, plan) if records else None, clients)


def last_records(path: Path) -> list[dict[str, Any]]:
    """Return the last records of a history as plain values, without a line that is not complete yet."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines[:-1][-LOOKBACK:] if size <= TAIL else lines[1:-1][-LOOKBACK:]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("round"), int):
            records.append(record)
    return records


def _by_client(record: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the bytes and seconds of each client of a round."""
    cohort, wire = record.get("cohort", []), record.get("wire") or {}
    columns = {name: wire.get(name) for name in ("down", "up", "seconds")}
    return {
        client: {
            name: column[position]
            for name, column in columns.items()
            if isinstance(column, list) and len(column) == len(cohort)
        }
        for position, client in enumerate(cohort)
    }


def _flag(row: dict[str, Any], records: list[dict[str, Any]], rejections: int, last: dict[int, dict[str, Any]]) -> str:
    """Return what is unusual about a client; empty for nothing."""
    number, rounds, flags = int(row["number"]), len(records), []
    if row.get(CLAIMED) is not None:
        flags.append(f"claims a capacity of {row[CLAIMED]:g}, which was cut to {row['capacity']:g}")
    if _often(rejections, rounds):
        flags.append(f"rejected in {rejections} of {rounds} rounds")
    cut = sum(any(entry.get("client") == number for entry in record.get("limited", [])) for record in records)
    if _often(cut, rounds):
        flags.append(f"its change or weight was cut in {cut} of {rounds} rounds")
    seconds = {client: cells["seconds"] for client, cells in last.items() if cells.get("seconds")}
    others = [value for client, value in seconds.items() if client != number]
    if len(others) > 1 and seconds.get(number, 0.0) > SLOW * median(others):
        flags.append(f"{seconds[number] / median(others):.0f} times slower than the others")
    return ", ".join(flags)


def _often(times: int, rounds: int) -> bool:
    return times > 1 and times > UNRELIABLE * rounds


def _overview(
    folder: Path, records: list[dict[str, Any]], rejected: list[tuple[int, dict[str, Any]]], plan: dict[str, Any]
) -> RoundOverview:
    record = records[-1]
    wire = record.get("wire") or {}
    try:
        rounds = tomllib.loads((folder / "config.toml").read_text()).get("rounds")
    except (OSError, ValueError):
        rounds = None
    shown = [
        {"round": index, "client": entry.get("client"), "reason": one_line(entry.get("reason", ""))}
        for index, entry in reversed(rejected)
    ]
    return RoundOverview(
        record["round"],
        rounds if isinstance(rounds, int) else None,
        sum(record.get("seconds", {}).values()),
        record.get("accuracy"),
        record.get("gamma_min"),
        record.get("uncovered"),
        sum(wire.get("down", [])),
        sum(wire.get("up", [])),
        len(rejected),
        len(records),
        shown[:SHOWN],
        plan.get("round"),
        record.get("robust_to"),
    )


def _json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size
