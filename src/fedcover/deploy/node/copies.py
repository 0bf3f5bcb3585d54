"""A client's own copy of the model, which it keeps from one round to the next (``Kept`` of ``training/complements``).

A copy has what the client last trained, and elsewhere what it saw then. It is stored as safetensors. A request names
the copy that it assumes by its digest, so a copy that is damaged, or of another round or run, is never used.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedcover._files import write_atomically
from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.wire import TrainRequest
from fedcover.deploy.wire.complements import FindCopy
from fedcover.errors import InputError
from fedcover.federation.checkpoint import digest_of
from fedcover.params import Params

FILE = "copy.safetensors"
"""The name of a copy in a node's folder."""


class CopyStore(Protocol):
    """A place for one copy, which a new one replaces."""

    def read(self) -> bytes | None:
        """Return the copy; None if there is none."""

    def write(self, data: bytes) -> None:
        """Replace the copy."""


class CopyFile:
    """A copy in a file, which remains when the node is restarted.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes | None:
        """Return the content of the file; None if it cannot be read."""
        try:
            return self._path.read_bytes()
        except OSError:
            return None

    def write(self, data: bytes) -> None:
        """Replace the file; raise InputError if it cannot be written."""
        write_atomically(self._path, data)


class NoStore:
    """No place: a client that must keep a copy fails."""

    def read(self) -> bytes | None:
        """Return None."""
        return None

    def write(self, data: bytes) -> None:
        """Raise InputError."""
        raise InputError("this client has no folder for its copy of the model; start its node with fedcover's commands")


def copy_finder(store: CopyStore, like: Params) -> FindCopy:
    """Return a function that returns the copy in a store by its digest; None if it is another, or of another model.

    Args:
        store: The store.
        like: The trained tensors of the client's model.
    """

    def find(digest: str) -> Params | None:
        data = store.read()
        try:
            copy = load(data) if data is not None else {}
        except SafetensorError:
            return None
        fits = set(copy) == set(like) and all(
            (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype) for name, tensor in copy.items()
        )
        return copy if fits and digest_of(copy) == digest else None

    return find


def store_copy(store: CopyStore, request: TrainRequest, update: ClientUpdate) -> None:
    """Replace the copy in a store by that of a client that has trained.

    Raises:
        InputError: If it cannot be written.
    """
    before = {name: tensor for name, tensor in request.theta.items() if name not in request.frozen}
    store.write(save(renewed(before, update)))


def renewed(before: Params, update: ClientUpdate) -> Params:
    """Return a client's copy after its training: what it trained, and outside its mask what it had.

    Args:
        before: The tensors of its copy that are trained.
        update: What it trained.
    """
    after = {}
    for name, tensor in before.items():
        trained = update.theta[name].detach().cpu()
        inside = update.mask[name].cpu() if name in update.mask else None
        after[name] = (trained if inside is None else torch.where(inside, trained, tensor.cpu())).contiguous()
    return after
