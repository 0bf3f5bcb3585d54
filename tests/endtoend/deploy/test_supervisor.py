"""The supervisor with small programs: exit codes, orphans, programs that ignore signals, and output."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy.processes.child import ChildProcess, format_line
from fedcover.deploy.processes.environment import flower_environment
from tests.endtoend.deploy.conftest import Marked


def start(script: str, folder: Path) -> ChildProcess:
    return ChildProcess(["bash", "-c", script], folder / "log", flower_environment(folder))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)])
def test_the_exit_code_is_the_programs(script: str, code: int, tmp_path: Path) -> None:
    with closing(start(script, tmp_path)) as program:
        assert program.wait(60) == code
    assert program.processes() == []


def test_orphans_in_their_own_sessions_end_with_the_program(tmp_path: Path, marked: Marked) -> None:
    with closing(start("(setsid setsid sleep 600 &) ; (setsid sleep 600 &) ; exit 3", tmp_path)) as program:
        assert program.wait(60) == 3
        assert marked.left() == []


def test_a_program_that_ignores_signals_is_killed(tmp_path: Path, marked: Marked) -> None:
    with closing(start("trap '' TERM; echo up; while :; do sleep 0.1; done", tmp_path)) as program:
        until = time.monotonic() + 60
        while not program.printed() and time.monotonic() < until:
            time.sleep(0.05)
        assert len(program.processes()) >= 2
    assert program.code == 137
    assert marked.left() == []


def test_all_processes_end_when_the_parent_does(tmp_path: Path, marked: Marked) -> None:
    """The parent ends without a signal to the supervisor, as by SIGKILL."""
    code = (
        "import os, sys; from fedcover.deploy.processes.child import ChildProcess;"
        "ChildProcess(['bash', '-c', 'setsid sleep 600 & sleep 600'], sys.argv[1], os.environ); os._exit(9)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, str(tmp_path / "log")]) == 9
    assert marked.left(10) == []


def test_a_full_disk_ends_no_program_and_leaves_none_behind(tmp_path: Path, marked: Marked) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    with closing(start("(setsid sleep 600 &) ; echo one; sleep 1; echo two; exit 3", tmp_path)) as program:
        assert program.wait(60) == 3
        assert marked.left() == []


REUSED = """
import os, subprocess
from fedcover.deploy.processes.supervisor import ExitCodes, LogFile, OutputForwarder, end_processes

child, codes = subprocess.Popen(["sleep", "600"]), ExitCodes()
codes[child.pid] = 0
end_processes([], 3.0, OutputForwarder(os.pipe()[0], LogFile(os.devnull, 1 << 20)), codes)
assert codes[child.pid] == 143, codes
"""


def test_a_process_with_the_number_of_an_ended_one_is_ended_too() -> None:
    """Linux uses process numbers again, and a server starts many processes in months."""
    subprocess.run([sys.executable, "-c", REUSED], check=True, timeout=60)


def test_a_log_is_renamed_at_its_size_limit(tmp_path: Path) -> None:
    script, environment = "for i in $(seq 2000); do echo line $i; sleep 0.0005; done", flower_environment(tmp_path)
    with closing(ChildProcess(["bash", "-c", script], tmp_path / "log", environment, 4096)) as program:
        assert program.wait(60) == 0
        text = program.printed()
    assert sorted(path.name for path in tmp_path.glob("log*")) in (["log", "log.1"], ["log.1"])
    both = (tmp_path / "log.1").read_text() + text
    assert both.endswith("line 1999\nline 2000\n")
    assert len(both) < 2 * (4096 + (1 << 16))
    assert text == "" or text == (tmp_path / "log").read_text()
    assert (tmp_path / "log.1").stat().st_mode & 0o777 == 0o600


def test_lines_about_requests_that_succeeded_are_not_logged(tmp_path: Path) -> None:
    stamp = "2026-11-15T21:10:07.019Z"
    routine = [
        f'{stamp} INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1 HTTP/1.1" 200',
        'INFO:     127.0.0.1:1 - "POST /v1 HTTP/1.1" 200 OK',
        f"{stamp} INFO [flwr] ControlServicer.ListRuns",
        "INFO :      ControlServicer.ListRuns",
    ]
    useful = [
        f'{stamp} INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1 HTTP/1.1" 500',
        f"{stamp} ERROR [flwr] ControlServicer.ListRuns failed",
        "a line of a program",
    ]
    (tmp_path / "lines").write_text("\n".join([*routine, *useful]) + "\n")
    with closing(start(f"cat {tmp_path / 'lines'}; head -c 200000 /dev/zero | tr '\\0' x", tmp_path)) as program:
        assert program.wait(60) == 0
        assert set(program.printed()) == {"x", "\n"}  # only the last part of the file
    lines = program.log.read_text().splitlines()
    assert lines[:3] == useful
    assert sum(map(len, lines[3:])) == 200000


def test_lines_are_complete_and_without_colours(tmp_path: Path) -> None:
    script = r"printf '\033[92mINFO \033[0m:      one\nERROR :     tw'; sleep 0.3; printf 'o\nlast'"
    with closing(start(script, tmp_path)) as program:
        program.wait(60)
        assert [format_line(line) for line in program.printed().splitlines()] == ["one", "error: two", "last"]
    assert b"\x1b" not in program.log.read_bytes()
    assert program.log.stat().st_mode & 0o777 == 0o600


def test_lines_of_no_use_to_users_are_dropped() -> None:
    assert format_line('2026-11-15T21:10:07.019Z INFO [uvicorn.access] 127.0.0.1:1 - "POST /v1 HTTP/1.1" 200') == ""
    assert format_line("2026-11-15T21:10:07.019Z ERROR [flwr] broken") == "error: broken"
    assert format_line("INFO :      ") == ""
    assert format_line("round 1: accuracy 0.5") == "round 1: accuracy 0.5"
