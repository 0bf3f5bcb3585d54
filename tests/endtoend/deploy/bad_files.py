"""A deployment with full disks and damaged files: ``bad_files.py FOLDER [DISK]`` prints what each command said, as JSON.

DISK is a mounted disk that is too small for two rounds. Only commands of the command line are used.
"""

import json
import subprocess
import sys
from pathlib import Path

from fedcover.deploy.address import free_ports
from fedcover.federation.run_folder import lock_folder, unlock_folder
from fedcover.federation.stored_checkpoints import newest_checkpoint

SETTINGS = """
rounds = 2
cohort = 1
data = {name = "digits", clients = 1}
policy = {name = "NP"}
local = {epochs = 1}
budgets = {code = "1"}
"""
FEDCOVER = [sys.executable, "-m", "fedcover", "deploy"]


def main(folder: Path, disk: Path | None) -> None:
    """Start a server and a node, and try every fault."""
    (folder / "config.toml").write_text(SETTINGS)
    subprocess.run([*FEDCOVER, "keys", str(folder / "keys"), "--nodes", "1"], check=True, stdout=subprocess.DEVNULL)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    results: dict[str, object] = {}

    def run(name: str, out: Path, *more: str) -> None:
        command = [*FEDCOVER, "run", str(folder / "config.toml"), "--server", address]
        command += ["--keys", str(folder / "keys" / "server"), "--out", str(out), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        history = out / "history.jsonl"
        results[name] = {
            "code": done.returncode,
            "printed": done.stdout + done.stderr,
            "history": history.read_text() if history.exists() else "",
        }

    with open(folder / "log", "w") as log:
        server = [*FEDCOVER, "server", "--keys", str(folder / "keys" / "server"), "--port", str(port)]
        client = [*FEDCOVER, "client", "--server", address, "--keys", str(folder / "keys" / "node-0"), "--client", "0"]
        programs = [
            subprocess.Popen([*program, "--out", str(folder / name)], stdout=log, stderr=log)
            for name, program in (("server", server), ("client", client))
        ]
        try:
            plain = folder / "plain"
            run("plain", plain)
            lock = lock_folder(plain)
            run("in use", plain, "--resume")
            unlock_folder(lock)
            newest = newest_checkpoint(plain)
            assert newest is not None, results
            newest.write_bytes(newest.read_bytes()[:-9])
            run("damaged", plain, "--resume")
            (plain / "config.toml").write_text("rounds = = 2")
            run("config", plain, "--resume")
            if disk is not None:
                run("full", disk / "run")
                subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
                run("space", disk / "run", "--resume")
        finally:
            for program in programs[::-1]:
                program.terminate()
            for program in programs:
                program.wait(60)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
