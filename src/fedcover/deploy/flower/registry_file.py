"""The file in a run folder that maps nodes to clients.

It is separate from ``registry`` so that the command line can read it without importing Flower, which takes seconds.
"""

import json
from pathlib import Path

from fedcover.errors import InputError

FILE = "clients.json"
NODE = "node"
"""The key of a client's node; it is informative only, since node ids may change."""

CLAIMED = "claimed_capacity"
"""The key of the capacity that a client claimed, where it was cut; it is informative only."""


def clients_by_node(folder: Path) -> dict[int, int]:
    """Return the number of the client of each node, as recorded when the run last started or resumed."""
    path = folder / FILE
    try:
        return {int(row[NODE]): int(row["number"]) for row in json.loads(path.read_text()) if NODE in row}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is not a readable client registry ({error}); name the folder of a deployed run"
        ) from error
