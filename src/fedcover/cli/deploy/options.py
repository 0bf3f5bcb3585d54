"""Options that several commands of ``fedcover deploy`` have."""

from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import say
from fedcover.deploy.processes import keys as key_files

InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Use no encryption and no keys; only for a network that only you use.")
]
ServerOption = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="Address of the `fedcover deploy server`.")
]
StateOption = Annotated[
    Path, typer.Option("--state", metavar="DIR", help="The server's folder, on the server's machine.")
]
WaitOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for the server at the start.")]
STATE = Path("state")
"""The server's folder unless another is named."""


def warn_of_expiry(certificate: Path) -> None:
    """Print a warning if a certificate expires soon."""
    days = key_files.check_certificate(certificate)
    if days < key_files.EXPIRY_WARNING_DAYS:
        say("warning", f"{certificate} expires in {days} days; create new keys before that", "yellow")
