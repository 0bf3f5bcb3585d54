"""What a submitted run tells the server's app: every key is named in the app, sent, and read."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedcover.cli.deploy import submit
from fedcover.deploy.flower import apps
from fedcover.deploy.processes.flower_app import KEYS
from fedcover.deploy.processes.superlink_cli import Control, RunState
from tests.flower.loop import LoopGrid


class Noted(Control):
    """A connection that notes what is submitted, and says that it was completed."""

    def __init__(self) -> None:
        self.address = "nowhere:1"
        self.config: dict[str, Any] = {}
        self.named: dict[str, Any] = {}

    def run(self, app: str | Path, run_config: Mapping[str, Any]) -> int:
        self.config = dict(run_config)
        self.named = tomllib.loads((Path(app) / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        return 1

    def follow(self, run: int, *given: Any, **named: Any) -> RunState:
        return RunState(run, "finished:completed", "", 1.0, "")


@pytest.mark.parametrize("data", ["", "sets"])
def test_the_servers_data_folder_comes_to_its_app(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    control, given = Noted(), list[Any]()
    submit(control, "rounds = 3", tmp_path / "out", resume=True, quiet=True, data=data)
    assert set(control.config) == set(control.named) == set(KEYS)
    monkeypatch.setattr(apps, "play_config", lambda *said: given.extend(said))
    grid = LoopGrid({})
    apps.server(grid, Context(1, 1, {}, RecordDict(), control.config))
    assert given[0] is grid
    assert given[1].rounds == 3
    assert given[2:] == [tmp_path / "out", True, str(tmp_path / "sets") if data else None]
