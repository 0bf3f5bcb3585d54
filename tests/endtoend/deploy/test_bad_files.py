"""Full disks, damaged files and a folder in use during a deployment: one sentence, and the run can be continued."""

import json
import subprocess
import sys
from typing import Any

import pytest

from fedcover.federation.history import History
from tests.endtoend.deploy import bad_files
from tests.endtoend.deploy.conftest import SKIP, Marked
from tests.endtoend.deploy.fleet import ROOT
from tests.small_disk import available, on_small_disk

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, SKIP]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> dict[str, dict[str, Any]]:
    """Return what each command said; without small disks on this machine, not about full ones."""
    folder, disk = tmp_path_factory.mktemp("bad"), tmp_path_factory.mktemp("disk")
    script = [sys.executable, "-m", bad_files.__name__, str(folder)]
    command = on_small_disk(disk, "140k", [*script, str(disk)]) if available() else script
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert marked.left(10) == []
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def rounds(result: dict[str, Any]) -> History:
    return History.from_lines(result["history"])


def check_refused(result: dict[str, Any], *parts: str) -> None:
    """Check that a command failed with one sentence that has these parts, in its log and as its error."""
    assert result["code"] == 1, result
    for noise in ("Traceback", "File ", "raised an exception", "Exit Code"):
        assert noise not in result["printed"], result["printed"]
    *_, logged, error = result["printed"].strip().splitlines()
    assert error.removeprefix("error: the run failed: ") == logged.removeprefix("error: ") != logged != error
    for part in parts:
        assert part in error


def test_a_folder_in_use(results: dict[str, dict[str, Any]]) -> None:
    check_refused(results["in use"], "plain is in use by process", "name another folder")


def test_a_damaged_config(results: dict[str, dict[str, Any]]) -> None:
    check_refused(results["config"], "config.toml cannot be read", "another folder")


def test_a_damaged_checkpoint(results: dict[str, dict[str, Any]]) -> None:
    assert results["damaged"]["code"] == 0, results["damaged"]
    (line,) = [line for line in results["damaged"]["printed"].splitlines() if "checkpoint" in line]
    assert line.startswith("warning: checkpoint")
    assert line.endswith("is kept as round-000002.safetensors.corrupt, and the run continues after round 1")
    assert len(rounds(results["plain"])) == 2
    assert rounds(results["damaged"]) == rounds(results["plain"])


def test_a_full_disk(results: dict[str, dict[str, Any]]) -> None:
    if "full" not in results:
        pytest.skip("this machine has no user namespaces")
    check_refused(results["full"], "the disk with", "is full; free some space", "--resume")
    assert len(rounds(results["full"])) >= 1
    assert results["space"]["code"] == 0, results["space"]
    assert rounds(results["space"]) == rounds(results["plain"])
