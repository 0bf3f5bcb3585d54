"""Write the reference of the command line from the commands themselves."""

import re
from collections.abc import Iterator
from typing import Any

import click
import typer
from reference import cell, table


def command_line() -> str:
    """Return a section for every command of ``fedcover``, in the order of its help."""
    from fedcover.cli import app

    return "\n\n".join(_sections(typer.main.get_command(app), ("fedcover",)))


def _sections(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    context = click.Context(command, info_name=path[-1])
    if len(path) > 1:
        yield f"{'#' * min(len(path), 4)} {' '.join(path)}"
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    yield f"```text\n{usage}\n```"
    if command.help:
        yield _help(command.help)
    if rows := [row for parameter in command.params if (row := _row(parameter, context))]:
        yield table(rows, "argument or option", "default", "meaning")
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        inner = command.get_command(context, name)
        assert inner is not None
        if not inner.hidden:
            yield from _sections(inner, (*path, name))


def _help(text: str) -> str:
    """Return a command's help; it is Markdown already, but for the marks that keep lines apart."""
    return re.sub(r"[\b\f]\n?", "", text).strip()


def _row(parameter: Any, context: click.Context) -> tuple[str, str, str] | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    if parameter.param_type_name == "argument":
        names = f"`{parameter.make_metavar(context)}`"
    else:
        metavar = "" if parameter.is_flag else f" {parameter.make_metavar(context)}"
        names = ", ".join(f"`{name}{metavar}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.get_default(context, call=False)
    plain = default is not None and not callable(default) and default != "" and not getattr(parameter, "is_flag", False)
    notes = [getattr(parameter, "help", None) or ""]
    if parameter.required:
        notes.append("Required.")
    if variable := getattr(parameter, "envvar", None):
        notes.append(f"Environment variable: `{variable}`.")
    return names, f"`{default}`" if plain else "", cell(" ".join(note for note in notes if note))
