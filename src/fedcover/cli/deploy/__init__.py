"""``fedcover deploy``: a federation over the network, with Flower's SuperLink and nodes of fedcover's own."""

import typer

from fedcover.cli.deploy.client import client
from fedcover.cli.deploy.doctor import doctor
from fedcover.cli.deploy.keys import keys
from fedcover.cli.deploy.run import run
from fedcover.cli.deploy.server import server
from fedcover.cli.deploy.status import status

app = typer.Typer(
    no_args_is_help=True, help="Train over the network with Flower: create keys, start servers and clients, run."
)
app.command("keys")(keys)
app.command("server")(server)
app.command("client", context_settings={"allow_extra_args": True})(client)
app.command("run")(run)
app.command("status")(status)
app.command("doctor")(doctor)
