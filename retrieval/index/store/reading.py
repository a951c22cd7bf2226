"""Opening a generation: read the newest manifest, verify its files, and try again if a writer has replaced it meanwhile.

Readers take no lock. Opened files stay readable as long as they are open, because files are never changed and a mapping outlives the name
of its file. Only a reader that is still opening the index can find files missing, if two commits have happened since it read the manifest;
it then starts again with the newer manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.errors import DamagedIndexError, missing_file, unreadable
from quiver.retrieval.index.mapped import Files, digests_sha256, file_digests, read_around, read_digests
from quiver.retrieval.index.store.layout import FORMAT, VERSION, Layout, entries
from quiver.retrieval.index.store.manifest import FileEntry, Manifest, SegmentEntry, TombstonesEntry, read_manifest, version_problem

Opened = TypeVar("Opened")

NOTHING_COMMITTED = "nothing has been committed, the build was never finished; run the same one again, which resumes"
"""Error message for an index whose first build was interrupted."""

# Files that are parsed, not mapped, are always verified completely when they are opened.
_ALWAYS_HASHED = (".faiss", ".json")


def check_format(layout: Layout) -> None:
    """Check that a folder is an index of this format version.

    Raises:
        DamagedIndexError: It is an index, but its FORMAT file is missing or damaged.
        InputError: It is not an index, or has another format version (names it).
    """
    version = format_version(layout.root)
    if version is None:
        if layout.generations():
            raise DamagedIndexError(f"{layout.format}: missing or changed; the index is damaged, run quiver index repair")
        raise InputError(f"{layout.root}: the folder is not an index")
    if version != VERSION:
        raise InputError(f"{layout.root}: {version_problem(version)}")


def format_version(root: Path) -> int | None:
    """Format version of the index in a folder, in whatever state; None if the folder is not an index."""
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
    """Content of the FORMAT file: the format, its version, and a checksum."""
    said = f"{FORMAT} {version}"
    return f"{said} {hashlib.sha256(said.encode()).hexdigest()[:16]}\n".encode()


def newest_manifest(layout: Layout) -> Manifest:
    """Read the newest manifest.

    Raises:
        DamagedIndexError: The newest manifest is missing or damaged; names the newest generation known to have existed.
        InputError: The folder is not an index, has another format version, or has no committed generation.
    """
    check_format(layout)
    while True:
        known = head_generation(layout)  # read first: a generation is committed before the head names it
        generations = layout.generations()
        if not generations and (known == 0 or (known is None and not entries(layout.segments))):
            raise InputError(f"{layout.root}: {NOTHING_COMMITTED}")
        if known is None:
            raise _not_newest(layout, f"{layout.head}: missing or changed, so the newest generation is unknown", generations)
        if not generations or generations[-1] < known:
            raise _not_newest(layout, f"{layout.manifest(known)}: missing, and it is the newest generation", generations)
        try:
            return read_manifest(layout.manifest(generations[-1]))
        except FileNotFoundError as error:
            if generations == layout.generations():  # a link that leads nowhere
                raise unreadable(layout.manifest(generations[-1]), error) from error
        except DamagedIndexError as error:
            raise _not_newest(layout, f"generation {generations[-1]} is the newest, but {error}", generations[:-1]) from error


def read_generation(layout: Layout, generation: int) -> Manifest:
    """Read the manifest of a given generation.

    Raises:
        DamagedIndexError: The manifest is damaged.
        InputError: The generation does not exist.
    """
    check_format(layout)
    try:
        return read_manifest(layout.manifest(generation))
    except FileNotFoundError as error:
        there = ", ".join(map(str, layout.generations())) or "none"
        raise InputError(f"{layout.root}: generation {generation} does not exist; there are {there}") from error


def head_generation(layout: Layout) -> int | None:
    """The newest committed generation according to HEAD; 0 before the first commit, None if HEAD is missing or damaged."""
    content = read_around(layout.head, Path.read_bytes)
    if content is None:
        return None
    named = [_named(line) for line in content.split(b"\n", 2)[:2]]
    return max((generation for generation in named if generation is not None), default=None)


def head_bytes(generation: int, manifest: bytes) -> bytes:
    """Content of HEAD: two identical lines that name the generation, so that one may be damaged, and a copy of its manifest."""
    return 2 * _head_line(generation) + manifest


def head_manifest(layout: Layout) -> bytes:
    """The copy of the newest manifest in HEAD; empty if there is none."""
    parts = (read_around(layout.head, Path.read_bytes) or b"").split(b"\n", 2)
    return parts[2] if len(parts) == 3 else b""


def _head_line(generation: int) -> bytes:
    said = f"{FORMAT} generation {generation}"
    return f"{said} {hashlib.sha256(said.encode()).hexdigest()[:16]}\n".encode()


def _named(line: bytes) -> int | None:
    words = line.split()
    if len(words) != 4 or not words[2].isdigit():
        return None
    generation = int(words[2])
    return generation if _head_line(generation) == line + b"\n" else None


def _not_newest(layout: Layout, problem: str, older: Sequence[int]) -> DamagedIndexError:
    """Error if the newest generation cannot be opened. Older ones lack later changes, so they are opened only by number."""
    remedy = "quiver index repair --dry-run says what can be restored"
    if older:
        remedy += f"; --generation {older[-1]} opens that older state as it was"
    return DamagedIndexError(f"{problem}; {remedy}")


def open_newest(layout: Layout, opener: Callable[[Manifest], Opened]) -> Opened:
    """Open the newest generation, or a newer one committed meanwhile.

    Args:
        layout: Paths of the index.
        opener: Opens the files of a manifest; raises FileNotFoundError or InputError if a file is missing.

    Raises:
        DamagedIndexError: A file is missing or damaged.
        InputError: As `newest_manifest`.
    """
    while True:
        manifest = newest_manifest(layout)
        try:
            return opener(manifest)
        except (FileNotFoundError, InputError) as error:
            if layout.generations()[-1:] == [manifest.generation]:
                if isinstance(error, FileNotFoundError):
                    raise missing_file(Path(error.filename)) from error
                raise


def open_files(folder: Path, files: Mapping[str, FileEntry], *, verify: bool) -> Files:
    """Open the files of a folder; each block is verified when it is first read.

    Args:
        folder: The folder.
        files: Entries of the manifest.
        verify: Whether to verify blocks; files that are parsed are always verified.
    """
    digests = read_digests(folder, files)
    checked = {name: each for name, each in digests.items() if verify or name.endswith(_ALWAYS_HASHED)}
    return Files(folder, checked, sizes={name: entry.bytes for name, entry in files.items()})


def verify_files(folder: Path, files: Mapping[str, FileEntry], *, full: bool) -> None:
    """Compare the files of a folder with the manifest.

    Args:
        folder: The folder.
        files: Entries of the manifest.
        full: Read every file and verify its checksum; otherwise verify all sizes, and the checksums only of files that are parsed.

    Raises:
        DamagedIndexError: A file is missing, truncated or changed (names it).
        InputError: A file cannot be read for a reason other than damage.
    """
    for name, entry in files.items():
        verify_file(folder / name, entry.bytes, entry.sha256 if full or name.endswith(_ALWAYS_HASHED) else None)


def verify_file(path: Path, size: int, sha256: str | None) -> None:
    """Verify the size and, if given, the checksum of a file.

    Raises:
        DamagedIndexError: The file is missing, truncated or changed.
        InputError: The file cannot be read for a reason other than damage.
    """
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedIndexError(f"{path}: {found} bytes, but {size} were written; the index is damaged, run quiver index repair")
        if sha256 is not None and digests_sha256(file_digests(path)) != sha256:
            raise DamagedIndexError(f"{path}: the content has changed since it was written; the index is damaged, run quiver index repair")
    except OSError as error:
        raise unreadable(path, error) from error


def verify_state(layout: Layout, manifest: Manifest, *, shared: Collection[str] = ()) -> None:
    """Read the files of a generation and verify their checksums.

    Args:
        layout: Paths of the index.
        manifest: Manifest of the generation.
        shared: Names of codecs, segments and tombstones to skip.

    Raises:
        DamagedIndexError: A file is missing, truncated or changed (names it).
        InputError: A file cannot be read for a reason other than damage.
    """
    if manifest.codec.name not in shared:
        verify_files(layout.codecs / manifest.codec.name, manifest.codec.files, full=True)
    for segment in manifest.segments:
        if segment.name not in shared:
            verify_files(layout.segments / segment.name, segment.files, full=True)
        if segment.deleted is not None and segment.deleted.name not in shared:
            verify_alive(layout, segment)


def read_alive(layout: Layout, segment: SegmentEntry) -> NDArray[np.bool_] | None:
    """Bitmap of the rows of a segment that are not deleted, (documents,); None if none is deleted.

    Raises:
        DamagedIndexError: The tombstones are missing, or both copies in their file have changed.
    """
    if segment.deleted is None:
        return None
    whole = [bits for bits in _tombstones(layout, segment.deleted) if bits is not None]
    path = layout.tombstones / segment.deleted.name
    if not whole:
        raise DamagedIndexError(f"{path}: the content has changed since it was written; the index is damaged, run quiver index repair")
    if len(whole[0]) != -(-segment.documents // 8):
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged, run quiver index repair")
    alive: NDArray[np.bool_] = np.unpackbits(whole[0], count=segment.documents, bitorder="little") == 0
    if int(np.count_nonzero(alive)) != segment.alive:
        raise DamagedIndexError(f"{path}: does not fit its segment; the index is damaged, run quiver index repair")
    return alive


def verify_alive(layout: Layout, segment: SegmentEntry) -> None:
    """Verify both copies of a segment's tombstones.

    Raises:
        DamagedIndexError: The file is missing, or a copy has changed.
    """
    read_alive(layout, segment)
    if segment.deleted is not None and any(bits is None for bits in _tombstones(layout, segment.deleted)):
        path = layout.tombstones / segment.deleted.name
        raise DamagedIndexError(f"{path}: one of its two copies has changed; quiver index repair writes it again")


def _tombstones(layout: Layout, entry: TombstonesEntry) -> list[NDArray[np.uint8] | None]:
    """The two copies of the tombstones; None for a damaged one."""
    path = layout.tombstones / entry.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    half = entry.bytes // 2
    copies = [content[:half], content[half : entry.bytes]]
    return [np.frombuffer(copy, np.uint8) if hashlib.sha256(copy).hexdigest() == entry.sha256 else None for copy in copies]


def tombstones_bytes(alive: NDArray[np.bool_]) -> bytes:
    """Content of tombstones: one bit per row, set if it is deleted."""
    return np.packbits(~alive, bitorder="little").tobytes()
