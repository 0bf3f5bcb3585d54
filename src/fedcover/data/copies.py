"""Copies of a data set on disk: the layouts its files come in, where they lie, and their unpacked bytes."""

import gzip
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedcover.errors import InputError

AGAIN = "remove it, then `fedcover data get`"
"""The remedy for a broken copy."""


@dataclass(frozen=True)
class Layout:
    """One official set of files: each unpacked name with its published digest, and the archive they come in.

    A digest is written ``sha256:...`` or ``md5:...``; None says that none is published. ``mirrors`` are the
    addresses that have the archive, or the gzipped files where there is no archive.
    """

    kind: str
    files: Mapping[str, str | None]
    folder: str = ""
    archive: str = ""
    archive_digest: str = ""
    mirrors: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Copy:
    """A complete copy of a layout, in a folder or still in its archive."""

    layout: Layout
    place: Path

    @property
    def packed(self) -> bool:
        """Whether the copy is still in its archive."""
        return bool(self.layout.archive) and self.place.name == self.layout.archive

    @property
    def folder(self) -> Path:
        """The folder that holds the files or the archive."""
        return self.place.parent if self.packed else self.place

    def path(self, file: str) -> Path:
        """The file as it lies in the folder, plain or gzipped."""
        plain = self.place / file
        return plain if plain.is_file() else plain.with_name(file + ".gz")

    @cached_property
    def contents(self) -> dict[str, bytes]:
        """Every file's unpacked bytes, read once."""
        if self.packed:
            return _read_archive(self.place, self.layout)
        return {file: read_bytes(self.path(file)) for file in self.layout.files}


def read_bytes(path: Path) -> bytes:
    """The content of a file; of one that ends in .gz, the unpacked content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.gz").write_bytes(gzip.compress(b"abc"))
    ...     read_bytes(Path(folder) / "a.gz")
    b'abc'
    """
    try:
        raw = path.read_bytes()
    except OSError as why:
        raise InputError(f"{path} cannot be read ({why.strerror}); check the path and its permissions") from why
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as why:
        raise InputError(f"{path} is not a whole gzip file ({why}); {AGAIN}") from why


def find(name: str, layouts: tuple[Layout, ...], folder: Path) -> Copy | None:
    """The first complete copy in a folder, or None where it has not one of the files.

    A folder with only some of a layout's files is an error that names the first one missing.
    """
    half: tuple[Path, str] | None = None
    for layout in layouts:
        for place in dict.fromkeys((folder, folder / layout.folder)):
            copy = Copy(layout, place)
            missing = [file for file in layout.files if not copy.path(file).is_file()]
            if not missing:
                return copy
            if len(missing) < len(layout.files):
                half = half or (place, missing[0])
    for layout in layouts:
        if layout.archive and (folder / layout.archive).is_file():
            return Copy(layout, folder / layout.archive)
    if half is not None:
        place, file = half
        raise InputError(
            f"{name} in {place} is half complete: {file} (or {file}.gz) is missing; "
            f"add it, or remove the other files and run `fedcover data get {name}`"
        )
    return None


def _read_archive(path: Path, layout: Layout) -> dict[str, bytes]:
    """The layout's files out of a tar, which is read in place: nothing is written."""
    contents = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = member.name.removeprefix("./").removeprefix(layout.folder + "/")
                if file in layout.files and (stream := archive.extractfile(member)) is not None:
                    contents[file] = stream.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as why:
        raise InputError(f"{path} is not a whole tar archive ({why}); {AGAIN}") from why
    for file in layout.files:
        if file not in contents:
            raise InputError(f"{path} has no {layout.folder}/{file}; fetch the archive again")
    return {file: contents[file] for file in layout.files}
