"""Opening a committed state: the newest manifest, its files compared with it, and another try if a writer was faster.

A reader takes no lock. What it has opened stays readable for as long as it is open, for files are never changed and what is mapped
outlives its name. Only a reader that is still opening can find files gone, when two commits have gone by since it read the manifest;
then there is a newer one, and it begins again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from encoder.data_files import file_sha256
from encoder.errors import InputError
from retrieval.indexes.errors import DamagedIndexError, unreadable
from retrieval.indexes.store.layout import FORMAT, VERSION, Layout
from retrieval.indexes.store.manifest import FileEntry, Manifest, SegmentEntry, read_manifest, version_problem

Opened = TypeVar("Opened")

NOTHING_COMMITTED = "nothing has been committed, the build was never finished; run the same one again, which resumes"
"""What is wrong with an index whose first build was interrupted."""

# What is not mapped but parsed when it is opened is hashed before, even where the reader asks for no more than sizes.
_ALWAYS_HASHED = (".faiss", ".json")


def check_format(layout: Layout) -> None:
    """Refuse a folder that is no index of this version.

    Raises:
        DamagedIndexError: It is one, but the file that says so is missing or changed.
        InputError: It is none, or one of another format version (says which).
    """
    version = format_version(layout.root)
    if version is None:
        if layout.generations():
            raise DamagedIndexError(f"{layout.format}: missing or changed; the index is damaged: quiver index repair")
        raise InputError(f"{layout.root}: is not an index")
    if version != VERSION:
        raise InputError(f"{layout.root}: {version_problem(version)}")


def format_version(root: Path) -> int | None:
    """The format version of the index in a folder, whatever its state; None where there is none of ours."""
    path = Layout(root).format
    try:
        line = path.read_bytes()
        version = int(line.split()[1])
        return version if line == format_line(version) else None
    except FileNotFoundError:
        pass
    except (NotADirectoryError, IsADirectoryError, ValueError, IndexError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    try:  # version 1 had one manifest, at the root
        content = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return 1 if isinstance(content, dict) and content.get("format") == FORMAT else None


def format_line(version: int) -> bytes:
    """What the file that says what the folder is holds: the format, its version, and a checksum of the two."""
    said = f"{FORMAT} {version}"
    return f"{said} {hashlib.sha256(said.encode()).hexdigest()[:16]}\n".encode()


def newest_manifest(layout: Layout) -> Manifest:
    """The newest committed state.

    Raises:
        DamagedIndexError: Its manifest is not what was written.
        InputError: The folder is no index, is of another format version, or has no committed state.
    """
    check_format(layout)
    while True:
        generations = layout.generations()
        if not generations:
            raise InputError(f"{layout.root}: {NOTHING_COMMITTED}")
        try:
            return read_manifest(layout.manifest(generations[-1]))
        except FileNotFoundError as error:
            if generations == layout.generations():  # a link that leads nowhere
                raise unreadable(layout.manifest(generations[-1]), error) from error


def open_newest(layout: Layout, opener: Callable[[Manifest], Opened]) -> Opened:
    """Open the newest committed state, or a newer one that replaces it in that moment.

    Args:
        layout: The index.
        opener: Opens the files that a manifest names; it raises FileNotFoundError or InputError where one is not there.

    Raises:
        DamagedIndexError: A file is missing or not what was written.
        InputError: As `newest_manifest`.
    """
    while True:
        manifest = newest_manifest(layout)
        try:
            return opener(manifest)
        except (FileNotFoundError, InputError) as error:
            if layout.generations()[-1:] == [manifest.generation]:
                if isinstance(error, FileNotFoundError):
                    raise DamagedIndexError(f"{error.filename}: missing; the index is damaged: quiver index repair") from error
                raise


def verify_files(folder: Path, files: Mapping[str, FileEntry], *, full: bool) -> None:
    """Compare files with what the manifest says of them.

    Args:
        folder: Where they are.
        files: The manifest's entries.
        full: Read every file and compare its sha256; otherwise only those that are parsed when they are opened, and all sizes.

    Raises:
        DamagedIndexError: One is missing, cut short or changed (names it).
        InputError: One may not be read, which is no damage.
    """
    for name, entry in files.items():
        verify_file(folder / name, entry.bytes, entry.sha256 if full or name.endswith(_ALWAYS_HASHED) else None)


def verify_file(path: Path, size: int, sha256: str | None) -> None:
    """Compare one file with its size and, where given, its checksum.

    Raises:
        DamagedIndexError: It is missing, cut short or changed.
        InputError: It may not be read, which is no damage.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedIndexError(f"{path}: {found} bytes, but {size} were written; the index is damaged: quiver index repair")
        if sha256 is not None and file_sha256(path) != sha256:
            raise DamagedIndexError(f"{path}: the content has changed since it was written; the index is damaged: quiver index repair")
    except OSError as error:
        raise unreadable(path, error) from error


def read_alive(layout: Layout, segment: SegmentEntry) -> NDArray[np.bool_] | None:
    """Which rows of a segment are not deleted, (documents,); None for all of them.

    Raises:
        DamagedIndexError: The tombstones are missing or changed.
    """
    if segment.deleted is None:
        return None
    path = layout.tombstones / segment.deleted.name
    verify_file(path, segment.deleted.bytes, segment.deleted.sha256)
    if segment.deleted.bytes != -(-segment.documents // 8):
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged: quiver index repair")
    alive: NDArray[np.bool_] = np.unpackbits(np.fromfile(path, np.uint8), count=segment.documents, bitorder="little") == 0
    if int(np.count_nonzero(alive)) != segment.alive:
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged: quiver index repair")
    return alive


def tombstones_bytes(alive: NDArray[np.bool_]) -> bytes:
    """The tombstones of a segment as their file has them: one bit a row, set where it is deleted."""
    return np.packbits(~alive, bitorder="little").tobytes()
