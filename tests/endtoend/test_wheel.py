"""The wheel as a user installs it: the bare core, the command line, and everything."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.endtoend.installed import ROOT, Installed, build
from tests.endtoend.installed import install as install_wheel

OPTIONAL = ("typer", "rich", "pydantic", "matplotlib", "PIL", "flwr", "ray", "cryptography")
TWO_ROUNDS = ["run", "--set", "data.name=digits", "--set", "data.clients=20", "--set", "rounds=2", "--out", "run"]
FEDERATION = """
import torch, fedcover as fc
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
examples = (x, (x[:, 0] > 0).long())
def federation(policy):
    return fc.Federation(fc.Task(net), fc.data.iid(examples, clients=5), policy=policy,
                         budgets=fc.by_slot("1,0.5,0.5"), cohort=3)
"""
Install = Callable[..., Installed]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel, built and installed once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            install_wheel(build(folder)[1], folder / "installed")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture
def install(built: tuple[Path, Path], tmp_path: Path) -> Install:
    """A function that returns the installed wheel with the packages of some extras."""
    return lambda *extras: Installed(built[1].parent / "installed", extras, tmp_path)


def data_files() -> set[str]:
    """Files of the packages that are not Python, as they are in the sources."""
    source = ROOT / "src"
    paths = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".py"}
    return {str(path) for path in paths if not {"__pycache__", "fedcover.egg-info"} & set(path.parts)}


def test_sdist_and_wheel_contain_every_data_file(built: tuple[Path, Path]) -> None:
    files = data_files()
    assert {Path(name).suffix for name in files} >= {".c", ".css", ".gz", ".js", ".toml", ".typed"}
    with tarfile.open(built[0]) as sdist, zipfile.ZipFile(built[1]) as wheel:
        in_sdist = {name.partition("/src/")[2] for name in sdist.getnames()}
        assert files <= in_sdist
        assert files <= set(wheel.namelist())


def test_the_bare_core_plays_rounds_and_names_what_is_missing(install: Install) -> None:
    core = install()
    script = f"""
import importlib.util
print([name for name in {OPTIONAL} if importlib.util.find_spec(name)])
print(len(federation(fc.neuron_pruning()).run(2, evaluate_on=examples, out="run")))
def tried(work):
    try:
        work()
    except fc.errors.MissingExtraError as error:
        print(error)
def write_report():
    from fedcover.report import write_report
tried(write_report)
tried(lambda: importlib.import_module("fedcover.audit"))
"""
    done = core.python(FEDERATION + script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[]", "2"]
    assert [line.partition("needs ")[2] for line in lines[2:]] == [
        "matplotlib; install it with: pip install 'fedcover[report]'",
        "pydantic; install it with: pip install 'fedcover[cli]'",
    ]
    (command,) = core.fedcover(["--help"])
    assert (command.returncode, command.stdout, command.stderr.count("\n")) == (2, "", 1)
    assert command.stderr.endswith("needs typer; install it with: pip install 'fedcover[cli]'\n")


def test_the_command_line_needs_only_its_own_extra(install: Install) -> None:
    installed = install("cli")
    refused = {
        "report": ["report", "run"],
        "flower": ["run", "--set", "data.name=digits", "--set", "engine=flower-sim"],
    }
    shown, run, *others = installed.fedcover(["--help"], [*TWO_ROUNDS, "--set", "policy.name=WP"], *refused.values())
    assert shown.returncode == 0
    assert run.returncode == 0, run.stderr
    assert len((installed.folder / "run" / "history.jsonl").read_text().splitlines()) == 2
    for extra, done in zip(refused, others, strict=True):
        assert done.returncode == 2, done.stderr
        assert done.stderr.endswith(f"pip install 'fedcover[{extra}]'\n")
        assert "Traceback" not in done.stderr


def test_with_all_extras_the_command_line_runs_and_reports(install: Install) -> None:
    installed = install("all")
    np_run = [*TWO_ROUNDS, "--set", "policy.name=NP", "--set", "budgets.code=1111444444"]
    shown, run, audit = installed.fedcover(["--help"], np_run, ["paper", "audit", "--json"])
    assert "Usage" in shown.stdout
    assert run.returncode == 0, run.stderr
    assert {path.name for path in (installed.folder / "run").iterdir()} >= {"summary.json", "report.html"}
    assert audit.returncode == 0  # reads the published tables


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("FEDCOVER_SLOW"), reason="takes minutes: make test-slow")
@pytest.mark.network
@pytest.mark.timeout(1800)
def test_make_wheel_then_pip_install_in_a_new_environment(tmp_path: Path) -> None:
    """What a user does, with a package registry: no shortcut."""
    subprocess.run(["make", "wheel", f"DIST={tmp_path}"], cwd=ROOT, check=True, timeout=900)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    programs = tmp_path / "venv" / "bin"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([programs / "pip", "install", "--quiet", *constraints, f"{wheel}[all]"], check=True, timeout=1500)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in (["--version"], ["--help"], TWO_ROUNDS, ["report", "run"]):
        line = [str(programs / "fedcover"), *command]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout
