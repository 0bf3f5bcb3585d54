"""Options that several commands share."""

from typing import Annotated

import typer

from fedcover.models import MODELS

DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", envvar="FEDCOVER_DATA", help="Folder with mnist/, fashion_mnist/ or cifar10/.", metavar="DIR"
    ),
]
ModelOption = Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}, or FILE.py:NAME for your own.")]
SeedsOption = Annotated[int, typer.Option(help="Number of seeds.")]
RoundsOption = Annotated[int, typer.Option(help="Number of rounds.")]
EngineOption = Annotated[str, typer.Option(help="auto, serial, processes or vectorized.")]
BudgetUnitOption = Annotated[
    str, typer.Option("--budget-unit", help="Unit of budgets: fraction, parameters, macs, bytes or seconds.")
]
CalibrationOption = Annotated[
    str,
    typer.Option(
        help="For seconds: the file that `fedcover calibrate steps --out` wrote on the clients' device.", metavar="FILE"
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
