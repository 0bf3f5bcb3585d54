"""Settings that name a Python file, ``FILE.py:NAME``, on a server and on its nodes.

A file that settings name is executed. A node does not let the server choose: it executes only files that its operator
listed with ``--file``, and finds the one that the settings name by its file name.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcover.errors import InputError
from fedcover.toml import to_toml

SERVER_ONLY = ("aggregation", "server", "sampling", "callbacks")
"""Sections that only the server uses."""
KEYS = ("model.name", "data.name", "data.augment", "task.loss", "task.metrics", "local.name", "schedule.name")
"""Settings that a node uses and that may name a file."""
BUDGETED = ("policy", "complement")
"""Sections that a node uses only to compute what its budget buys."""


def absolute_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings in which the paths of files are absolute, for a process in another folder."""
    return _mapped(settings, lambda path: path.absolute())


def digests_of_files(settings: Mapping[str, Any]) -> str:
    """Return the digest of each file that nested settings name, as JSON; empty if they name none."""
    digests: dict[str, str] = {}

    def add(path: Path) -> Path:
        digests[path.name] = file_digest(path)
        return path

    _mapped(settings, add)
    return json.dumps(digests) if digests else ""


def parse_digests(text: str) -> dict[str, str]:
    """Return the digests by file name that ``digests_of_files`` wrote; raise InputError if the text is not valid."""
    try:
        digests = json.loads(text) if text else {}
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise InputError("the run's digests of files cannot be read; install the same fedcover on server and nodes")
    return digests


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the setting that names it") from error


def settings_of_node(text: str, files: Sequence[Path], digests: Mapping[str, str], needs_policy: bool) -> str:
    """Return a run's settings for a node, in which files are the node's own.

    Args:
        text: The settings as TOML, as the server sent them.
        files: The files that the node's operator allows.
        digests: The digests of the server's files by name.
        needs_policy: Whether the node needs the policy and the complement, to compute what its budget buys.

    Raises:
        InputError: If a setting that the node uses names a file that the operator did not allow, or that is not the
            server's.
    """
    raw = {key: value for key, value in tomllib.loads(text).items() if key not in SERVER_ONLY}
    by_name = {file.name: file for file in files}

    def own(path: Path) -> Path:
        if path.name not in by_name:
            raise InputError(
                f"the run uses {path.name}, a file of its own, which a node executes only if it was started with"
                f" --file {path.name}, a copy that its operator trusts"
            )
        file = by_name[path.name]
        here, there = file_digest(file), digests.get(path.name)
        if there is not None and here != there:
            raise InputError(
                f"{path.name} is not the server's: its SHA-256 is {here[:12]}... here and {there[:12]}... there; copy"
                f" the server's file to the node, or the node's to the server"
            )
        return file

    for section in () if needs_policy else BUDGETED:
        if _is_file(raw.get(section, {}).get("name")):
            del raw[section]
    return to_toml(_mapped(raw, own))


def _mapped(settings: Mapping[str, Any], function: Any) -> dict[str, Any]:
    """Return nested settings with a function applied to the path of every file."""
    changed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
    for dotted in (*KEYS, *(f"{section}.name" for section in (*BUDGETED, *SERVER_ONLY))):
        section, _, key = dotted.partition(".")
        table = changed.get(section)
        if isinstance(table, dict) and key in table:
            value = table[key]
            table[key] = [_moved(v, function) for v in value] if isinstance(value, list) else _moved(value, function)
    return changed


def _moved(value: Any, function: Any) -> Any:
    if not _is_file(value):
        return value
    file, _, name = value.rpartition(":")
    return f"{function(Path(file))}:{name}"


def _is_file(value: object) -> bool:
    return isinstance(value, str) and ".py:" in value
