"""The public keys that may pass the gate: those in the server's folder now, not those of its start."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedcover.deploy.processes.keys import public_keys
from fedcover.errors import InputError


def read_public_key(path: Path) -> bytes:
    """Return a public key in the form in which nodes send it; raise InputError if the file is not one."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is not a readable public key ({error}); copy node.pub again") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{path} is not a key of `fedcover deploy keys`; copy node.pub again")
    return public_key_to_bytes(key)


class AllowedKeys:
    """The keys of a folder and of further files, by the name of their nodes; ``refresh`` reads them again.

    Args:
        folder: A folder of ``*.pub``; None for none.
        files: Further files.
    """

    def __init__(self, folder: Path | None, files: Sequence[Path] = ()) -> None:
        self._folder, self._files, self._lock = folder, list(files), threading.Lock()
        self._by_path: dict[Path, bytes] = {}
        self._names: dict[bytes, str] = {}
        self.problems: dict[str, str] = {}
        """Files that are not keys and folders that cannot be listed, and why."""
        self.refresh()

    def refresh(self) -> dict[bytes, str]:
        """Read the keys again and return the name of the node of each.

        A file that cannot be read, such as one that is just being copied, keeps the key that it had. So do all files
        of a folder that cannot be listed, such as one whose disk is not mounted.
        """
        problems: dict[str, str] = {}
        by_path: dict[Path, bytes] = {}
        for path in self._paths(problems):
            try:
                by_path[path] = read_public_key(path)
            except InputError as error:
                problems[str(path)] = str(error)
                if path in self._by_path:
                    by_path[path] = self._by_path[path]
        with self._lock:
            self._by_path, self.problems = by_path, problems
            self._names = {key: _node_name(path) for path, key in by_path.items()}
        return self._names

    def _paths(self, problems: dict[str, str]) -> list[Path]:
        """Return the files of the keys; those of last time if the folder cannot be listed."""
        files = [path for path in self._files if path.is_file()]
        if self._folder is None:
            return files
        try:
            os.listdir(self._folder)
        except OSError as error:
            problems[str(self._folder)] = (
                f"{self._folder} cannot be listed ({error.strerror}); its keys stay as they were"
            )
            return [*files, *(path for path in self._by_path if path.parent == self._folder)]
        return [*files, *public_keys(self._folder)]

    def names(self) -> dict[bytes, str]:
        """Return the name of the node of each key."""
        with self._lock:
            return dict(self._names)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._names

    def name(self, key: bytes) -> str:
        """Return the name of a key's node."""
        with self._lock:
            return self._names.get(key, "unknown")


def _node_name(path: Path) -> str:
    """Return the name of a node by the path of its key: node-3 for nodes/node-3.pub and for node-3/node.pub."""
    return path.stem if path.stem != "node" else path.absolute().parent.name
