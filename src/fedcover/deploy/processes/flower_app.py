"""The app that is submitted to a SuperLink: the names of two objects installed on every machine, and no code."""

from importlib.metadata import version
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.toml import toml_value
from fedcover.version import __version__

APPS = "fedcover.deploy.flower.apps"
"""The module with ``server`` and ``client``, each a plain assignment: Flower searches its source without importing."""
APP_ID = "fedcover/fedcover-run"
"""Flower's name of the app: its publisher and its project."""
KEYS = ("settings", "files", "out", "data", "resume")
"""The keys of a run's config, all of them text."""


def write_app(folder: str | Path, apps: str = APPS) -> Path:
    """Write an app of which every node runs its own installed copy of the module ``apps``, and return the folder.

    Flower sends an app's files to all nodes, which run them. Here these are only names and a licence, so an app that
    fedcover writes cannot bring code to a node.
    """
    home = Path(folder)
    flower = version("flwr")
    write_atomically(
        home / "pyproject.toml",
        f"""[project]
name = "fedcover-run"
version = {toml_value(_numeric_version(__version__))}
description = "A federation of pruned sub-models; the code is the fedcover installed on each machine"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={flower}"]

[tool.flwr.app]
publisher = "fedcover"
fab-format-version = 1
flwr-version-target = {toml_value(flower)}

[tool.flwr.app.components]
serverapp = {toml_value(f"{apps}:server")}
clientapp = {toml_value(f"{apps}:client")}

[tool.flwr.app.config]
{"".join(f'{key} = ""{chr(10)}' for key in KEYS)}""",
    )
    write_atomically(home / "LICENSE", "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0\n")
    return home


def _numeric_version(text: str) -> str:
    """Return a version of three numbers, as Flower requires it."""
    numbers = [part for part in text.split("+")[0].split(".") if part.isdigit()]
    return ".".join([*numbers, "0", "0"][:3])
