"""The command line: all commands, and those of other packages through entry points."""

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from fedcover.cli import audit, calibrate, data, demo, deploy, design, report, run, sweep, watch
from fedcover.cli import list as list_command
from fedcover.cli.settings_command import SettingsCommand
from fedcover.version import __version__


class CommandGroup(TyperGroup):
    """The commands of this package, and those that installed packages add to the group ``fedcover.commands``.

    The latter are imported when they are asked for.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *sorted(_added_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; None if there is no such command."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in (entries := _added_commands()):
            command = _load(entries[cmd_name])
        return command


def _added_commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="fedcover.commands")}


def _load(entry: EntryPoint) -> click.Command:
    """Return the command of an entry point, which is a Typer or a function."""
    added = entry.load()
    if not isinstance(added, typer.Typer):
        group = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        group.command(entry.name)(added)
        added = group
    command = typer.main.get_command(added)
    command.name = entry.name
    return command


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated learning in which each client trains a pruned sub-model of one shared model.\n\n"
    "Start with `fedcover demo`. Then use `fedcover audit code 1111223344` to see what a code means, "
    "`fedcover run --set budgets.code=1111223344 --set rounds=20` to train, and "
    "`fedcover report runs/A runs/B --out ab.html` to compare runs. "
    "`fedcover watch runs/A` follows a run in the browser.\n\n"
    "Exit codes: 0 success, 1 failure, 2 invalid input (the message says how to fix it), 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedcover {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before a command."""


app.command("demo")(demo.demo)
app.command("run", cls=SettingsCommand)(run.run)
app.command("sweep", cls=SettingsCommand)(sweep.sweep)
app.command("design")(design.design)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("list")(list_command.list_)
app.add_typer(audit.app, name="audit")
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")
