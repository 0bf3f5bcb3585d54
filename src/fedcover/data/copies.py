"""Copies of a data set on disk: the layouts of their files, their locations, and their unpacked bytes."""

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
    """One official set of files of a data set."""

    kind: str
    """Name of the file format."""
    files: Mapping[str, str | None]
    """Published digest of each unpacked file, ``sha256:...`` or ``md5:...``; None if none is published."""
    folder: str = ""
    """Folder of the files in the archive."""
    archive: str = ""
    """Name of the archive; empty if the files are published one by one, gzipped."""
    archive_digest: str = ""
    mirrors: tuple[str, ...] = field(default=())
    """Addresses of the archive or of the gzipped files, without their names."""


@dataclass(frozen=True)
class Copy:
    """A complete copy of a layout, in a folder or still in its archive."""

    layout: Layout
    location: Path
    """The folder of the files, or the archive."""

    @property
    def packed(self) -> bool:
        """True if the copy is still in its archive."""
        return bool(self.layout.archive) and self.location.name == self.layout.archive

    @property
    def folder(self) -> Path:
        """The folder of the files or of the archive."""
        return self.location.parent if self.packed else self.location

    def path(self, file: str) -> Path:
        """Return the path of a file in the folder, plain or gzipped."""
        plain = self.location / file
        return plain if plain.is_file() else plain.with_name(file + ".gz")

    @cached_property
    def contents(self) -> dict[str, bytes]:
        """The unpacked bytes of every file, read once."""
        if self.packed:
            return _read_archive(self.location, self.layout)
        return {file: read_bytes(self.path(file)) for file in self.layout.files}


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .gz.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.gz").write_bytes(gzip.compress(b"abc"))
    ...     read_bytes(Path(folder) / "a.gz")
    b'abc'
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a complete gzip file ({error}); {AGAIN}") from error


def find(name: str, layouts: tuple[Layout, ...], folder: Path) -> Copy | None:
    """Return the first complete copy in a folder, or None if the folder has none of the files.

    Raises:
        InputError: If the folder has only some of a layout's files; the message names the first one missing.
    """
    incomplete: tuple[Path, str] | None = None
    for layout in layouts:
        for location in dict.fromkeys((folder, folder / layout.folder)):
            copy = Copy(layout, location)
            missing = [file for file in layout.files if not copy.path(file).is_file()]
            if not missing:
                return copy
            if len(missing) < len(layout.files):
                incomplete = incomplete or (location, missing[0])
    for layout in layouts:
        if layout.archive and (folder / layout.archive).is_file():
            return Copy(layout, folder / layout.archive)
    if incomplete is not None:
        location, file = incomplete
        raise InputError(
            f"{name} in {location} is incomplete: {file} (or {file}.gz) is missing; "
            f"add it, or remove the other files and run `fedcover data get {name}`"
        )
    return None


def _read_archive(path: Path, layout: Layout) -> dict[str, bytes]:
    """Return the contents of the layout's files in a tar archive; nothing is written."""
    contents = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = member.name.removeprefix("./").removeprefix(layout.folder + "/")
                if file in layout.files and (stream := archive.extractfile(member)) is not None:
                    contents[file] = stream.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"{path} is not a complete tar archive ({error}); {AGAIN}") from error
    for file in layout.files:
        if file not in contents:
            raise InputError(f"{path} has no {layout.folder}/{file}; fetch the archive again")
    return {file: contents[file] for file in layout.files}
