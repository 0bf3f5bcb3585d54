"""Updates on disk: a round holds many, and its memory only one tensor at a time.

The file has no name, so nothing of it is left once its process has ended, also after a crash.
"""

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedcover._files import write_error
from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import FedcoverError


class SpoolError(FedcoverError):
    """Updates that cannot be written to disk or read from it."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in the file, and what it is like."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name in a file. Every access reads the tensor again, so keep what you need more than once."""

    def __init__(self, spool: "UpdateSpool", places: Mapping[str, _Place]) -> None:
        self._spool, self._places = spool, places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        return self._read(place, 0, place.shape.numel()).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return some entries of the flattened tensor; only these are read."""
        place = self._places[name]
        return self._read(place, start, min(stop, place.shape.numel()))

    def _read(self, place: _Place, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=place.dtype)
        self._spool.read(place.start + start * place.dtype.itemsize, values)
        return values.to(place.device)


class UpdateSpool:
    """A temporary file of updates. It exists as long as the spool or an update from it.

    Args:
        folder: The folder of the file's disk; None for the default of temporary files.

    >>> spool = UpdateSpool()
    >>> update = spool.store(ClientUpdate(3, {"w": torch.tensor([[1.0, 2.0]])}, {}))
    >>> update.client, update.theta["w"].tolist(), update.theta.part("w", 1, 2).tolist()
    (3, [[1.0, 2.0]], [2.0])
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        with _disk_errors(self._folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.bytes = 0
        """The bytes written so far."""

    def store(self, update: ClientUpdate, with_mask: bool = False) -> ClientUpdate:
        """Write the tensors of an update; return the update with tensors that are read from the file on access.

        Args:
            update: The update.
            with_mask: Whether its mask is written too. Leave out a mask that the round keeps in memory in any case.

        Raises:
            SpoolError: If the disk is full.
        """
        return replace(
            update,
            theta=self._write(update.theta),
            mask=self._write(update.mask) if with_mask else update.mask,
            report=self._write(update.report) if update.report is not None else None,
            moments=update.moments and {moment: self._write(tensors) for moment, tensors in update.moments.items()},
        )

    def _write(self, tensors: Mapping[str, Tensor]) -> StoredTensors:
        places = {}
        for name, tensor in tensors.items():
            places[name] = _Place(self.bytes, tensor.dtype, tensor.shape, tensor.device)
            data = _bytes_of(tensor.detach().cpu().contiguous())
            with _disk_errors(self._folder):
                while len(data):
                    written = os.pwrite(self._file, data, self.bytes)
                    data, self.bytes = data[written:], self.bytes + written
        return StoredTensors(self, places)

    def read(self, start: int, values: Tensor) -> None:
        """Fill a tensor with the bytes of the file from ``start`` on."""
        data = _bytes_of(values)
        while len(data):
            count = os.preadv(self._file, [data], start)
            if not count:
                raise SpoolError("a temporary file of updates is shorter than expected; check the disk")
            data, start = data[count:], start + count


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Give errors of the disk a remedy."""
    try:
        yield
    except OSError as error:
        raise SpoolError(str(write_error(folder / "updates of a round", error))) from error


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
