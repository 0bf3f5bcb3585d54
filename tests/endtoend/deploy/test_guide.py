"""docs/deploy.md, executed: the commands of its shell blocks, one after another, in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedcover.deploy.address import check_port_free, free_ports
from fedcover.errors import InputError
from tests.endtoend.deploy.conftest import Marked, slow

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "tutorials" / "deploy.md"
EXAMPLE = ROOT / "examples" / "flower"


def commands() -> str:
    """Return the commands of the guide; with another port only if its own is in use."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    try:
        check_port_free("127.0.0.1", 8000)
    except InputError:
        (port,) = free_ports(1)
        return text.replace(":8000", f":{port}").replace("keys/server --out state", f"keys/server --port {port}")
    return text


@slow
@pytest.mark.timeout(600)
def test_the_guide_works_as_written(tmp_path: Path, marked: Marked) -> None:
    text = commands()
    before, after = text.split("printf", 1)
    assert len(before.strip().splitlines()) == 5  # five commands, as its title says
    script = f"set -e\ntrap 'kill -TERM $(jobs -p); wait' EXIT\n{before}\nprintf{after}\n"
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2: accuracy" in done.stdout
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["engine"] == "flower"
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert marked.left(20) == []


def test_the_checks_of_the_operators_page_work_as_written(tmp_path: Path, marked: Marked) -> None:
    page = ROOT / "docs" / "how-to" / "operate-a-fleet.md"
    *checks, service = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    assert "systemctl" in service  # it is not executed: it installs
    (port,) = free_ports(1)
    text = "".join(checks).replace("8000", str(port)).replace("--state state &", f"--state state --port {port} &")
    text = text.replace("&\n", "&\nuntil [ -e state/status.json ]; do sleep 0.2; done\n")
    script = f"set -e\ntrap 'kill -TERM $(jobs -p); wait' EXIT\n{text}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the server accepts this node's key" in done.stdout
    assert "0 of 2 nodes online" in done.stdout
    assert marked.left(20) == []


def test_the_example_is_played_by_flowers_own_parts() -> None:
    """Its apps, through a grid inside this process."""
    script = f"""
import sys
sys.path[:0] = [{str(EXAMPLE)!r}]
from flwr.app import Context, RecordDict
from tests.unit.deploy.loop import LoopGrid
from example.app import client, server
grid = LoopGrid(dict.fromkeys(range(4), client), run_config={{"nodes": 4, "rounds": 2}})
server(grid, Context(1, 1, {{}}, RecordDict(), {{"nodes": 4, "rounds": 2}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "round 2/2: accuracy" in done.stdout
    assert "least coverage 1" in done.stdout
