"""Flower's simulation on Ray: bit-identical to the serial engine, resumable, and nothing left behind."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedcover as fc
from fedcover.config.build import build_federation
from fedcover.config.schema import check_config, parse_config
from fedcover.deploy.address import free_ports
from fedcover.deploy.flower import simulate as simulation
from fedcover.deploy.processes.environment import LOOPBACK, flower_environment
from fedcover.federation import checkpoint
from fedcover.federation.history import History
from fedcover.toml import to_toml
from tests.conftest import small_data, small_net
from tests.endtoend.deploy.conftest import SKIP, slow
from tests.laws.strategies import same

Cli = Callable[..., tuple[int, str, str]]
SLOW = (pytest.mark.slow, SKIP)
SETTINGS = [
    "--set", "data.name=digits", "--set", "data.clients=5", "--set", "cohort=4", "--set", "policy.name=NP",
    "--set", "budgets.code=1,0.75,0.5,0.25", "--set", "local.epochs=1", "--set", "data.augment=crop_flip",
]  # fmt: skip


def listening(mark: str) -> set[str]:
    """Return the addresses on which processes with a mark in their environment listen, as /proc writes them."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                sockets |= {os.readlink(file) for file in (process / "fd").iterdir()}
        except OSError:
            continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in sockets:
                addresses.add(cells[1].rpartition(":")[0])
    return addresses


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


OWN_CLIENTS = """
import fedcover as fc
def own(folder=None):
    train, test = fc.data.load("digits")
    return fc.data.iid(train, clients=4, seed=0), test
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "complement",
    [
        {"name": "kept"},
        pytest.param({"name": "frozen"}, marks=SLOW),
        pytest.param({"name": "quantized", "bits": 4}, marks=SLOW),
    ],
)
def test_clients_on_ray_see_what_clients_of_the_serial_engine_see(complement: dict[str, Any], tmp_path: Path) -> None:
    """Copies of the model stay on Flower's nodes between rounds, so they are sent once. Clients are natural ones."""
    (tmp_path / "own.py").write_text(OWN_CLIENTS)
    raw: dict[str, Any] = {"rounds": 2, "cohort": 4, "local": {"epochs": 1}, "policy": {"name": "FedRolex"}}
    raw |= {"data": {"name": f"{tmp_path / 'own.py'}:own", "partition": "natural"}}
    raw |= {"model": {"name": "mlp"}, "budgets": {"code": "1,0.75,0.5,0.25"}, "workers": 1}
    config = check_config({**raw, "complement": complement, "engine": "serial"})
    federation, test = build_federation(config)
    expected = federation.run(2, evaluate_on=test)
    history = simulation.simulate(config.model_copy(update={"engine": "flower-sim"}), tmp_path / "run")
    assert history == expected
    assert not any(record.rejected for record in history)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("round-*.safetensors"))[-1]
    assert expected.theta is not None
    assert same(checkpoint.load(newest)[0].theta, expected.theta)
    first, second = (sum((record.wire or {})["down"]) for record in history)
    assert (second < 0.8 * first) == (complement["name"] == "kept")


def test_an_error_of_a_simulation_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    settings = [*SETTINGS, "--set", "engine=flower-sim", "--set", "rounds=1"]
    code, _, err = cli("run", *settings, "--set", "data.name=nothing", "--out", str(tmp_path / "x"))
    assert code == 2
    assert "'nothing'" in err


def test_what_the_process_of_a_simulation_reports() -> None:
    """Rounds, warnings and errors are those of a run in this process."""
    rounds: list[fc.RoundRecord] = []
    record = fc.Federation(small_net(), fc.data.iid(small_data(), clients=4), cohort=2).run(1).last
    assert not simulation.handle_event({"kind": "round", "text": record.to_json()}, rounds.append)
    assert rounds == [record]
    with pytest.warns(fc.CheckpointWarning, match="a damaged one"):
        simulation.handle_event({"kind": "CheckpointWarning", "text": "a damaged one"}, rounds.append)
    with pytest.raises(fc.InputError, match="a full disk"):
        simulation.handle_event({"kind": "InputError", "text": "a full disk"}, rounds.append)
    with pytest.raises(RuntimeError, match="line 7"):
        simulation.handle_event({"kind": "failed", "text": "Traceback: line 7"}, rounds.append)
    assert simulation.handle_event({"kind": "completed", "text": ""}, rounds.append)


@pytest.mark.timeout(300)
def test_a_bad_file_during_a_simulation_is_one_sentence(tmp_path: Path) -> None:
    """The process of the simulation finds it, not this one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "strange").touch()
    raw = {"data": {"name": "digits", "clients": 2}, "cohort": 2, "budgets": {"code": "11"}, "workers": 1}
    config = check_config(raw)
    with pytest.raises(fc.InputError, match="is not empty and not a run folder"):
        simulation.simulate(config.model_copy(update={"engine": "flower-sim"}), tmp_path / "run")


@pytest.mark.parametrize("count", [3, 9])
def test_a_simulation_has_all_clients(count: int, cli: Cli, tmp_path: Path) -> None:
    settings = [*SETTINGS, "--set", "engine=flower-sim", "--set", f"flower.clients={count}"]
    code, _, err = cli("run", *settings, "--out", str(tmp_path / "x"))
    assert code == 2
    assert f"got {count}; leave flower.clients out" in err


def test_a_simulation_does_not_resume_a_run_of_devices(cli: Cli, tmp_path: Path) -> None:
    """Devices have their own examples and budgets, so simulated clients would be left out as different ones."""
    out = tmp_path / "x"
    out.mkdir()
    (out / "config.toml").write_text(to_toml({"engine": "flower", "budgets": {"keeps": [1.0, 0.5]}}))
    code, _, err = cli("run", *SETTINGS, "--set", "engine=flower-sim", "--out", str(out), "--resume")
    assert code == 2
    assert "fedcover deploy run --resume" in err


def test_a_resumed_simulation_has_the_budgets_that_it_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {"data": {"name": "digits", "clients": 2}, "cohort": 2, "budgets": {"code": "2x1e9", "unit": "parameters"}}
    out, seen = tmp_path / "x", list[object]()
    out.mkdir()
    (out / "config.toml").write_text(to_toml({"engine": "flower-sim", "budgets": {"keeps": [1.0, 1.0]}}))

    def fail(*args: object) -> object:
        raise fc.InputError("the calibration is gone")

    monkeypatch.setattr("fedcover.config.build.BudgetUnit.budgets", fail)
    monkeypatch.setattr(simulation, "_run_process", lambda *args: seen.append(args))
    monkeypatch.setattr(simulation, "load_history", lambda folder: History())
    simulation.simulate(check_config({**raw, "engine": "flower-sim"}), out, resume=True)
    assert seen
    with pytest.raises(fc.InputError, match="the calibration is gone"):
        simulation.simulate(check_config({**raw, "engine": "flower-sim"}), tmp_path / "new")


def test_ray_is_started_on_loopback_unless_a_cluster_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(*LOOPBACK, raising=False)
    seen: list[tuple[str | None, dict[str, object]]] = []

    def simulated(order: dict[str, Any], home: Path, environment: dict[str, str], *args: object) -> None:
        config = parse_config(order["settings"])
        seen.append((environment.get(*LOOPBACK), simulation.backend_config(config)["init_args"]))
        assert ("RAY_TMPDIR" in environment) == (not config.flower.ray_address)

    monkeypatch.setattr(simulation, "_run_process", simulated)
    monkeypatch.setattr(simulation, "load_history", lambda folder: History())
    raw = {"data": {"name": "digits", "clients": 2}, "cohort": 2, "budgets": {"code": "11"}, "workers": 3}
    near, far, tried = "127.0.0.1:6379", "cluster:6379", list[object]()

    def connect(address: object, timeout: float) -> socket.socket:
        tried.append(address)
        return socket.socket()

    monkeypatch.setattr("fedcover.deploy.flower.simulate.socket.create_connection", connect)
    for address in ("", near, far):
        simulation.simulate(check_config({**raw, "flower": {"ray_address": address}}), tmp_path / "x")
    assert tried == [("127.0.0.1", 6379), ("cluster", 6379)]
    assert seen == [
        ("0", {"num_cpus": 3, "include_dashboard": False, "log_to_driver": False}),
        ("0", {"address": near, "log_to_driver": False}),
        (None, {"address": far, "log_to_driver": False}),
    ]
    assert not set(LOOPBACK) & set(os.environ)


def test_a_cluster_that_does_not_respond_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    more = ["--set", "engine=flower-sim", "--set", f"flower.ray_address=127.0.0.1:{port}"]
    code, _, err = cli("run", *SETTINGS, *more, "--out", str(tmp_path / "x"))
    assert code == 2
    assert f"no server responds at 127.0.0.1:{port}" in err
    assert "leave flower.ray_address out" in err


@slow
@pytest.mark.timeout(300)
def test_a_simulation_on_a_cluster_is_the_serial_engines(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port)]
    ray += ["--node-ip-address", "127.0.0.1", "--num-cpus", "2", "--include-dashboard=false"]
    quiet = flower_environment(tmp_path / "home")
    with tempfile.TemporaryDirectory(prefix="fc-") as short:  # a path of Ray's sockets must be short
        cluster = subprocess.Popen([*ray, "--temp-dir", short], env=quiet, stdout=subprocess.PIPE, text=True)
        try:
            assert cluster.stdout is not None
            assert any("Ray runtime started" in line for line in cluster.stdout)
            for engine in ("serial", "flower-sim"):
                more = ["--set", f"engine={engine}", "--set", f"flower.ray_address=127.0.0.1:{port}"]
                run = ["run", *SETTINGS, "--set", "rounds=1", *more, "--out", str(tmp_path / engine), "-q"]
                done = subprocess.run(
                    [sys.executable, "-m", "fedcover", *run], capture_output=True, text=True, timeout=120
                )
                assert done.returncode == 0, done.stderr
        finally:
            cluster.terminate()
            cluster.communicate(timeout=60)
    assert History.load(tmp_path / "flower-sim" / "history.jsonl") == History.load(
        tmp_path / "serial" / "history.jsonl"
    )
