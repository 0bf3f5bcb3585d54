"""The warden with programs of a few lines: exit codes, orphans, those that will not end, and what is printed."""

import os
import sys
import time
from pathlib import Path

import pytest

from fedcover.deploy.processes.child import ChildProcess, readable
from fedcover.deploy.processes.closing import Closing
from fedcover.deploy.processes.environment import flower_environment
from fedcover.deploy.processes.launch import SuperLink, SuperNode
from fedcover.deploy.processes.superlink_cli import Control
from tests.deploy.conftest import Marked


def start(script: str, folder: Path) -> ChildProcess:
    return ChildProcess(["bash", "-c", script], folder / "log", flower_environment(folder))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)])
def test_the_exit_code_is_the_programs(script: str, code: int, tmp_path: Path) -> None:
    with start(script, tmp_path) as program:
        assert program.wait(10) == code
    assert program.processes() == []


def test_orphans_in_sessions_of_their_own_end_with_the_program(tmp_path: Path, marked: Marked) -> None:
    with start("(setsid setsid sleep 600 &) ; (setsid sleep 600 &) ; exit 3", tmp_path) as program:
        assert program.wait(10) == 3
        assert marked.left() == []


def test_one_that_will_not_end_is_killed(tmp_path: Path, marked: Marked) -> None:
    with start("trap '' TERM; echo up; while :; do sleep 0.1; done", tmp_path) as program:
        until = time.monotonic() + 10
        while not program.lines() and time.monotonic() < until:
            time.sleep(0.05)
        assert len(program.processes()) >= 2
    assert program.code == 137
    assert marked.left() == []


def test_all_ends_when_the_starter_does(tmp_path: Path, marked: Marked) -> None:
    """A starter that ends without a word, as by SIGKILL: nobody asks the warden to end."""
    code = (
        "import os, sys; from fedcover.deploy.processes.child import Program;"
        "Program(['bash', '-c', 'setsid sleep 600 & sleep 600'], sys.argv[1], os.environ); os._exit(9)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, str(tmp_path / "log")]) == 9
    assert marked.left(10) == []


def test_lines_are_whole_and_without_colours(tmp_path: Path) -> None:
    with start(
        r"printf '\033[92mINFO \033[0m:      one\nERROR :     tw'; sleep 0.3; printf 'o\nlast'", tmp_path
    ) as program:
        program.wait(10)
        assert program.lines() == ["one", "error: two", "last"]
        assert program.lines() == []
    assert b"\x1b" not in program.log.read_bytes()
    assert program.log.stat().st_mode & 0o777 == 0o600


def test_what_tells_users_nothing_is_left_out() -> None:
    assert readable('2026-11-15T21:10:07.019Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1 HTTP/1.1" 200') == ""
    assert readable("2026-11-15T21:10:07.019Z ERROR [flwr] broken") == "error: broken"
    assert readable("INFO :      ") == ""
    assert readable("round 1: accuracy 0.5") == "round 1: accuracy 0.5"


def test_what_has_an_end_comes_to_it_whatever_happens() -> None:
    """Connections, programs, servers and nodes all end by the same few lines."""
    for kind in (Control, ChildProcess, SuperLink, SuperNode):
        assert issubclass(kind, Closing)
        assert not {"__enter__", "__exit__"} & {
            name for one in kind.__mro__ if one is not Closing for name in vars(one)
        }
    ended = []

    class Thing(Closing):
        def close(self) -> None:
            ended.append(self)

    with pytest.raises(KeyError), Thing() as thing:
        raise KeyError
    assert ended == [thing]
