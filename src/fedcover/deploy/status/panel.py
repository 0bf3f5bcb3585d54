"""The state of a fleet as a part of a live page."""

import time
from pathlib import Path

from fedcover.deploy.status.fleet_status import FILE, FleetStatus, read_status
from fedcover.deploy.status.rows import Row, headline, node_rows, rejection_lines, round_rows
from fedcover.deploy.status.words import coverage_line, refusals_text, round_line
from fedcover.errors import FedcoverError
from fedcover.report.elements import prose, table

STATE_CLASSES = {"offline": "bad", "revoked": "bad"}


def is_server_folder(folder: Path) -> bool:
    """Return whether a folder is that of a server that publishes its state."""
    return (folder / FILE).is_file()


class StatusPanel:
    """Shows the state of the server with a folder.

    Args:
        folder: The server's folder.
    """

    title = "Nodes"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: Path | None = None

    def run_folder(self) -> Path | None:
        """Return the folder of the newest run; None if there is none. If the server has ended, it is the last one."""
        try:
            folders = (run.folder for run in read_status(self._folder).runs)
            self._run = next((Path(folder) for folder in folders if folder), self._run)
        except FedcoverError:
            pass
        return self._run

    def html(self) -> str:
        """Return the state as HTML."""
        try:
            fleet = read_status(self._folder)
        except FedcoverError as error:
            return f'<p class="warning">{prose(str(error))}.</p>'
        return "\n".join(self._parts(fleet))

    def _parts(self, fleet: FleetStatus) -> list[str]:
        parts = [f"<p>{prose(headline(fleet))}.</p>"]
        if fleet.problem:
            parts.append(f'<p class="warning">{prose(f"not up to date: {fleet.problem}")}.</p>')
        rows = _joined(node_rows(fleet, time.time()), round_rows(fleet))
        if rows:
            marks = {
                (number, "state"): STATE_CLASSES[row["state"]]
                for number, row in enumerate(rows)
                if row["state"] in STATE_CLASSES
            }
            parts.append(table(rows, "Nodes and their last round", marks, words=("state",)))
        if fleet.newest is not None:
            parts.append(f"<p>{prose(f'{round_line(fleet.newest)}; {coverage_line(fleet.newest)}')}.</p>")
        flags = [f"{node.name}: {node.flag}" for node in fleet.nodes if node.flag]
        if fleet.refusals:
            flags.append(f"requests refused at the gate: {refusals_text(fleet.refusals)}")
        parts += [f'<p class="warning">{prose(flag)}.</p>' for flag in flags]
        if lines := rejection_lines(fleet):
            parts.append("<ul>" + "".join(f"<li>{prose(line)}</li>" for line in lines) + "</ul>")
        return parts


def _joined(nodes: list[Row], rounds: list[Row]) -> list[Row]:
    """Return the rows of nodes with the columns of their last round; empty cells for nodes without one."""
    by_node = {row["node"]: row for row in rounds}
    headers = list(rounds[0])[1:] if rounds else []
    return [{**row, **{name: by_node.get(row["node"], {}).get(name, "") for name in headers}} for row in nodes]
