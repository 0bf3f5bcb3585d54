"""``fedcover deploy run``: train on the nodes that are online."""

import tempfile
import tomllib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcover.cli.console import RESUMABLE, friendly, out
from fedcover.cli.deploy.options import STATE, StateOption, WaitOption
from fedcover.cli.options import QuietOption
from fedcover.config.schema import read_config
from fedcover.deploy.own_files import absolute_files, digests_of_files
from fedcover.deploy.processes.flower_app import APPS, write_app
from fedcover.deploy.processes.signals import stop_signals
from fedcover.errors import FedcoverError, check_extra
from fedcover.toml import to_toml

if TYPE_CHECKING:
    from fedcover.deploy.processes.control import Control, RunState


@partial(friendly, interrupted=RESUMABLE)
def run(
    config: Annotated[Path, typer.Argument(help="Settings in TOML.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Run folder.", metavar="DIR")],
    state: StateOption = STATE,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting, such as local.lr=0.1.", metavar="KEY=VALUE")
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of the server's data sets; by default its FEDCOVER_DATA.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    wait: WaitOption = 60.0,
    quiet: QuietOption = False,
) -> None:
    """Train on the nodes that are online and follow the run; the exit code is 0 only if it completes.

    It is started on the server's machine, and reaches the server by its folder. Ctrl-C stops the run; `--resume`
    continues from its last checkpoint.
    """
    check_extra("flower", "a deployment", "flwr")
    from fedcover.deploy.processes.server import ADDRESS_FILE, ServerAddress  # a package that needs Flower

    text = to_toml(absolute_files(read_config(config, set_ or []).complete()))
    if wait and not quiet and not (state / ADDRESS_FILE).exists():
        out.print(f"no server has the folder {state} yet; waiting for {wait:.0f} s")
    with closing(ServerAddress.wait(state, wait).connect()) as control:
        ended = submit(control, text, out_dir, resume, quiet, data=data)
    if not ended.completed:
        raise FedcoverError(f"the run {ended.status.removeprefix('finished:')}: {ended.reason or 'see its log'}")
    if not quiet:
        out.print(f"completed in {ended.seconds:.1f} s; run folder {out_dir.absolute()}")


def submit(
    control: "Control",
    settings: str,
    run_folder: Path,
    resume: bool = False,
    quiet: bool = False,
    apps: str = APPS,
    data: str = "",
) -> "RunState":
    """Start a run, follow it to its end, and return its final state; stop it if this process is interrupted.

    Args:
        control: The connection to the SuperLink.
        settings: The settings as TOML.
        run_folder: The run folder on the server's machine.
        resume: Continue the run in ``run_folder``.
        quiet: Print nothing.
        apps: The module of the ServerApp and the ClientApp.
        data: The folder of the server's data sets; empty for the default.
    """
    config = {
        "settings": settings,
        "files": digests_of_files(tomllib.loads(settings)),
        "out": str(run_folder.absolute()),
        "data": str(Path(data).absolute()) if data else "",
        "resume": "true" if resume else "",
    }
    with tempfile.TemporaryDirectory(prefix="fedcover-app-") as folder, stop_signals(leave=False) as stop:
        stop.deferred = True  # until the run's number is available, which is needed to stop it
        number = control.run(write_app(folder, apps), config)
        stop.deferred = False
        if not quiet:
            out.print(f"run {number} at {control.address}", style="bold")
        try:
            stop.check()
            return control.follow(number, on_line=lambda line: None if quiet else out.print(line))
        except KeyboardInterrupt:
            if not quiet:
                out.print(f"stopping run {number}")
            control.stop(number)
            raise
