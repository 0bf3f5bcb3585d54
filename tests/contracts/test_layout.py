"""The layout: which rooms there are, that each imports only from those above it, and what names may not be used."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcover
import fedcover_experiments

VOCABULARY = ["version", "errors", "_files", "_threads", "toml", "seeding", "params", "budgets", "clients", "registry"]
"""Single modules that everything else may use."""
ROOMS = [
    "data", "structure", "models", "masks", "aggregation", "training", "policies", "engines", "theory", "federation",
    "calibration", "config", "sweeps", "audit", "report", "deploy", "cli",
]  # fmt: skip
ORDER = [*VOCABULARY, *ROOMS]
SOURCE = Path(fedcover.__file__).parent
EXPERIMENTS = Path(fedcover_experiments.__file__).parent
EVERY_FILE = [*sorted(SOURCE.rglob("*.py")), *sorted(EXPERIMENTS.rglob("*.py"))]

BANNED = {"found", "made", "held", "known", "told", "said", "given", "heard", "lacking", "gone"}
"""Names of events, not of things."""


def rooms() -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        files.setdefault(room, []).append(path)
    return {room: paths for room, paths in files.items() if room not in ("__init__", "__main__")}


def imported_rooms(tree: ast.AST) -> set[str]:
    """Return the rooms that a file imports from, for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fedcover":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcover."):
            names.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedcover.")}
    return names


def upward(room: str, tree: ast.AST) -> list[str]:
    """Return the rooms below its own that a file imports from."""
    return [other for other in imported_rooms(tree) if other != room and ORDER.index(other) > ORDER.index(room)]


def test_the_rooms_are_those_of_the_design() -> None:
    assert set(rooms()) == set(ORDER)
    assert all((SOURCE / room).is_dir() for room in ROOMS)
    assert all((SOURCE / f"{leaf}.py").is_file() for leaf in VOCABULARY)


def test_modules_import_only_from_above() -> None:
    wrong = {
        str(path.relative_to(SOURCE)): below
        for room, paths in rooms().items()
        for path in paths
        if (below := upward(room, ast.parse(path.read_text())))
    }
    assert not wrong


def test_an_upward_import_is_noticed() -> None:
    """Also one that only a type checker sees."""
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedcover.cli.run import run\n"
    assert upward("policies", ast.parse(text)) == ["cli"]


def test_the_library_does_not_import_the_experiments() -> None:
    assert not [path for path in SOURCE.rglob("*.py") if "fedcover_experiments" in path.read_text()]


def test_files_are_short() -> None:
    files = [*EVERY_FILE, *Path(__file__).parents[1].rglob("*.py")]
    long = {str(path): lines for path in files if (lines := len(path.read_text().splitlines())) > 400}
    assert not long


def test_no_public_class_is_defined_twice() -> None:
    names = Counter(
        node.name
        for path in EVERY_FILE
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, times in names.items() if times > 1]


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that code binds: variables, parameters, attributes, functions, classes and aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def test_names_say_what_things_are() -> None:
    wrong = {
        str(path.relative_to(SOURCE.parent)): sorted(bad)
        for path in EVERY_FILE
        if (bad := {name for name in bound_names(ast.parse(path.read_text())) if name.strip("_") in BANNED})
    }
    assert not wrong


@pytest.mark.parametrize("text", ["found = 1", "def f(made): ...", "self.held = 2", "for told in (): ..."])
def test_a_banned_name_is_noticed(text: str) -> None:
    assert {name.strip("_") for name in bound_names(ast.parse(text))} & BANNED


def test_core_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """Machines with a GPU may have nothing else: block every other dependency and play two rounds."""
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "typer", "rich", "matplotlib", "safetensors", "click"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch, fedcover as fc
x = torch.randn(60, 4)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
federation = fc.Federation(fc.Task(net), fc.data.iid((x, (x[:, 0] > 0).long()), clients=5),
                           policy=fc.weight_pruning(), budgets=fc.by_slot("147"), cohort=3)
print(federation.run(2, evaluate_on=(x, (x[:, 0] > 0).long())).gamma_min)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "False"]  # torch's compiler takes a second to import, and is not needed here
