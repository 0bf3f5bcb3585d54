"""The command line: all commands, and those of other packages through entry points."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from fedcover.cli import audit, calibrate, data, demo, deploy, design, report, run
from fedcover.cli import list as list_command
from fedcover.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated learning in which each client trains a pruned sub-model of one shared model.\n\n"
    "Start with `fedcover demo`. Then use `fedcover audit code 1111223344` to see what a code means, "
    "`fedcover run --set budgets.code=1111223344 --set rounds=20` to train, and "
    "`fedcover report runs/A runs/B --out ab.html` to compare runs.\n\n"
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
app.command("run")(run.run)
app.command("design")(design.design)
app.command("report")(report.report)
app.command("list")(list_command.list_)
app.add_typer(audit.app, name="audit")
app.add_typer(calibrate.app, name="calibrate")
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")

for _entry in sorted(entry_points(group="fedcover.commands"), key=lambda entry: entry.name):
    _command = _entry.load()
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_entry.name)
    else:
        app.command(_entry.name)(_command)
