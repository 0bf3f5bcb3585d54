"""Documents are executed: Python blocks, commands, settings, outputs and links."""

import ast
import dataclasses
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import fedcover as fc
from fedcover.cli import app
from fedcover.config.grid import split_axes
from fedcover.config.schema import read_config, valid_keys
from fedcover.sweeps.cells import Grid
from fedcover.sweeps.space import read_space
from tests.endtoend.documents import DOCUMENTS, PAGES, ROOT, blocks, name_of, tool

README = ROOT / "README.md"
EXECUTED = [README, *PAGES]
Cli = Callable[..., tuple[int, str, str]]


def with_block(language: str) -> list[Any]:
    return [pytest.param(path, id=name_of(path)) for path in EXECUTED if blocks(path, language)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", with_block("python"))
def test_python_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run one after another; a text block right behind one is its output."""
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {"__name__": "__main__"}
    fences = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", path.read_text(), re.DOTALL | re.MULTILINE
    )
    for code, output in fences:
        exec(compile(code, name_of(path), "exec"), variables)
        printed = capsys.readouterr().out
        assert not output or printed == output


def test_the_readme_fits_on_one_screen_and_its_script_is_the_first_example() -> None:
    assert len(README.read_text().splitlines()) <= 85
    (script,) = blocks(README, "python")
    example = (ROOT / "examples" / "01_your_own.py").read_text()
    shown, kept = ([line for line in text.splitlines() if line.strip()] for text in (script, example))
    assert shown == kept
    assert len(shown) <= 15


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    for number in re.findall(r"\b0\.\d{3}\b|\b\d+ (?=%)", ast.get_docstring(ast.parse(path.read_text())) or ""):
        assert number.strip() in printed, f"{path.name} quotes {number}, which it does not print"
    if path.name.startswith("02"):  # clients of 71 or 72 examples: 8 batches of 10, five times over
        assert re.search(r"\b40 steps\b", printed)


def commands(path: Path) -> Iterator[list[str]]:
    """The fedcover commands in the shell blocks of a document, as lists of words."""
    for line in "\n".join(blocks(path, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["fedcover"]:
            yield [word for word in words[1:] if word != "&"]


def quoted_commands(path: Path) -> list[list[str]]:
    """The fedcover commands in the sentences of a document, which may be parts of commands."""
    prose = "".join(part for part, is_prose in tool("repository").outside_fences(path.read_text()) if is_prose)
    return [text.split()[1:] for text in re.findall(r"`(fedcover [^`]+)`", prose)]


def unknown_words(words: Sequence[str]) -> list[str]:
    """The subcommands and options of a command that do not exist; words in capitals stand for something else."""
    at: Any = typer.main.get_command(app)
    rest, context = list(words), click.Context(at)
    while rest and isinstance(at, click.Group) and not rest[0].startswith("-") and rest[0] not in ("COMMAND", "..."):
        if (inner := at.get_command(context, rest[0])) is None:
            return [rest[0]]
        at, rest = inner, rest[1:]
    known = {name for parameter in at.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    options = rest[: rest.index("--")] if "--" in rest else rest
    return [word for word in options if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("path", EXECUTED, ids=name_of)
def test_commands_and_their_options_exist(path: Path) -> None:
    for words in (*commands(path), *quoted_commands(path)):
        assert not unknown_words(words), f"fedcover {' '.join(words)}"


def is_cheap(words: Sequence[str]) -> bool:
    """Whether a command takes seconds and needs nothing that is not there."""
    if words[0] == "report":
        return all(Path(word).is_dir() for word in words[1:] if word.startswith("runs/"))
    if words[0] in ("run", "sweep"):
        return "data.name=digits" in words
    if words[0] == "audit" and "resnet18" in words:
        return False  # the collected numbers of audits come from these commands
    return words[0] in ("audit", "design", "list") or words[:2] == ["paper", "list"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", with_block("sh"))
def test_cheap_commands_run(path: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands(path):
        if is_cheap(words):
            code, _, err = cli(*words)
            assert code == 0, f"fedcover {' '.join(words)}: {err}"


@pytest.mark.parametrize("path", [path for path in EXECUTED if blocks(path, "sh")], ids=name_of)
def test_settings_in_documents_are_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks(path, "toml"):
        for name in re.findall(r'"(\w+\.py):', text):
            (tmp_path / name).write_text(blocks(path, "python")[0])
        raw = tomllib.loads(text)
        if search := raw.pop("search", {}):
            assert read_space({key: value for key, value in search.items() if key != "metric"})
        assert Grid(*split_axes(raw, valid_keys())).cells()
    for words in commands(path):
        changes = [change for option, change in pairwise(words) if option == "--set"]
        if words[0] == "run" and not any(".py:" in change for change in changes):
            read_config(None, changes)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    prose = "".join(part for part, is_prose in tool("repository").outside_fences(path.read_text()) if is_prose)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    links, reference = tool("repository"), tool("reference")
    generated = {f"docs/{reference.page_of(room)}" for room in reference.rooms()}
    for target in links.links(path.read_text()):
        led = links.resolve(target, name_of(path))
        assert (ROOT / led).exists() or led in generated, f"{name_of(path)}: {target}"
        anchor = target.partition("#")[2]
        if anchor and led.endswith(".md") and led not in generated and "<!-- generated" not in (ROOT / led).read_text():
            assert anchor in anchors(ROOT / led), f"{name_of(path)}: {target}"


def test_a_wrong_command_or_option_is_noticed() -> None:
    """The checks above can fail."""
    assert unknown_words(["audit", "codes"]) == ["codes"]
    assert unknown_words(["run", "--sets", "a=b"]) == ["--sets"]
    assert unknown_words(["run", "--set", "a=b", "--", "--anything"]) == []


def test_every_source_file_named_in_documents_exists() -> None:
    """Paths such as `policies/fedrolex.py` are below src/fedcover; a move of a module must reach the documents."""
    below = [ROOT, ROOT / "src", ROOT / "src" / "fedcover", ROOT / "src" / "fedcover" / "federation"]
    for path in EXECUTED:
        for quoted in re.findall(r"`([\w/]+\.(?:py|c))`", path.read_text()):
            assert any((folder / quoted).exists() for folder in below), f"{name_of(path)}: {quoted}"


def test_every_module_named_in_documents_exists() -> None:
    """Dotted names such as `fedcover.deploy.flower.client` in sentences."""
    for path in EXECUTED:
        for dotted in re.findall(r"`((?:fedcover|fedcover_experiments)(?:\.\w+)+)(?::\w+)?`", path.read_text()):
            parts = dotted.split(".")
            folder, last = ROOT.joinpath("src", *parts[:-1]), parts[-1]
            found = [folder / last, folder / f"{last}.py", folder / "__init__.py", folder.with_suffix(".py")]
            assert any(map(os.path.exists, found)), f"{name_of(path)}: {dotted}"


def test_language_of_documents() -> None:
    """Words that the project replaced by the field's own."""
    replaced = {
        "drill": "training options", "technique": "policy", "census": "client registry", "warden": "supervisor",
        "roster": "device population", "anew": "again", "mend": "fix", "besides": "also",
    }  # fmt: skip
    for path in EXECUTED:
        words = set(re.findall(r"\w+", path.read_text().lower()))
        wrong = {old: new for old, new in replaced.items() if {old, f"{old}s"} & words}
        assert not wrong, f"{name_of(path)}: {wrong}"


def test_fields_of_a_record_in_the_reference_exist() -> None:
    names = {field.name for field in dataclasses.fields(fc.RoundRecord)}
    text = (ROOT / "docs" / "reference" / "run-folders.md").read_text().partition("## Fields of a record")[2]
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= names


def test_traits_and_options_in_the_tutorial_on_policies_exist() -> None:
    text = (ROOT / "docs" / "tutorials" / "write-a-policy.md").read_text()
    options = {field.name for field in dataclasses.fields(fc.TrainingOptions)}
    traits, table = text.split("| training option | effect |")
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == options
    declared = re.findall(r"^\| `(\w+)=[\w.]+`", traits, re.MULTILINE)
    assert declared
    assert set(declared) <= {field.name for field in dataclasses.fields(fc.Traits)}
