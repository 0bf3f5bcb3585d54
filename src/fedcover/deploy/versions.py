"""The versions of what a server and its nodes run, and what follows if they differ."""

import platform
from importlib.metadata import PackageNotFoundError, version

from fedcover.version import __version__

VERSIONS_HEADER = "fedcover-versions"
"""The header in which the gate sends its versions to a registered node that asks for its health."""
MUST_BE_EQUAL = ("fedcover", "flwr")
"""What must have the same version on both ends; for other packages only the first two numbers are compared."""


def installed_versions() -> dict[str, str]:
    """Return the versions of fedcover, of Flower, of torch and of Python; a package that is missing is left out."""
    versions = {"fedcover": __version__, "python": platform.python_version()}
    for package in ("flwr", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def versions_text(versions: dict[str, str]) -> str:
    """Return versions as the text of a header.

    >>> versions_text({"fedcover": "0.2.0", "torch": "2.11.0+cpu"})
    'fedcover/0.2.0 torch/2.11.0+cpu'
    """
    return " ".join(f"{name}/{number}" for name, number in versions.items())


def parse_versions(text: str) -> dict[str, str]:
    """Return the versions in the text of a header; what is not a version is left out.

    >>> parse_versions("fedcover/0.2.0 nonsense")
    {'fedcover': '0.2.0'}
    """
    return {name: number for name, slash, number in (part.partition("/") for part in text.split()) if slash}


def wrong_versions(own: dict[str, str], server: dict[str, str]) -> list[str]:
    """Return a sentence for each package whose version must be that of the server, and is not.

    >>> wrong_versions({"fedcover": "0.2.0"}, {"fedcover": "0.3.0"})
    ['fedcover is 0.2.0 here and 0.3.0 on the server; install fedcover==0.3.0 here, or 0.2.0 there']
    """
    return [
        f"{name} is {own[name]} here and {server[name]} on the server; install {name}=={server[name]} here, or"
        f" {own[name]} there"
        for name in MUST_BE_EQUAL
        if name in own and name in server and own[name] != server[name]
    ]


def differing_versions(own: dict[str, str], server: dict[str, str]) -> list[str]:
    """Return a phrase for each other package whose first two numbers differ from the server's.

    >>> differing_versions({"torch": "2.11.0"}, {"torch": "2.12.1"})
    ['torch is 2.11.0 here and 2.12.1 on the server']
    """
    return [
        f"{name} is {own[name]} here and {server[name]} on the server"
        for name in sorted((set(own) & set(server)) - set(MUST_BE_EQUAL))
        if own[name].split(".")[:2] != server[name].split(".")[:2]
    ]
