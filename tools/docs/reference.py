"""Write the reference pages from the package itself: one page per room, the command line, settings and policies."""

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cost_tables import cost_tables
from repository import ROOT

SOURCE = ROOT / "src"
LIBRARY, EXPERIMENTS = "fedcover", "fedcover_experiments"
FOLDER = "reference/api"
ORDER = (
    "data structure models masks aggregation training policies engines theory federation calibration config audit"
    " report deploy cli"
)
"""The rooms in the order in which they may import each other; rooms that are not listed come last."""


def rooms() -> dict[str, list[str]]:
    """Return the public modules of every room, by the room's dotted name, in the order of the layout.

    The room ``fedcover`` has the modules that lie directly in the package; every package inside it is a room.
    """
    top = SOURCE / LIBRARY
    packages = sorted(path.parent.name for path in top.glob("*/__init__.py") if not path.parent.name.startswith("_"))
    order = ORDER.split()
    packages.sort(key=lambda name: order.index(name) if name in order else len(order))
    flat = sorted(f"{LIBRARY}.{path.stem}" for path in top.glob("*.py") if not path.stem.startswith("_"))
    named = {LIBRARY: flat} | {f"{LIBRARY}.{name}": list(_modules(top / name)) for name in packages}
    if (SOURCE / EXPERIMENTS).is_dir():
        named[EXPERIMENTS] = list(_modules(SOURCE / EXPERIMENTS))
    return named


def _modules(folder: Path) -> Iterator[str]:
    """Yield the dotted names of the public modules in a package, itself first if it defines something."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if path.stem == "__init__":
            parts = parts[:-1]
            if not _defines_something(path):
                continue
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def _defines_something(path: Path) -> bool:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in ast.parse(path.read_text()).body)


def page_of(room: str) -> str:
    """Return the page of a room, below ``docs/``."""
    return f"{FOLDER}/{room}.md"


def summary_of(room: str) -> str:
    """Return the first sentence of the docstring of a room."""
    path = SOURCE.joinpath(*room.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def room_page(room: str, modules: Sequence[str]) -> str:
    """Return the page of a room in Markdown; mkdocstrings fills it from the docstrings."""
    lines = [f"# {room}", ""]
    if room == LIBRARY:
        lines += ["The names that `import fedcover as fc` gives, and the modules that every room may import.", ""]
        lines += [*_public_names(), ""]
    elif summary := summary_of(room):
        lines += [summary, ""]
    for module in modules:
        lines += [f"::: {module}", ""]
    return "\n".join(lines)


def _public_names() -> list[str]:
    """Return a table of the names in ``fedcover.__all__``, each with a link to its definition."""
    import fedcover as fc

    rows = ["| name | what it is |", "|---|---|"]
    for name in sorted((name for name in fc.__all__ if not name.startswith("_")), key=str.lower):
        value = getattr(fc, name)
        if inspect.ismodule(value):
            room = ".".join(value.__name__.split(".")[:2])
            link = f"[`fc.{name}`]({room}.md)"
        else:
            link = f"[`fc.{name}`][{value.__module__}.{value.__qualname__}]"
        first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        rows.append(f"| {link} | {cell(first)} |")
    return rows


def cell(text: str) -> str:
    """Return a text that can stand in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def table(rows: Sequence[Sequence[str]], *heads: str) -> str:
    """Return a Markdown table."""
    lines = [" | ".join(heads), "|".join(["---"] * len(heads)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if index != 1 else f"|{line}|" for index, line in enumerate(lines))


def rooms_table() -> str:
    """Return the table of all rooms for the index of the reference."""
    rows = [(f"[`{room}`](api/{room}.md)", cell(summary_of(room))) for room in rooms()]
    return table(rows, "room", "what is in it")


def listed(topic: str) -> list[dict[str, Any]]:
    """Return what ``fedcover list TOPIC --json`` prints."""
    from typer.testing import CliRunner

    from fedcover.cli import app

    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["list", topic, "--json"])
    if result.exit_code:
        raise RuntimeError(f"fedcover list {topic} failed: {result.output}")
    rows: list[dict[str, Any]] = json.loads(result.stdout)[topic]
    return rows


def settings_tables() -> str:
    """Return a table of settings for each section of a run's TOML file."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for setting, default, meaning in (row.values() for row in listed("settings")):
        section = setting.rpartition(".")[0]
        sections.setdefault(section, []).append((f"`{setting}`", f"`{default}`" if default else "", cell(meaning)))
    titles = {name: f"## [{name}]" if name else "## Top level" for name in sections}
    heads = ("setting", "default", "meaning")
    return "\n\n".join(f"{titles[name]}\n\n{table(rows, *heads)}" for name, rows in sections.items())


def named_table(topic: str, section: str) -> str:
    """Return the table of the objects that a section of the settings may name, with their own settings."""
    listing = listed(topic)
    rows = [
        (
            f"`{name}`",
            cell(what),
            "<br>".join(f"`{section}.{key}`" + _default(value) for key, value in settings.items()),
        )
        for name, what, settings in (row.values() for row in listing)
    ]
    return table(rows, next(iter(listing[0])), "what it does", "settings and defaults")


def _default(value: Any) -> str:
    """Return how the default of an object's setting is shown, as TOML has it."""
    return "" if value is None else f" = `{json.dumps(value)}`"


def codes_table() -> str:
    """Return the table of code digits."""
    return table([[str(value) for value in row.values()] for row in listed("codes")], "digit", "keep", "quarters")


def data_table() -> str:
    """Return the table of the named data sets: sizes, natural clients, origin and licence."""
    from fedcover.data.catalogue import SOURCES

    rows = []
    for source in SOURCES.values():
        origins = ["public mirrors"] if any(layout.mirrors for layout in source.layouts) else []
        origins += [f"npm `{source.npm[0]}`"] if source.npm else []
        origins += [f"PyPI `{source.pypi}`"] if source.pypi else []
        rows.append(
            (
                f"`{source.name}`",
                " + ".join(f"{count:,}" for count in source.counts),
                f"{' × '.join(map(str, source.shape))}, {source.classes} classes",
                source.clients or "none",
                " or ".join(origins) or "part of fedcover",
                source.licence,
            )
        )
    return table(rows, "name", "training + test examples", "shape", "natural clients", "from", "licence")


PARTS: dict[str, Callable[[], str]] = {
    "rooms": rooms_table,
    "settings": settings_tables,
    "policies": partial(named_table, "policies", "policy"),
    "local": partial(named_table, "local", "local"),
    "schedule": partial(named_table, "schedule", "schedule"),
    "aggregation": partial(named_table, "aggregation", "aggregation"),
    "server": partial(named_table, "server", "server"),
    "sampling": partial(named_table, "sampling", "sampling"),
    "complement": partial(named_table, "complement", "complement"),
    "callbacks": partial(named_table, "callbacks", "callbacks.NAME"),
    "data": data_table,
    "models": partial(named_table, "models", "model"),
    "codes": codes_table,
    "cost-map": cost_tables,
}
"""What a page gets in place of ``<!-- generated: NAME -->``; the command line is in ``command_line.py``."""
