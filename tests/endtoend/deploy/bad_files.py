"""A deployment with full disks and damaged files: ``bad_files.py FOLDER [DISK]`` prints what commands said as JSON.

DISK is a mounted disk that is too small for two rounds. Only commands of the command line are used.
"""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from fedcover.federation.run_folder import lock_folder, unlock_folder
from fedcover.federation.stored_checkpoints import newest_checkpoint
from tests.endtoend.deploy.fleet import Fleet, Program

SETTINGS = """
rounds = 2
cohort = 1
data = {name = "digits", clients = 1}
policy = {name = "NP"}
local = {epochs = 1}
budgets = {code = "1"}
"""


def main(folder: Path, disk: Path | None) -> None:
    """Start a server and a node, and try every fault."""
    config, plain = folder / "config.toml", folder / "plain"
    config.write_text(SETTINGS)
    results: dict[str, object] = {}

    def run(name: str, out: Path, *more: str) -> None:
        arguments = ["--state", str(fleet.state), "--out", str(out), *more]
        program = Program(folder / f"{name}.out", "deploy", "run", str(config), *arguments)
        code, history = program.process.wait(200), out / "history.jsonl"
        lines = history.read_text() if history.exists() else ""
        results[name] = {"code": code, "printed": program.printed, "history": lines}

    with closing(Fleet(folder, 1)) as fleet:
        fleet.start_node(0)
        fleet.join()
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
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
