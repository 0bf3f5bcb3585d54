"""Bytes on the wire of a run on devices, by client, and the clients that were left out."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedcover.federation.history import RoundRecord
from fedcover.report import format as cells
from fedcover.report.loading import LoadedRun

MOST_ROWS = 1000
"""The most rows of a table."""


@dataclass
class _Tally:
    """The totals of one client; the full model's bytes are counted once for each message sent."""

    rounds: int = 0
    left_out: int = 0
    down: int = 0
    full_down: int = 0
    up: int = 0
    full_up: int = 0


def client_rows(run: LoadedRun) -> list[dict[str, str]]:
    """Return one row per client: bytes received and sent beside those of full models; none without a network."""
    tallies: dict[int, _Tally] = {}
    for record in run.history:
        left_out = {entry.get("client") for entry in record.rejected}
        for client, down, up, full in _sent(record):
            tally = tallies.setdefault(client, _Tally())
            tally.rounds += 1
            tally.left_out += client in left_out
            tally.down += down
            tally.full_down += full if down else 0
            tally.up += up
            tally.full_up += full if up else 0
    return [
        {
            "client": f"{client}",
            "rounds": f"{tally.rounds}",
            "left out": f"{tally.left_out}",
            "MB down": cells.megabytes(tally.down),
            "full down": cells.megabytes(tally.full_down),
            "MB up": cells.megabytes(tally.up),
            "full up": cells.megabytes(tally.full_up),
            "share": cells.percent(_share(tally), 1),
        }
        for client, tally in sorted(tallies.items())
    ][:MOST_ROWS]


def left_out_rows(run: LoadedRun) -> list[dict[str, str]]:
    """Return one row for each time a client was left out, with the reason."""
    return [
        {"round": f"{record.round}", "client": f"{entry.get('client')}", "reason": f"{entry.get('reason')}"}
        for record in run.history
        for entry in record.rejected
    ][:MOST_ROWS]


def wire_of(record: RoundRecord) -> tuple[int, int, int] | None:
    """Return the bytes of a round down, up, and of full models both ways; None without a network."""
    rows = list(_sent(record))
    if not rows:
        return None
    down, up = sum(row[1] for row in rows), sum(row[2] for row in rows)
    return down, up, sum(row[3] * ((row[1] > 0) + (row[2] > 0)) for row in rows)


def _sent(record: RoundRecord) -> Iterator[tuple[int, int, int, int]]:
    """Yield the client, its bytes down and up, and the full model's bytes, for each client of a round."""
    wire = record.wire or {}
    down, up = wire.get("down"), wire.get("up")
    if isinstance(down, list) and isinstance(up, list):
        for client, received, sent in zip(record.cohort, down, up, strict=False):
            yield client, int(received), int(sent), int(wire.get("full", 0))


def _share(tally: _Tally) -> float | None:
    whole = tally.full_down + tally.full_up
    return (tally.down + tally.up) / whole if whole else None
