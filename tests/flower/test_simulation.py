"""Flower's simulation on Ray: the serial engine's bits, resumable, and nothing left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcover.history import History

Cli = Callable[..., tuple[int, str, str]]
SETTINGS = [
    "--set", "data.name=digits", "--set", "data.clients=5", "--set", "cohort=4", "--set", "policy.name=NP",
    "--set", "budgets.code=1,0.75,0.5,0.25", "--set", "local.epochs=1",
]  # fmt: skip


def listening(mark: str) -> set[str]:
    """The addresses at which processes with a mark in their environment listen, as /proc writes them."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                sockets |= {os.readlink(one) for one in (process / "fd").iterdir()}
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in sockets:
                found.add(cells[1].rpartition(":")[0])
    return found


@pytest.mark.timeout(300)
def test_a_simulation_on_ray_is_the_serial_engines_and_resumes(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(
        "run", *SETTINGS, "--set", "rounds=2", "--set", "engine=serial", "--out", str(tmp_path / "a"), "-q"
    )
    assert code == 0, err
    parts = [(1, []), (2, ["--resume"])] if os.environ.get("FEDCOVER_SLOW") else [(2, list[str]())]
    for rounds, more in parts:
        run = [sys.executable, "-m", "fedcover", "run", *SETTINGS, "--set", f"rounds={rounds}", *more]
        mark = f"mark-{tmp_path.name}-{rounds}"
        process = subprocess.Popen(
            [*run, "--set", "engine=flower-sim", "--out", str(tmp_path / "b")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "FEDCOVER_TEST_MARK": mark},
        )  # fmt: skip
        seen: set[str] = set()
        while process.poll() is None:
            seen |= listening(mark)
            time.sleep(0.5)
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert f"after {rounds} rounds" in out
        assert not err.count("WARNING"), err
        assert seen <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}, seen
        assert seen
    assert History.load(tmp_path / "b" / "history.jsonl") == History.load(tmp_path / "a" / "history.jsonl")


def test_an_error_of_a_simulation_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    settings = [*SETTINGS, "--set", "engine=flower-sim", "--set", "rounds=1"]
    code, _, err = cli("run", *settings, "--set", "data.name=nothing", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "there is no data set named 'nothing'" in err
