"""Docstrings follow PEP 257: functions are described by an imperative sentence, public classes list their arguments."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcover as fc
import fedcover_experiments
from fedcover.policies import FACTORIES

FOLDERS = [Path(package.__file__ or "").parent for package in (fc, fedcover_experiments)]
NOT_IMPERATIVE = {
    "A", "All", "An", "And", "Each", "For", "How", "In", "It", "Its", "No", "Nothing", "One", "So", "Such", "The", "These",
    "This", "What", "Whether", "Who",
}  # fmt: skip
"""First words of a docstring that describes a thing instead of saying what the function does."""
NOUNS = {"property", "cached_property"}
"""Decorators of functions that are described as attributes are."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield every function that is not a property, an overload or a registered policy."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {part.id for one in node.decorator_list for part in ast.walk(one) if isinstance(part, ast.Name)}
            if not names & NOUNS and "register" not in names:
                yield node


def wrong_docstrings(text: str) -> list[str]:
    """Return the names of functions whose docstring does not begin with a verb."""
    wrong = []
    for node in functions(ast.parse(text)):
        first = (ast.get_docstring(node) or "Return").split()[0]
        if first.strip("`,.;:") in NOT_IMPERATIVE:
            wrong.append(node.name)
    return wrong


def test_functions_are_described_by_what_they_do() -> None:
    wrong = {
        f"{path.relative_to(folder.parent)}: {names}"
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.py"))
        if (names := wrong_docstrings(path.read_text()))
    }
    assert not wrong


def test_a_description_of_a_thing_is_noticed() -> None:
    assert wrong_docstrings('def masks():\n    """The masks of a round."""') == ["masks"]
    assert not wrong_docstrings('def masks():\n    """Return the masks of a round."""')
    assert not wrong_docstrings('@property\ndef masks(self):\n    """The masks of a round."""')


EXPLAINED = [fc.Federation, fc.Task, fc.LocalSGD, fc.Serial, fc.Processes, fc.Vectorized, *FACTORIES.values()]


@pytest.mark.parametrize("thing", EXPLAINED, ids=lambda thing: thing.__name__)
def test_what_users_call_lists_its_arguments(thing: type) -> None:
    """Every parameter is named under ``Args:``."""
    parameters = [name for name in inspect.signature(thing).parameters if not name.startswith("_")]
    lines = (inspect.getdoc(thing) or "").partition("Args:")[2].splitlines()
    described = {line.strip().partition(":")[0].partition(" ")[0] for line in lines}
    assert set(parameters) <= described
