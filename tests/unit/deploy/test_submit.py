"""The run config of a submitted run: every key is named in the app, sent, and read."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedcover.cli.deploy.run import submit
from fedcover.deploy.flower import apps
from fedcover.deploy.processes.control import Control, RunState
from fedcover.deploy.processes.flower_app import KEYS
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
