"""What went over the wire in a run on devices, client by client, and who was left out and why."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedcover.federation.history import RoundRecord
from fedcover.report import format as cells
from fedcover.report.loading import LoadedRun

MOST_ROWS = 1000
"""A table here has at most so many rows."""


@dataclass
class _Tally:
    """What one client came to; bytes of the full model are counted for each message that went."""

    rounds: int = 0
    left_out: int = 0
    down: int = 0
    full_down: int = 0
    up: int = 0
    full_up: int = 0


def client_rows(run: LoadedRun) -> list[dict[str, str]]:
    """One row a client: bytes that it got and sent beside those of full models; none if there was no network."""
    found: dict[int, _Tally] = {}
    for record in run.history:
        left = {one.get("client") for one in record.rejected}
        for client, down, up, full in _sent(record):
            tally = found.setdefault(client, _Tally())
            tally.rounds += 1
            tally.left_out += client in left
            tally.down += down
            tally.full_down += full if down else 0
            tally.up += up
            tally.full_up += full if up else 0
    return [
        {
            "client": f"{client}",
            "rounds": f"{one.rounds}",
            "left out": f"{one.left_out}",
            "MB down": cells.megabytes(one.down),
            "full down": cells.megabytes(one.full_down),
            "MB up": cells.megabytes(one.up),
            "full up": cells.megabytes(one.full_up),
            "share": cells.percent(_share(one), 1),
        }
        for client, one in sorted(found.items())
    ][:MOST_ROWS]


def left_out_rows(run: LoadedRun) -> list[dict[str, str]]:
    """One row for each time that a client was left out, with the reason."""
    return [
        {"round": f"{record.round}", "client": f"{one.get('client')}", "reason": f"{one.get('reason')}"}
        for record in run.history
        for one in record.rejected
    ][:MOST_ROWS]


def wire_of(record: RoundRecord) -> tuple[int, int, int] | None:
    """Bytes down, up and those of full models both ways, in a round over a network; None elsewhere."""
    rows = list(_sent(record))
    if not rows:
        return None
    down, up = sum(row[1] for row in rows), sum(row[2] for row in rows)
    return down, up, sum(row[3] * ((row[1] > 0) + (row[2] > 0)) for row in rows)


def _sent(record: RoundRecord) -> Iterator[tuple[int, int, int, int]]:
    """Client, bytes down, bytes up and the full model's, of everyone in a round's cohort."""
    wire = record.wire or {}
    down, up = wire.get("down"), wire.get("up")
    if isinstance(down, list) and isinstance(up, list):
        for client, got, sent in zip(record.cohort, down, up, strict=False):
            yield client, int(got), int(sent), int(wire.get("full", 0))


def _share(one: _Tally) -> float | None:
    whole = one.full_down + one.full_up
    return (one.down + one.up) / whole if whole else None
