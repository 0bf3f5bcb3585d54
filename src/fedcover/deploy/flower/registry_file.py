"""The file of a run's folder that says which client each node is; read without Flower."""

import json
from pathlib import Path

from fedcover.errors import InputError

FILE = "clients.json"
NODE = "node"
"""What it calls a member's node: for people, since a node's id decides nothing."""


def nodes_in(folder: Path) -> dict[int, int]:
    """For each node of a run the number of its client, as they were when the run last began to play."""
    path = folder / FILE
    try:
        return {int(one[NODE]): int(one["number"]) for one in json.loads(path.read_text()) if NODE in one}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is not a readable client registry ({error}); name the folder of a deployed run"
        ) from error
