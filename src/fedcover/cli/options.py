"""Options that several commands share, each worded once."""

from typing import Annotated

import typer

from fedcover.models import MODELS

DataOption = Annotated[
    str | None,
    typer.Option("--data", envvar="FEDCOVER_DATA", help="Folder with mnist/, fashion_mnist/, cifar10/.", metavar="DIR"),
]
ModelOption = Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")]
SeedsOption = Annotated[int, typer.Option(help="How many seeds.")]
RoundsOption = Annotated[int, typer.Option(help="How many rounds.")]
EngineOption = Annotated[str, typer.Option(help="auto, serial, processes or vectorized.")]
UnitOption = Annotated[str, typer.Option(help="What budgets are in: fraction, parameters, macs, bytes or seconds.")]
CalibrationOption = Annotated[
    str, typer.Option(help="For seconds: what `fedcover calibrate` measured on the clients' device.", metavar="FILE")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
