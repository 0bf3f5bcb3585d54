"""Flower's simulation on Ray: the serial engine's bits, resumable, and nothing left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.config import check_config
from fedcover.flower import simulate as simulation
from fedcover.history import History
from fedcover.settings import to_toml

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


@pytest.mark.parametrize("many", [3, 9])
def test_a_simulation_waits_for_no_other_number_of_clients(many: int, cli: Cli, tmp_path: Path) -> None:
    settings = [*SETTINGS, "--set", "engine=flower-sim", "--set", f"flower.clients={many}"]
    code, _, err = cli("run", *settings, "--out", str(tmp_path / "x"))
    assert code == 2
    assert f"flower.clients is {many}, and a simulation has all 5 of data.clients" in err


def test_a_simulation_does_not_go_on_with_what_devices_began(cli: Cli, tmp_path: Path) -> None:
    """Their examples and what they can afford are theirs: simulated clients would be left out as other ones."""
    out = tmp_path / "x"
    out.mkdir()
    (out / "config.toml").write_text(to_toml({"engine": "flower", "budgets": {"keeps": [1.0, 0.5]}}))
    code, _, err = cli("run", *SETTINGS, "--set", "engine=flower-sim", "--out", str(out), "--resume")
    assert code == 2
    assert "was begun by devices, with examples and budgets of their own" in err


def test_a_simulation_that_goes_on_has_the_budgets_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"data": {"name": "digits", "clients": 2}, "cohort": 2, "budgets": {"code": "2x1e9", "unit": "parameters"}}
    out, seen = tmp_path / "x", list[object]()
    out.mkdir()
    (out / "config.toml").write_text(to_toml({"engine": "flower-sim", "budgets": {"keeps": [1.0, 1.0]}}))

    def gone(*given: object) -> object:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.Currency.budgets", gone)
    monkeypatch.setattr(simulation, "_simulated", lambda *given: seen.append(given) or {"history": History()})
    simulation.simulate(check_config({**raw, "engine": "flower-sim"}), out, resume=True)
    assert seen
    with pytest.raises(fc.InputError, match="the calibration is gone"):
        simulation.simulate(check_config({**raw, "engine": "flower-sim"}), tmp_path / "new")
