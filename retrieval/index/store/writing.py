"""Changing an index: a single writer, atomic commits, and removal of files that are no longer needed.

A commit is: the new files, each synced, in folders that are synced; the folders renamed to where readers look; then the manifest,
written and synced under another name, is linked to the name of its generation. Before that link the index is the old one, after it
the new one, and there is no state between. Nothing reads the leftovers of a killed writer; the next writer removes them.
Source of the order of calls: the commits of Lucene, https://blog.mikemccandless.com/2014/04/testing-lucenes-index-durability-after.html.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.work_folder import SEAL, exclusive_lock
from quiver.retrieval.index.files import (
    CHECKSUMS,
    COPY,
    REAL,
    VERSION,
    DamagedIndexError,
    Disk,
    FileEntry,
    digests_sha256,
    file_digests,
    format_line,
    format_version,
    link_if_absent,
    make_folders,
    put_file,
    remove,
    remove_tree,
    write_file,
)
from quiver.retrieval.index.store.reading import (
    CodecEntry,
    Layout,
    Manifest,
    SegmentEntry,
    TombstonesEntry,
    check_format,
    entries,
    head_bytes,
    head_generation,
    is_resumable,
    manifest_bytes,
    newest_manifest,
    read_manifest,
    tombstones_bytes,
    verify_files,
)
from quiver.retrieval.records import TokenCounts

logger = logging.getLogger(__name__)

KEPT = 2
"""Number of generations kept: the newest, and the previous one for readers that are opening it and for repair."""

UNFINISHED_SECONDS = 7 * 24 * 3600.0
"""Age in seconds, counted from the last finished piece, at which the next writer removes the work of an interrupted build."""

# Files that a writer may leave behind if it is killed or runs out of space right after it created an index.
_BEGINNINGS = ("LOCK", "FORMAT.tmp", "HEAD", "HEAD.tmp")
# Name of a manifest in the temporary folder during its commit.
_MANIFEST = "manifest.json"


class StoreWriter:
    """Changes one index; `writing` holds the lock meanwhile. ``manifest`` is the newest one, None before the first commit."""

    def __init__(self, layout: Layout, disk: Disk, manifest: Manifest | None) -> None:
        self.layout = layout
        self.disk = disk
        self.manifest = manifest
        generations = layout.generations()
        self.generation = max([*generations[-1:], head_generation(layout) or 0]) + 1
        self._segments = 0
        # Without a readable manifest, earlier generations are damaged and need not be kept.
        self._kept = 1 if manifest is None else KEPT

    def scratch(self, name: str) -> Path:
        """Create an empty folder in the temporary folder; leftovers of a killed writer under that name are removed."""
        folder = self.layout.temporary / name
        if folder.exists():
            remove_tree(folder, self.disk)
        self.disk.mkdir(folder)
        return folder

    def add_codec(
        self,
        folder: Path,
        engine: str,
        parameters: Mapping[str, str | int | float | bool | None],
        holds: Mapping[str, str],
        *,
        apart: bool = False,
    ) -> CodecEntry:
        """Move a codec from a scratch folder to the folder of codecs, with a copy of its files; equal codecs are stored once.

        Args:
            folder: The scratch folder.
            engine: Name of the engine.
            parameters: Sizes and settings for reports.
            holds: Description of each file, by name.
            apart: Store the codec under a new name, because the stored codec with the same content is damaged.
        """
        self._check_alone()
        # No vector can be read without its codec, so all of it is stored twice.
        put_file(folder / COPY, b"".join((folder / file).read_bytes() for file in sorted(holds)), self.disk)
        files = seal(folder, {**holds, COPY: "a copy of the other files, by name, for repair"}, self.disk)
        sums = {file: entry.sha256 for file, entry in files.items()} | {"engine": engine}
        sums |= {"generation": str(self.generation)} if apart else {}
        name = f"c-{hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:24]}"
        if self._has_codec(self.layout.codecs / name, files):
            remove_tree(folder, self.disk)
        else:
            self._adopt(folder, self.layout.codecs / name)
        return CodecEntry(engine, name, dict(parameters), files)

    def _has_codec(self, folder: Path, files: Mapping[str, FileEntry]) -> bool:
        """Whether an intact codec exists; a damaged one is removed, so that the new one repairs the generations that name it."""
        if not folder.exists():
            return False
        try:
            verify_files(folder, files, full=True)
        except DamagedIndexError as error:
            logger.warning("%s; the index is replaced", error)
            self._remove(folder)
            return False
        return True

    def add_segment(self, folder: Path, holds: Mapping[str, str], *, documents: int, vectors: int, tokens: TokenCounts) -> SegmentEntry:
        """Move a segment from a scratch folder to the folder of segments; it becomes visible with the commit."""
        self._check_alone()
        name = f"s-{self.generation:012d}-{self._segments:04d}"
        self._segments += 1
        files = seal(folder, holds, self.disk)
        self._adopt(folder, self.layout.segments / name)
        return SegmentEntry(name, documents, vectors, tokens, files, deleted=None)

    def delete(self, segment: SegmentEntry, alive: NDArray[np.bool_]) -> SegmentEntry:
        """Write new tombstones for a segment and return its changed entry; ``alive`` has the rows that are not deleted, (documents,)."""
        self._check_alone()
        content = tombstones_bytes(alive)
        name = f"t-{segment.name}-{self.generation:012d}"
        path = self.layout.tombstones / name
        if path.exists():  # as in _adopt
            self.disk.unlink(path)
        write_file(path, 2 * content, self.disk)  # two copies, because no other file has this information
        self.disk.sync_folder(self.layout.tombstones)
        deleted = segment.documents - int(np.count_nonzero(alive))
        entry = TombstonesEntry(name, deleted, 2 * len(content), hashlib.sha256(content).hexdigest())
        return replace(segment, deleted=entry)

    def commit(self, manifest: Manifest) -> Manifest:
        """Commit a generation, and return its manifest as written: with generation and time.

        Raises:
            InputError: Another process has committed meanwhile: the file system does not support locks.
        """
        self._check_alone()
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = replace(manifest, generation=self.generation, created=created)
        temporary, content = self.layout.temporary / _MANIFEST, manifest_bytes(manifest)
        write_file(temporary, content, self.disk)
        # The lock ensures that no other process takes the name meanwhile, even on file systems without hard links.
        link_if_absent(temporary, self.layout.manifest(self.generation), self.disk)
        self.disk.sync_folder(self.layout.manifests)
        put_file(self.layout.head, head_bytes(self.generation, content), self.disk)
        logger.info("%s: generation %d, %d documents", self.layout.root, self.generation, manifest.documents)
        self.manifest = manifest
        self.generation += 1
        self._segments = 0
        return manifest

    def collect_garbage(self) -> list[Path]:
        """Remove generations that readers no longer need, and the files that only they use; return the removed paths."""
        removed = [self.layout.manifest(generation) for generation in self.layout.generations()[: -self._kept]]
        # Oldest first, and manifests before files: after a kill, every remaining manifest still has all its files.
        for path in removed:
            self.disk.unlink(path)
        if removed:
            self.disk.sync_folder(self.layout.manifests)
        for path in unreferenced(self.layout, self.layout.generations()):
            self._remove(path)
            removed.append(path)
        return removed

    def quarantine(self, *, replaced: Mapping[Path, bytes]) -> list[Path]:
        """Move what the newest generation does not need, and old content of overwritten files, to the quarantine; return the new paths."""
        newest = self.layout.generations()[-1]
        place = self.layout.quarantine / f"{newest:012d}"
        make_folders(place, self.disk)
        manifests = [self.layout.manifest(generation) for generation in self.layout.generations()[:-1]]
        moved = []
        # Manifests last: if this writer is killed, the next one would remove files that no manifest names as leftovers.
        for path in [*unreferenced(self.layout, [newest]), *manifests]:
            self.disk.rename(path, place / path.name)
            moved.append(place / path.name)
        for path, content in replaced.items():
            write_file(place / path.name, content, self.disk)
            moved.append(place / path.name)
        for folder in (place, self.layout.segments, self.layout.codecs, self.layout.tombstones, self.layout.manifests):
            self.disk.sync_folder(folder)
        return moved

    def _check_alone(self) -> None:
        """Detect that the lock has failed to exclude another process, before its files are mistaken for leftovers."""
        generations = self.layout.generations()
        if generations and generations[-1] >= self.generation:
            raise InputError(
                f"{self.layout.root}: another process changed this index at the same time, because its file system does not support locks; "
                "this change was discarded: repeat it"
            )

    def _adopt(self, folder: Path, target: Path) -> None:
        if target.exists():  # its name has the coming generation in it: a killed commit has left it
            remove_tree(target, self.disk)
        self.disk.rename(folder, target)
        self.disk.sync_folder(target.parent)

    def _remove(self, path: Path) -> None:
        if not path.is_dir():
            self.disk.unlink(path)
            return
        # Rename first, so that a folder with a final name is always complete.
        doomed = self.layout.doomed(path.name)
        self.disk.rename(path, doomed)
        remove_tree(doomed, self.disk)


@contextmanager
def writing(
    root: Path, *, create: bool = False, overwrite: bool = False, damaged: bool = False, wait: float = 0.0, disk: Disk = REAL
) -> Iterator[StoreWriter]:
    """Hold the lock of an index and change it.

    Args:
        root: Folder of the index.
        create: Create the index; the folder must be missing, empty, or hold a build that was never finished.
        overwrite: With ``create``: allow an existing index, damaged or not; it stays unchanged until the commit.
        damaged: Allow damaged manifests; the writer then may have no manifest.
        wait: Seconds to wait for another writer to finish.
        disk: Performs all writes.

    Raises:
        InputError: The folder is not an index (or is one, with ``create`` but not ``overwrite``), cannot be written, or another
            process is still writing to it after ``wait`` seconds.
        DamagedIndexError: A manifest is damaged.
    """
    layout = Layout(root.resolve())
    made = not layout.root.exists()
    if create:
        check_place(layout.root, overwrite=overwrite)
        try:
            make_folders(layout.root, disk)
        except OSError as error:
            raise InputError(f"{layout.root}: cannot be written ({error.strerror})") from error
    elif not damaged or not layout.generations():
        check_format(layout)
    if not 0 <= wait < math.inf:  # a negative timeout would wait for ever
        raise ValueError(f"wait must be a finite number of seconds >= 0, got {wait}")
    remedy = "try again later, or wait longer" if wait else "try again later, or wait for it: --wait 30s (wait=30 in Python)"
    with exclusive_lock(layout.lock, "writing to this index", remedy=remedy, wait=wait, keep=True):
        try:
            if create:
                check_place(layout.root, overwrite=overwrite)  # check again, now that the lock is held
            _prepare(layout, disk)
            yield StoreWriter(layout, disk, _sweep(layout, disk, damaged=damaged or overwrite))
        finally:
            if create:
                remove_unused(layout, remove_root=made)


def check_place(root: Path, *, overwrite: bool) -> None:
    """Check that an index can be built in a folder; raises InputError if one exists and ``overwrite`` is false, or it has other content."""
    version, committed = format_version(root), bool(Layout(root).generations())
    if version is not None and version > VERSION:
        raise InputError(f"{root}: an index of format version {version}, which a newer Quiver wrote; choose another folder")
    if committed and not overwrite:
        raise InputError(
            f"{root}: an index exists already; choose another folder, or overwrite it with --overwrite (overwrite=True in Python)"
        )
    if committed or version is not None:
        return
    if root.is_file():
        raise InputError(f"{root}: a file, not a folder; choose another folder")
    if root.is_dir() and any(entry.name not in _BEGINNINGS for entry in root.iterdir()):
        raise InputError(f"{root}: the folder is neither empty nor an index; choose another folder")


def seal(folder: Path, holds: Mapping[str, str], disk: Disk) -> dict[str, FileEntry]:
    """Make the files of a folder durable, compute their checksums, and write the file with the digests of their blocks."""
    if (folder / SEAL).exists():  # of a piece of a build; from now on the manifest has the checksums
        disk.unlink(folder / SEAL)
    files, stored = {}, bytearray()
    for name in sorted(holds):
        path = folder / name
        disk.sync_file(path)
        digests = file_digests(path)
        stored += digests.tobytes()
        files[name] = FileEntry(holds[name], path.stat().st_size, digests_sha256(digests))
    checksums = folder / CHECKSUMS
    if checksums.exists():  # of the work that a build may resume
        disk.unlink(checksums)
    write_file(checksums, bytes(stored), disk)
    disk.sync_folder(folder)
    return files


def _prepare(layout: Layout, disk: Disk) -> None:
    """Create the missing parts of a new index, the FORMAT file first."""
    if format_version(layout.root) != VERSION:
        put_file(layout.format, format_line(VERSION), disk)
    if not layout.head.exists() and not layout.generations():
        put_file(layout.head, head_bytes(0, b""), disk)
    missing = [folder for folder in layout.folders if not folder.is_dir()]
    for folder in missing:
        disk.mkdir(folder)
    # Before the first commit, sync even if nothing is missing: a killed process may have created these names without syncing them.
    if missing or not layout.generations():
        disk.sync_folder(layout.root)


def _sweep(layout: Layout, disk: Disk, *, damaged: bool) -> Manifest | None:
    """Remove leftovers of killed processes and return the newest manifest; None if it is damaged and ``damaged`` is true."""
    for path in entries(layout.temporary):
        if is_resumable(path.name):
            if time.time() - path.stat().st_mtime <= UNFINISHED_SECONDS:
                continue
            logger.warning("%s: removed unfinished work older than %g days", path, UNFINISHED_SECONDS / 86_400)
        remove(path, disk)
    generations = layout.generations()
    try:
        leftovers = unreferenced(layout, generations)
        manifest = newest_manifest(layout) if generations or head_generation(layout) else None
    except DamagedIndexError:
        if not damaged:
            raise
        return None
    if manifest is not None and head_generation(layout) != manifest.generation:  # a writer was killed right after its commit
        put_file(layout.head, head_bytes(manifest.generation, manifest_bytes(manifest)), disk)
    for path in leftovers:
        logger.info("%s: removed; an interrupted commit left it", path)
        remove(path, disk)
    return manifest


def unreferenced(layout: Layout, generations: Sequence[int]) -> list[Path]:
    """Segments, codecs and tombstones that none of these generations names; raises DamagedIndexError for a damaged manifest."""
    needed: set[str] = set()
    for generation in generations:
        manifest = read_manifest(layout.manifest(generation))
        needed |= {manifest.codec.name, *(segment.name for segment in manifest.segments)}
        needed |= {segment.deleted.name for segment in manifest.segments if segment.deleted}
    folders = (layout.segments, layout.codecs, layout.tombstones)
    return [path for folder in folders for path in entries(folder) if path.name not in needed]


def remove_unused(layout: Layout, *, remove_root: bool) -> None:
    """Remove the folder of a new index that has no generation and no work to resume.

    This cleans up after an error and must not hide it, so files that cannot be removed are ignored.
    """
    if layout.generations() or entries(layout.temporary):
        return
    with suppress(OSError):
        for folder in layout.folders:
            if folder.is_dir():
                folder.rmdir()
        layout.format.unlink(missing_ok=True)
        for name in _BEGINNINGS:
            (layout.root / name).unlink(missing_ok=True)
        if remove_root:
            layout.root.rmdir()
