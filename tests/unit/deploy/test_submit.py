"""How a run is submitted: it waits for a server that starts, and every key of its config is named, sent and read."""

import json
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedcover.cli.deploy.run import submit
from fedcover.deploy.flower import apps
from fedcover.deploy.processes.control import Control, RunState
from fedcover.deploy.processes.flower_app import KEYS
from fedcover.deploy.processes.server import ADDRESS_FILE, ServerAddress
from tests.unit.deploy.loop import LoopGrid


class RecordingControl(Control):
    """A connection that records what is submitted, and reports that it was completed."""

    def __init__(self) -> None:
        self.address = "nowhere:1"
        self.config: dict[str, Any] = {}
        self.named: dict[str, Any] = {}

    def run(self, app: str | Path, run_config: Mapping[str, Any]) -> int:
        self.config = dict(run_config)
        self.named = tomllib.loads((Path(app) / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        return 1

    def follow(self, run: int, *args: Any, **kwargs: Any) -> RunState:
        return RunState(run, "finished:completed", "", 1.0, "")


@pytest.mark.parametrize("data", ["", "sets"])
def test_the_servers_app_receives_its_data_folder(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    control, received = RecordingControl(), list[Any]()
    submit(control, "rounds = 3", tmp_path / "out", resume=True, quiet=True, data=data)
    assert set(control.config) == set(control.named) == set(KEYS)
    monkeypatch.setattr(apps, "play_config", lambda *args: received.extend(args))
    grid = LoopGrid({})
    apps.server(grid, Context(1, 1, {}, RecordDict(), control.config))
    assert received[0] is grid
    assert received[1].rounds == 3
    assert received[2:] == [tmp_path / "out", True, str(tmp_path / "sets") if data else None]


def test_a_run_waits_for_a_server_that_starts(tmp_path: Path) -> None:
    address = ServerAddress("127.0.0.1:1", "127.0.0.1:2", "", 1)

    def start() -> None:
        (tmp_path / "draft").write_text(json.dumps(asdict(address)))
        (tmp_path / "draft").rename(tmp_path / ADDRESS_FILE)

    starting = threading.Timer(0.5, start)
    starting.start()
    assert ServerAddress.wait(tmp_path, 30) == address
    starting.join()


def test_without_a_server_a_run_is_one_sentence(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 1")
    command = ["deploy", "run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--wait"]
    code, out, err = cli(*command, "0.3", "--state", str(tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert f"no server has the folder {tmp_path}; start one with" in err
    assert "waiting" in out
