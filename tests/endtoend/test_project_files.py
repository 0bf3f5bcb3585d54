"""The files around the package: they parse, agree on the version, and what they claim holds."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from fedcover.version import __version__

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROSE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def project() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return settings


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {package: Version(number) for package, number in (line.split("==") for line in lines)}


def bounds() -> dict[str, Version]:
    """The lower bound of every package that users install."""
    extras = project()["optional-dependencies"]
    lines = [
        *project()["dependencies"],
        *(line for name in extras if name not in ("dev", "docs") for line in extras[name]),
    ]
    needs = [need for need in map(Requirement, lines) if need.name != "fedcover"]
    return {
        need.name: Version(next(bound.version for bound in need.specifier if bound.operator == ">=")) for need in needs
    }


def test_versions_agree() -> None:
    citation = read_yaml("CITATION.cff")
    newest = re.search(r"^## \[(\d[^\]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert (citation["version"], citation["date-released"]) == newest.groups()
    assert newest[1] == __version__


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == project()["license"]
    assert citation["repository-code"] == project()["urls"]["Source"]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Zhou", "Lan", "Venkataramani", "Ding"]


@pytest.mark.parametrize("path", [one for one in TEMPLATES if one.name != "config.yml"], ids=lambda path: path.name)
def test_issue_forms_have_fields_with_ids_of_their_own(path: Path) -> None:
    form = read_yaml(str(path.relative_to(ROOT)))
    assert {"name", "description", "body"} <= set(form)
    fields = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert len(fields) == len(set(fields))
    assert all("label" in field["attributes"] for field in form["body"] if field["type"] != "markdown")


def test_issue_links_name_this_project() -> None:
    links = read_yaml(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]
    assert all(link["url"].startswith(project()["urls"]["Homepage"]) for link in links)


def test_hooks_download_nothing_and_exist() -> None:
    repos = read_yaml(".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = {hook["id"]: hook for repo in repos for hook in repo["hooks"]}
    assert {"ruff", "ruff-format", "mypy"} == set(hooks)
    assert {hook["language"] for hook in hooks.values()} == {"system"}


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_example_of_a_policy_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    script = f"""{example}
import fedcover as fc
from fedcover.policies import POLICIES

net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
fc.check_policy(POLICIES["CoinFlips"](biases=True), net, example=torch.zeros(2, 8))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr


def test_lower_bounds_have_been_run() -> None:
    """torch has its own rule: the oldest release that a committed result was measured with."""
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    measured = re.search(r'"torch": "([\d.]+)', (ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    assert measured is not None
    for package, bound in bounds().items():
        ran = Version(measured[1]) if package == "torch" else oldest[package]
        assert bound.release == ran.release[: len(bound.release)], package
        assert not any(ran.release[len(bound.release) :]), f"{package}: {bound} allows versions older than {ran}"
        assert ran <= newest[package]


def test_all_takes_every_extra_but_trackers_and_search() -> None:
    """Those bring dozens of packages, and who uses one of them rarely uses the others."""
    extras = project()["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {
        "all",
        "dev",
        "docs",
        "tensorboard",
        "mlflow",
        "wandb",
        "optuna",
    }
