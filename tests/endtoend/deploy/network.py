"""A deployment in a network of its own: ``network.py FOLDER`` prints what it did as JSON.

Run it in a network namespace, which has only a loopback interface; a second address stands for that of the machine.
Every Python process notes the addresses that it connects and binds to, and all ports are scanned before and after.
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
LOOPBACK, OUTSIDE = "127.0.0.1", "192.0.2.1"
PORTS = range(1, 1 << 16)


def bring_loopback_up() -> None:
    """Bring the loopback interface of a new namespace up, and give it an address that is not loopback's."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, up)  # SIOCSIFFLAGS
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(OUTSIDE))
        fcntl.ioctl(sock, 0x8916, address)  # SIOCSIFADDR


def open_ports(host: str) -> list[int]:
    """Return the ports of TCP at which something listens, as a stranger finds them: by trying all."""
    found = []
    for port in PORTS:
        with closing(socket.socket()) as sock:
            sock.settimeout(2)
            try:
                sock.bind((host, 0))  # or the system may choose the port that is tried, and connect it to itself
                sock.connect((host, port))
            except OSError:
                continue
            if sock.getsockname() != sock.getpeername():
                found.append(port)
    return found


def scan() -> dict[str, list[int]]:
    """Return the open ports by address, and the sockets of UDP."""
    udp = [line for table in ("udp", "udp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {LOOPBACK: open_ports(LOOPBACK), OUTSIDE: open_ports(OUTSIDE), "udp": [len(udp)]}


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
    before = scan()
    with closing(Fleet(folder, 2, "--host", "0.0.0.0")) as fleet:
        for number in range(2):
            fleet.start_node(number, "--capacity", "1", "--share-labels")
        fleet.join()
        fleet.play(settings, "run")
        superlink = ServerAddress.read(fleet.state).control.rpartition(":")[2]
        scans = {"before": before, "running": scan()}
    scans["after"] = scan()
    print(json.dumps({"gate": fleet.port, "superlink": int(superlink), "notes": notes(record), "scans": scans}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
