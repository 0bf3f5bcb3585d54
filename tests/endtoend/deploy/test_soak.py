"""Ten minutes of the soak: a run that survives one fault of each kind."""

import json
import subprocess
import sys

import pytest

from tests.endtoend.deploy.conftest import SKIP, Marked
from tests.endtoend.deploy.fleet import ROOT


@pytest.mark.slow
@SKIP
@pytest.mark.timeout(2000)
def test_a_long_run_survives_every_fault(marked: Marked) -> None:
    command = [sys.executable, "-m", "tests.endtoend.deploy.soak", "--rounds", "115", "--minutes", "30"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["rounds"] == 115
    assert len(result["faults"]) >= 9
    assert marked.left(20) == []
