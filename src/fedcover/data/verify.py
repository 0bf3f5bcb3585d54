"""Verification that a copy has the official files: by published digests, then by a SHA256SUMS beside them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fedcover.data.copies import Copy
from fedcover.errors import InputError

SUMS = "SHA256SUMS"
OFFICIAL = "official files: their checksums are the published ones"
LISTED = "copy whose files match the SHA256SUMS beside them"
UNVERIFIED = "unverified copy: no checksum is published for these files"


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a copy."""

    verified: bool
    """True if every file matches a published digest or the SHA256SUMS beside it."""
    provenance: str
    """Sentence on what the checksums were compared with."""


def verify(name: str, copy: Copy) -> Verdict:
    """Return the verdict on a copy.

    A file that matches its published digest is official. Otherwise a SHA256SUMS that lists it must match. A file with
    neither is refused if a digest is published, and accepted as unverified if none is.

    Raises:
        InputError: If a file is corrupt or is not the official one.
    """
    listed, comment = read_sums(copy.folder)
    standings = set()
    if copy.packed:
        standings.add(_standing(name, copy.location, copy.location, None, copy.layout.archive_digest, listed))
    else:
        for file, published in copy.layout.files.items():
            path = copy.path(file)
            standings.add(_standing(name, path, path.with_name(file), copy.contents[file], published, listed))
    for standing in (UNVERIFIED, LISTED):
        if standing in standings:
            note = f" ({comment})" if comment and standing == LISTED else ""
            return Verdict(standing == LISTED, standing + note)
    return Verdict(True, OFFICIAL)


def digest(algorithm: str, content: bytes | Path) -> str:
    """Return the hexadecimal digest of bytes, or of a file.

    >>> digest("md5", b"")
    'd41d8cd98f00b204e9800998ecf8427e'
    """
    if isinstance(content, bytes):
        return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def read_sums(folder: Path) -> tuple[dict[str, str], str]:
    """Return the digests in a folder's SHA256SUMS by file name, and its first comment; both empty without the file."""
    path = folder / SUMS
    if not path.is_file():
        return {}, ""
    listed: dict[str, str] = {}
    comment = ""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); write it again with `sha256sum`") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            comment = comment or line.lstrip("# ").rstrip()
        elif line.strip():
            value, _, file = line.partition(" ")
            if len(value) != 64 or set(value.lower()) - set("0123456789abcdef") or not file.strip():
                raise InputError(f"line {number} of {path} is not a checksum; write the file again with `sha256sum`")
            listed[file.strip().removeprefix("*").removeprefix("./")] = value.lower()
    return listed, comment


def _standing(
    name: str, path: Path, unpacked: Path, content: bytes | None, published: str | None, listed: dict[str, str]
) -> str:
    """Return the standing of one file: OFFICIAL, LISTED or UNVERIFIED.

    Args:
        name: Name of the data set.
        path: The file on disk.
        unpacked: The path without .gz.
        content: The unpacked content; None to read the file.
        published: The published digest, if there is one.
        listed: The digests in SHA256SUMS.
    """
    body = path if content is None else content
    if published:
        algorithm, _, value = published.partition(":")
        if digest(algorithm, body) == value:
            return OFFICIAL
    for file, source in ((path.name, path), (unpacked.name, body)):
        if file in listed:
            if digest("sha256", source) != listed[file]:
                raise InputError(
                    f"{path} is corrupt: its sha256 is not the one in the SHA256SUMS beside it; "
                    f"copy it again, or remove the copy and run `fedcover data get {name}` to fetch it again"
                )
            return LISTED
    if published:
        raise InputError(
            f"{path} is corrupt or not the official file: its {algorithm} is not {value}; "
            f"remove the copy and run `fedcover data get {name}` to fetch it again, "
            f"or, for your own copy that you trust, write the `sha256sum` of its files into SHA256SUMS beside them"
        )
    return UNVERIFIED
