"""The process of a simulation: ``python -m fedcover.deploy.flower.simulation_process HOME``.

It plays the run in ``HOME/order.json`` and reports to ``HOME/events.jsonl``, one line for each round, warning and
error; ``simulate.py`` starts it and follows the file.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedcover.config.schema import parse_config
from fedcover.deploy.flower.apps import play_config
from fedcover.deploy.flower.simulate import backend_config, simulated_client
from fedcover.errors import FedcoverError

Report = Callable[[str, str], None]
"""Reports the kind of an event and its text."""


def play(order: dict[str, Any], report: Report) -> None:
    """Play the run of an order on Ray; raise its error."""
    config, folder = parse_config(order["settings"]), order["data"]
    server, error = ServerApp(), list[BaseException]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            play_config(
                grid, config, Path(order["out"]), order["resume"], folder, lambda line: None,
                lambda record: report("round", record.to_json()),
            )  # fmt: skip
        except BaseException as raised:
            error.append(raised)
            raise

    try:
        run_simulation(
            server, simulated_client(config, folder), config.data.clients, backend_config=backend_config(config)
        )
    except Exception as raised:
        error.append(raised)
    if error:  # that of the run first: Flower then reports one of its own
        raise error[0]


def main(home: Path) -> None:
    """Play the run in the order, and report it."""
    with open(home / "events.jsonl", "a", buffering=1) as events:

        def report(kind: str, text: str) -> None:
            events.write(json.dumps({"kind": kind, "text": text}) + "\n")

        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            if (ours := _class_in_errors(category)) is not None:
                report(ours, str(message))
            else:
                show_other(message, category, *location, **options)

        warnings.simplefilter("always", UserWarning)  # the process that follows decides what to show
        warnings.showwarning = show
        try:
            play(json.loads((home / "order.json").read_text()), report)
            report("completed", "")
        except FedcoverError as error:
            report(_class_in_errors(type(error)) or "FedcoverError", str(error))
        except Exception:
            report("failed", traceback.format_exc())


def _class_in_errors(kind: type) -> str | None:
    """Return the name of the class in ``fedcover.errors`` that a class is or extends."""
    return next((one.__name__ for one in kind.__mro__ if one.__module__ == "fedcover.errors"), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
