"""The layout's one rule: a module imports only from those above it. And what the core may depend on."""

import ast
import subprocess
import sys
from pathlib import Path

import fedcover

ORDER = [
    "version", "errors", "link", "paired", "files", "threads", "seeding", "params", "packing", "budgets", "clients",
    "network", "buffers", "units", "data", "models", "holders", "coverage", "design", "aggregate", "robust",
    "balance", "cost", "theory", "submodel", "dropout", "program", "native", "stepper", "drill", "drilled",
    "policies", "local", "answers", "evaluate", "engines", "settings", "history", "recording", "checkpoint",
    "planning", "remedies", "report", "runfolder", "runs", "federation", "audit", "afford", "blueprint", "paper",
    "study", "config", "deploy", "flower", "cli",
]  # fmt: skip
SOURCE = Path(fedcover.__file__).parent


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        found.setdefault(room, []).append(path)
    return {room: paths for room, paths in found.items() if room not in ("__init__", "__main__")}


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports from, those for type checkers alone left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fedcover":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcover."):
            names.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedcover.")}
    return names


def test_every_room_is_in_the_order() -> None:
    assert set(rooms()) == set(ORDER)


def test_modules_import_only_from_above() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for room, paths in rooms().items()
        for path in paths
        for other in imported_rooms(path)
        if other != room and ORDER.index(other) > ORDER.index(room)
    ]
    assert not wrong


def test_files_are_short() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_core_runs_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    """Machines with a GPU may have nothing else: block every other dependency and play two rounds."""
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "typer", "rich", "matplotlib", "safetensors", "torch_pruning", "click"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch, fedcover as fc
x = torch.randn(60, 4)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
federation = fc.Federation(fc.Task(net), fc.data.iid((x, (x[:, 0] > 0).long()), clients=5),
                           policy=fc.weight_pruning(), budgets=fc.by_slot("147"), cohort=3)
print(federation.run(2, evaluate_on=(x, (x[:, 0] > 0).long())).gamma_min)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
