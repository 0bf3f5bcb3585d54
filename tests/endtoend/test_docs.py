"""What the documents say is run: Python blocks, commands and outputs."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
Cli = Callable[..., tuple[int, str, str]]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", [p for p in DOCS if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    script = "\n".join(blocks(path, "python"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    if path.name == "README.md":
        (printed,) = blocks(path, "text")[:1]
        assert done.stdout == printed


def test_the_readmes_script_is_the_first_example_and_short() -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    example = (ROOT / "examples" / "01_your_own.py").read_text()
    shown, kept = ([line for line in text.splitlines() if line.strip()] for text in (script, example))
    assert shown == kept
    assert len(shown) <= 15


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for number in re.findall(r"\b0\.\d{3}\b|\b\d+ (?=%)", ast.get_docstring(ast.parse(path.read_text())) or ""):
        assert number.strip() in done.stdout, f"{path.name} says {number}, and it came out otherwise"
    if path.name.startswith("02"):  # clients of 71 or 72 examples: 8 batches of 10, five times over
        assert "up to 40 steps a round" in done.stdout


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_audit_commands_in_documents_run(path: Path, cli: Cli) -> None:
    for line in "\n".join(blocks(path, "sh")).splitlines():
        if line.startswith("fedcover audit"):
            code, _, err = cli(*line.split("#")[0].split()[1:])
            assert code == 0, err


def test_links_lead_somewhere() -> None:
    for path in DOCS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_what_rounds_on_flower_take_is_what_the_benchmark_found() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "flower.json").read_text())
    text = " ".join((ROOT / "docs" / "deploy.md").read_text().split())
    plain, full, np, wp = (f"{entry['median']:.2f} s" for entry in found["rounds"])
    assert (
        f"takes {plain} by Flower's own FedAvg, {full} by fedcover with full models, {np} under NP and {wp} under WP"
        in text
    )
    each = [sum(seconds for key, seconds in part.items() if "MB" not in key) for part in found["added"].values()]
    assert f"are {min(each):.2f} to {max(each):.2f} s of one core" in text
