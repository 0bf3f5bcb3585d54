"""``fedcover watch``: a live page on a run or a sweep, for browsers on this machine."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out
from fedcover.errors import InputError, check_extra


@friendly
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, of a sweep, or of a `deploy server`.")],
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="The folder of a `deploy server`: show its nodes too.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 chooses a free one.", min=0, max=65535)] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the report of a run or sweep as a page that follows it while it continues; end it with Ctrl-C.

    The page shows metrics, coverage, the time left and rejected clients. Only this machine can open it, and nothing
    is written. The folder may not exist yet. With the folder of a `deploy server` it also shows the nodes, and follows
    the newest run.
    """
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover.deploy.status.panel import StatusPanel, is_server_folder
    from fedcover.report.live_page import LivePage
    from fedcover.report.live_server import LiveServer

    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run or a sweep")
    part = StatusPanel(state or folder) if state or is_server_folder(folder) else None
    with LiveServer(LivePage(folder if state or part is None else None, part), port) as server:
        try:
            out.print(f"watching {folder} at {server.url} (end with Ctrl-C)")
            if not folder.exists():
                out.print(f"{folder} does not exist yet; the page waits for it")
            if open_:
                webbrowser.open(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("watching ended")
