"""The tables of a fleet's state, as the console and pages show them: each row from header to cell."""

from fedcover.deploy.status.fleet_status import FleetStatus
from fedcover.deploy.status.words import ago, megabytes_or_none, percent_or_none, text_or_none

Row = dict[str, str]


def node_rows(fleet: FleetStatus, now: float) -> list[Row]:
    """Return a row for each node: its state, and what it can afford."""
    return [
        {
            "node": node.name,
            "client": text_or_none(node.client),
            "state": node.state,
            "last seen": ago(node.last_seen, now),
            "capacity": text_or_none(node.capacity, "g"),
            "examples": text_or_none(node.examples, ","),
            "MB in": megabytes_or_none(node.received),
            "MB out": megabytes_or_none(node.sent),
        }
        for node in fleet.nodes
    ]


def round_rows(fleet: FleetStatus) -> list[Row]:
    """Return a row for each node of the newest run: its last round, and what is lost without it."""
    newest = fleet.newest
    if newest is None:
        return []
    planned = f" (round {newest.planned_round})" if newest.planned_round is not None else ""
    return [
        {
            "node": node.name,
            "seconds": text_or_none(node.seconds, ".1f"),
            "MB down": megabytes_or_none(node.down),
            "MB up": megabytes_or_none(node.up),
            "rejected": f"{node.rejections} of {newest.lookback}",
            f"lost without it{planned}": percent_or_none(node.uncovered_without),
        }
        for node in fleet.nodes
        if node.client is not None
    ]


def run_rows(fleet: FleetStatus, most: int) -> list[Row]:
    """Return a row for each of the newest runs."""
    return [
        {
            "run": run.id,
            "state": run.status.removeprefix("finished:"),
            "seconds": f"{run.seconds:.1f}",
            "from": run.since,
        }
        for run in fleet.runs[:most]
    ]


def headline(fleet: FleetStatus) -> str:
    """Return a line on the server and its nodes."""
    revoked = fleet.count("revoked")
    line = f"server at {fleet.address}: {fleet.count('online')} of {len(fleet.nodes) - revoked} nodes online"
    return f"{line}, {revoked} revoked" if revoked else line


def rejection_lines(fleet: FleetStatus) -> list[str]:
    """Return a line for each rejection of the last rounds."""
    names = {node.client: node.name for node in fleet.nodes}
    return [
        f"round {entry['round']}: client {entry['client']} ({names.get(entry['client'], 'no node now')}) is left out:"
        f" {entry['reason']}"
        for entry in (fleet.newest.rejections if fleet.newest else ())
    ]
