"""A deployment in a network of its own: ``network.py FOLDER`` prints what it did as JSON.

Run it in a network namespace, which has only a loopback interface. Every Python process notes the addresses that it
connects and binds to.
"""

import ast
import fcntl
import json
import os
import socket
import struct
import sys
from contextlib import closing, suppress
from pathlib import Path

from fedcover.deploy.processes.server import ServerAddress
from tests.endtoend.deploy.fleet import Fleet
from tests.endtoend.deploy.test_runs import SETTINGS

RECORDER = Path(__file__).parent / "recorder"


def bring_loopback_up() -> None:
    """Bring the loopback interface of a new namespace up."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, up)  # SIOCSIFFLAGS


def notes(folder: Path) -> list[list[str]]:
    """Return kind, host, port and command of each note, once."""
    rows = set()
    for line in "".join(path.read_text() for path in folder.iterdir()).splitlines():
        kind, where, command = line.split("\t")
        with suppress(ValueError, SyntaxError):
            address = ast.literal_eval(where)
            if isinstance(address, tuple) and len(address) >= 2:
                rows.add((kind, str(address[0]), str(address[1]), command))
            elif address:
                rows.add((kind, str(address), "", command))
    return [list(row) for row in sorted(rows)]


def main(folder: Path) -> None:
    """Play a run of two nodes, and print the addresses that were used."""
    bring_loopback_up()
    record = folder / "network"
    record.mkdir()
    os.environ["FEDCOVER_TEST_NETWORK"] = str(record)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(RECORDER), os.environ.get("PYTHONPATH", "")])
    settings = SETTINGS.format(rounds=2, deadline=60).replace("cohort = 4", "cohort = 2") + "clients = 2\n"
    settings = settings.replace('code = "1111"', 'code = "11"')
    with closing(Fleet(folder, 2)) as fleet:
        for number in range(2):
            fleet.start_node(number, "--capacity", "1", "--share-labels")
        fleet.join()
        fleet.play(settings, "run")
        superlink = ServerAddress.read(fleet.state).control.rpartition(":")[2]
    print(json.dumps({"gate": fleet.port, "superlink": int(superlink), "notes": notes(record)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
