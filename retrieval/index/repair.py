"""Repair of a damaged index: keep everything that can still be read, and move damaged files to the quarantine.

A repair commits one new generation. Its content is that of the newest generation whose manifest can be read, from the manifest or from its
copy in HEAD. Of a damaged segment it keeps every row whose blocks are whole:

1. A block with one flipped bit is corrected: its digest locates the bit.
2. A row with vectors or an id in another damaged block is lost; texts, metadata and token counts are optional parts of a row.
3. A lost row is taken from an older generation that has it in a segment of its own.

Damaged files are moved to a folder in ``quarantine``, which no command reads; the owner deletes it.

Ids, texts and metadata partly repeat each other. A lost id is taken from the stored text of its document, and lost metadata from the
stored texts; only what is lost in both places is lost.

Shapes: P documents of a segment.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import exact
from quiver.retrieval.index.disk import REAL, Disk, write_file
from quiver.retrieval.index.documents.metadata import MetadataTable, MetadataWriter, is_metadata
from quiver.retrieval.index.documents.strings import STEM, IdTable, StringColumn, Texts, lost_line
from quiver.retrieval.index.documents.table import DocumentTable, open_tokens
from quiver.retrieval.index.engine_table import open_codec
from quiver.retrieval.index.engines import AnyCodec, Bitmap
from quiver.retrieval.index.errors import DamagedIndexError, LostTextError
from quiver.retrieval.index.mapped import (
    BLOCK,
    CHECKSUMS,
    CheckedArray,
    Files,
    SalvagedFile,
    block_digest,
    corrected,
    count_blocks,
    read_digests,
)
from quiver.retrieval.index.segments import OpenSegment, merge_segments
from quiver.retrieval.index.store.checking import check_index
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.index.store.manifest import FileEntry, Manifest, SegmentEntry, parse_manifest, read_manifest
from quiver.retrieval.index.store.reading import head_generation, head_manifest, read_alive, verify_alive, verify_file
from quiver.retrieval.index.store.writing import StoreWriter, writing

# How many ids are decoded at a time.
_TOGETHER = 65_536


@dataclass(frozen=True)
class SalvagedDocuments:
    """What is left of the documents of a segment.

    Attributes:
        table: The documents; the id of a row that has none left is empty.
        ids: Their ids by row; None where an id is lost.
        without_text: Rows whose text is lost, (P,).
        without_fields: Rows whose metadata is lost, (P,).
    """

    table: DocumentTable
    ids: Sequence[str | None]
    without_text: NDArray[np.bool_]
    without_fields: NDArray[np.bool_]


def salvage_documents(files: Files, count: int, *, texts: bool, fields: Sequence[str] | None) -> SalvagedDocuments:
    """Read the documents of a segment around the damage of its files.

    Args:
        files: The segment's, the damaged ones salvaged.
        count: Number of documents P.
        texts: Whether their texts were kept.
        fields: The fields of the metadata that were kept; None for all.

    Raises:
        DamagedIndexError: The files do not fit each other.
    """
    strings = StringColumn.open(files, STEM, count)
    lines = Texts(files, count) if texts else None
    without_text = np.zeros(count, bool) if lines is None else lines.lost()
    ids = _ids(strings, lines, without_text)
    if lines is not None:
        instead = {row: lost_line(ids[row] or "") for row in np.flatnonzero(without_text).tolist()}
        lines = Texts(files, count, instead=instead)
    metadata, without_fields = _metadata(files, count, lines, fields)
    stored = open_tokens(files, count)
    tokens = np.where(stored.damaged(), 0, stored.whole()).astype(np.uint32)
    packed = StringColumn.pack(key or "" for key in ids)
    nothing = CheckedArray(np.zeros(0, np.uint64))
    table = DocumentTable(IdTable(packed, nothing, nothing, nothing), metadata, CheckedArray(tokens), lines)
    return SalvagedDocuments(table, ids, without_text, without_fields)


def _ids(strings: StringColumn, lines: Texts | None, without_text: NDArray[np.bool_]) -> list[str | None]:
    lost = strings.lost()
    ids: list[str | None] = [None] * len(strings)
    whole = np.flatnonzero(~lost)
    for start in range(0, len(whole), _TOGETHER):
        rows = whole[start : start + _TOGETHER]
        for row, key in zip(rows.tolist(), strings.take(rows), strict=True):
            ids[row] = key
    if lines is not None:
        for row in np.flatnonzero(lost & ~without_text).tolist():
            ids[row] = str(json.loads(lines.line(row))["_id"])
    return ids


def _metadata(files: Files, count: int, lines: Texts | None, fields: Sequence[str] | None) -> tuple[MetadataTable, NDArray[np.bool_]]:
    """The columns, and the rows whose metadata is lost."""
    if not any(is_metadata(name) for name in files.lost_names):
        return MetadataTable.open(files), np.zeros(count, bool)
    if lines is None:
        return MetadataTable([]), np.ones(count, bool)
    writer, lost = MetadataWriter(fields), np.zeros(count, bool)
    for row in range(count):
        try:
            writer.add(lines[row].metadata)
        except (LostTextError, DamagedIndexError):
            writer.add(None)
            lost[row] = True
    return MetadataTable(writer.columns()), lost


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RepairReport:
    """What `repair_index` did, or would do.

    Attributes:
        dry_run: Whether nothing was changed.
        generation: The newest generation; that of the repair where there was one.
        restored: The generation whose content it has.
        problems: What was damaged.
        corrected: Files in which flipped bits were turned back.
        documents_before: Documents of the newest generation before; None where its manifest was lost.
        documents: Documents after.
        lost: Ids of the documents that are lost.
        lost_unnamed: Lost documents whose ids are lost too.
        recovered: Ids of documents that were taken from an older generation; where a document was replaced or deleted since, that is
            undone.
        without_text: Ids of documents whose text is lost and that can still be found.
        without_fields: Ids of documents whose metadata is lost and that can still be found.
        undone_deletions: Documents whose deletion is lost, so that they are found again.
        quarantined: What was moved to the quarantine, by its place there.
    """

    dry_run: bool
    generation: int
    restored: int
    problems: tuple[str, ...] = ()
    corrected: tuple[str, ...] = ()
    documents_before: int | None = None
    documents: int = 0
    lost: tuple[str, ...] = ()
    lost_unnamed: int = 0
    recovered: tuple[str, ...] = ()
    without_text: tuple[str, ...] = ()
    without_fields: tuple[str, ...] = ()
    undone_deletions: int = 0
    quarantined: tuple[Path, ...] = ()


@dataclass
class _Losses:
    """What the segments of a state have lost; collected while they are looked at."""

    corrected: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lost_unnamed: int = 0
    recovered: list[str] = field(default_factory=list)
    without_text: list[str] = field(default_factory=list)
    without_fields: list[str] = field(default_factory=list)
    undone_deletions: int = 0


@dataclass(frozen=True)
class _Folder:
    """The files of a segment or codec, damaged ones salvaged.

    Attributes:
        path: The folder.
        files: The manifest's entries.
        salvaged: File name -> what is left of it, for damaged files.
        has_checksums: Whether the file of checksums is what it was.
    """

    path: Path
    files: Mapping[str, FileEntry]
    salvaged: Mapping[str, SalvagedFile]
    has_checksums: bool

    @property
    def is_whole(self) -> bool:
        """Whether the folder can stay as it is."""
        return not self.salvaged and self.has_checksums

    @property
    def is_lost(self) -> bool:
        """Whether anything is damaged that was not corrected."""
        return any(file.lost.any() for file in self.salvaged.values())

    def write(self, folder: Path, disk: Disk) -> dict[str, str]:
        """Write corrected files into an empty folder; file name -> what it holds."""
        for name in self.files:
            content = self.salvaged[name].content if name in self.salvaged else np.fromfile(self.path / name, np.uint8)
            write_file(folder / name, content.tobytes(), disk)
        return {name: entry.holds for name, entry in self.files.items()}


@dataclass(frozen=True)
class _Part:
    """A segment of the repaired state.

    Attributes:
        entry: As the manifest had it.
        keep: It is whole and stays as it is.
        folder: Its files, where all that was damaged could be corrected.
        segment: Otherwise the rows that are kept, if any.
        alive: Tombstones that have to be written again; None where those that are there hold.
    """

    entry: SegmentEntry
    keep: bool = False
    folder: _Folder | None = None
    segment: OpenSegment | None = None
    alive: Bitmap | None = None

    @property
    def documents(self) -> int:
        """Documents that are kept of it."""
        if self.keep or self.folder is not None:
            return self.entry.alive if self.alive is None else int(np.count_nonzero(self.alive))
        return 0 if self.segment is None else int(np.count_nonzero(self.segment.kept))


@dataclass(frozen=True)
class _Plan:
    """What a repair is going to commit."""

    manifest: Manifest
    codec_folder: _Folder
    codec: AnyCodec
    parts: Sequence[_Part]
    losses: _Losses

    @property
    def documents(self) -> int:
        """Documents of the repaired state."""
        return sum(part.documents for part in self.parts)


def repair_index(root: Path | str, *, dry_run: bool = False, wait: float = 0.0, disk: Disk = REAL) -> RepairReport:
    """Commit a generation of what is whole of a damaged index, and move what is damaged to its quarantine.

    Args:
        root: The index.
        dry_run: Change nothing; say what would be kept and lost.
        wait: Seconds to wait for another process that is writing.
        disk: Takes all changes.

    Raises:
        InputError: It is no index, another process is writing to it, a file may not be read, or nothing of it can be kept.
    """
    layout = Layout(Path(root).resolve())
    problems = _problems(layout)
    if dry_run:
        return _repaired(layout, problems, None, {})
    # Opening a damaged index for writing restores FORMAT, and a commit replaces HEAD: their content goes to the quarantine, too.
    before = {path: path.read_bytes() for path in (layout.format, layout.head) if path.is_file()}
    with writing(layout.root, damaged=True, wait=wait, disk=disk) as writer:
        return _repaired(layout, problems, writer, before)


def _problems(layout: Layout) -> tuple[str, ...]:
    """What is damaged in any of the states."""
    try:
        report = check_index(layout.root)
    except DamagedIndexError as error:  # the file that says what the folder is
        return (str(error),)
    if not report.generations and not report.head_problems:
        raise InputError(f"{layout.root}: nothing has been committed; build the index again")
    return (*report.head_problems, *(problem for each in report.generations for problem in each.problems))


def _repaired(layout: Layout, problems: tuple[str, ...], writer: StoreWriter | None, before: Mapping[Path, bytes]) -> RepairReport:
    """Plan a repair, and carry it out where there is a writer."""
    if not problems:
        newest = read_manifest(layout.manifest(layout.generations()[-1]))
        count = newest.documents
        return RepairReport(writer is None, newest.generation, newest.generation, documents_before=count, documents=count)
    plan, documents_before = _plan(layout)
    losses = plan.losses
    found = RepairReport(
        dry_run=writer is None,
        generation=plan.manifest.generation,
        restored=plan.manifest.generation,
        problems=tuple(dict.fromkeys(problems)),
        corrected=tuple(losses.corrected),
        documents_before=documents_before,
        documents=plan.documents,
        lost=tuple(losses.lost),
        lost_unnamed=losses.lost_unnamed,
        recovered=tuple(losses.recovered),
        without_text=tuple(losses.without_text),
        without_fields=tuple(losses.without_fields),
        undone_deletions=losses.undone_deletions,
    )
    if writer is None:
        return found
    committed = writer.commit(_written(writer, plan))
    replaced = {path: content for path, content in before.items() if path.read_bytes() != content}
    return replace(found, generation=committed.generation, quarantined=tuple(writer.quarantine(replaced=replaced)))


def _plan(layout: Layout) -> tuple[_Plan, int | None]:
    """The repair that keeps most, and the documents of the newest state where that is known."""
    states = _states(layout)
    newest = max([*layout.generations(), head_generation(layout) or 0])
    for place, manifest in enumerate(states):
        losses = _Losses()
        try:
            folder, codec = _codec(layout, manifest, losses)
        except DamagedIndexError as error:
            logger.warning("generation %d cannot be restored: %s", manifest.generation, error)
            continue
        older = states[place + 1 :]
        parts = [_part(layout, manifest, entry, codec, older, losses) for entry in manifest.segments]
        parts += _recovered(layout, manifest, codec, older, parts, losses)
        plan = _Plan(manifest, folder, codec, parts, losses)
        if plan.documents or not manifest.documents:
            return plan, manifest.documents if manifest.generation == newest else None
    raise InputError(f"{layout.root}: no document can be restored; build the index again")


def _states(layout: Layout) -> list[Manifest]:
    """The states whose manifests can be read, newest first: from their files, or from the copy in the head."""
    found: dict[int, Manifest] = {}
    for generation in layout.generations():
        try:
            found[generation] = read_manifest(layout.manifest(generation))
        except (DamagedIndexError, FileNotFoundError) as error:
            logger.info("%s", error)
    if copy := head_manifest(layout):
        try:
            manifest = parse_manifest(copy, layout.head)
            found.setdefault(manifest.generation, manifest)
        except DamagedIndexError as error:
            logger.info("%s", error)
    return [found[generation] for generation in sorted(found, reverse=True)]


def _codec(layout: Layout, manifest: Manifest, losses: _Losses) -> tuple[_Folder, AnyCodec]:
    """The codec of a state.

    Raises:
        DamagedIndexError: Some of it is lost, and with it the meaning of all vectors.
    """
    folder = _salvaged(layout.codecs / manifest.codec.name, manifest.codec.files, losses)
    if folder.is_lost and (content := exact.codec_content(manifest.kind, manifest.model.dim)) is not None:
        folder = _rebuilt(folder, content)
    if folder.is_lost:
        raise DamagedIndexError(f"{folder.path}: the codec is damaged; no vector can be read without it")
    if not folder.salvaged:
        return folder, open_codec(manifest.kind, folder.path)
    with tempfile.TemporaryDirectory() as name:
        folder.write(Path(name), REAL)
        return folder, open_codec(manifest.kind, Path(name))


def _rebuilt(folder: _Folder, content: Mapping[str, bytes]) -> _Folder:
    """A codec of which nothing has to be read, since the manifest says all that it holds."""
    salvaged = dict(folder.salvaged)
    for name, whole in content.items():
        if name in salvaged and len(whole) == folder.files[name].bytes:
            salvaged[name] = SalvagedFile(np.frombuffer(whole, np.uint8), np.zeros(count_blocks(len(whole)), bool))
    return replace(folder, salvaged=salvaged)


def _part(layout: Layout, manifest: Manifest, entry: SegmentEntry, codec: AnyCodec, older: Sequence[Manifest], losses: _Losses) -> _Part:
    """What is kept of a segment."""
    folder = _salvaged(layout.segments / entry.name, entry.files, losses)
    alive, changed = _alive(layout, manifest, entry, older, losses)
    if folder.is_lost:
        return _Part(entry, segment=_rows(folder, manifest, entry, codec, alive, losses))
    if folder.is_whole:
        return _Part(entry, alive=alive if changed else None, keep=True)
    return _Part(entry, folder=folder, alive=alive)


def _alive(layout: Layout, manifest: Manifest, entry: SegmentEntry, older: Sequence[Manifest], losses: _Losses) -> tuple[Bitmap, bool]:
    """The rows that are not deleted, (P,), and whether that has to be written again."""
    everything = np.ones(entry.documents, bool)
    if entry.deleted is None:
        return everything, False
    try:
        alive = read_alive(layout, entry)
    except DamagedIndexError:
        alive = _alive_before(layout, entry, older)
        alive = (everything if alive is None else alive) & ~_replaced(layout, manifest, entry)
        losses.undone_deletions += int(np.count_nonzero(alive)) - entry.alive
        return alive, True
    try:
        verify_alive(layout, entry)
    except DamagedIndexError:
        return everything if alive is None else alive, True
    return everything if alive is None else alive, False


def _replaced(layout: Layout, manifest: Manifest, entry: SegmentEntry) -> Bitmap:
    """The rows of a segment whose ids stand in a later one: adding that one deleted them."""
    place = [each.name for each in manifest.segments].index(entry.name)
    later = set[str | None]().union(*(_ids_of(layout, manifest, each) for each in manifest.segments[place + 1 :])) - {None}
    ids = _ids_of(layout, manifest, entry) or [None] * entry.documents
    return np.array([key in later for key in ids], bool)


def _ids_of(layout: Layout, manifest: Manifest, entry: SegmentEntry) -> Sequence[str | None]:
    """The ids of a segment by row, None where one is lost; nothing where all are."""
    folder, policy = _salvaged(layout.segments / entry.name, entry.files, _Losses()), manifest.policy
    files = Files(folder.path, salvaged=folder.salvaged)
    try:
        return salvage_documents(files, entry.documents, texts=policy.store_text, fields=policy.fields).ids
    except DamagedIndexError as error:
        logger.info("%s", error)
        return ()


def _alive_before(layout: Layout, entry: SegmentEntry, older: Sequence[Manifest]) -> Bitmap | None:
    """The rows of a segment that an older state has not deleted; None where no older state says so."""
    for manifest in older:
        for former in manifest.segments:
            if former.name == entry.name and former.deleted is not None:
                try:
                    return read_alive(layout, former)
                except DamagedIndexError as error:
                    logger.info("%s", error)
    return None


def _rows(folder: _Folder, manifest: Manifest, entry: SegmentEntry, codec: AnyCodec, alive: Bitmap, losses: _Losses) -> OpenSegment | None:
    """The rows of a damaged segment that are kept; None where there are none."""
    files, policy = Files(folder.path, salvaged=folder.salvaged), manifest.policy
    try:
        vectors = codec.open(files, entry.documents)
        documents = salvage_documents(files, entry.documents, texts=policy.store_text, fields=policy.fields)
    except DamagedIndexError as error:
        logger.warning("%s", error)
        losses.lost_unnamed += int(np.count_nonzero(alive))
        return None
    named = np.array([key is not None for key in documents.ids], bool)
    keep = alive & named & ~vectors.damaged()
    losses.lost += _named(documents, alive & named & ~keep)
    losses.lost_unnamed += int(np.count_nonzero(alive & ~named))
    losses.without_text += _named(documents, keep & documents.without_text)
    losses.without_fields += _named(documents, keep & documents.without_fields)
    return OpenSegment(documents.table, vectors, keep) if keep.any() else None


def _named(documents: SalvagedDocuments, rows: Bitmap) -> list[str]:
    return [documents.ids[row] or "" for row in np.flatnonzero(rows).tolist()]


def _recovered(
    layout: Layout, manifest: Manifest, codec: AnyCodec, older: Sequence[Manifest], parts: Sequence[_Part], losses: _Losses
) -> list[_Part]:
    """Lost documents as segments of older states have them, which the damaged state replaced by others."""
    if not losses.lost and not losses.lost_unnamed:
        return []
    wanted, found = set(losses.lost), []
    # Where ids are lost, too, whatever an older state has and this one has not may be one of them.
    known = _known_ids(layout, manifest, parts) if losses.lost_unnamed else None
    seen = {entry.name for entry in manifest.segments}
    for state in older:
        for entry in state.segments if state.codec.name == manifest.codec.name else ():
            if entry.name in seen:
                continue
            seen.add(entry.name)
            part = _recovered_rows(layout, state, entry, codec, wanted, known)
            if part is not None and part.segment is not None:
                ids = part.segment.documents.ids.strings.take(np.flatnonzero(part.segment.kept))
                found.append(part)
                losses.recovered += ids
                wanted -= set(ids)
                known = None if known is None else known | set(ids)
    unnamed = len(losses.recovered) - len(set(losses.lost) - wanted)
    losses.lost = [key for key in losses.lost if key in wanted]
    losses.lost_unnamed = max(0, losses.lost_unnamed - unnamed)
    return found


def _recovered_rows(
    layout: Layout, state: Manifest, entry: SegmentEntry, codec: AnyCodec, wanted: Set[str], known: Set[str] | None
) -> _Part | None:
    """The rows of an older segment that are wanted by id, or whose ids are not known."""
    folder = _salvaged(layout.segments / entry.name, entry.files, _Losses())
    alive, _ = _alive(layout, state, entry, (), _Losses())
    segment = _rows(folder, state, entry, codec, alive, _Losses())
    if segment is None:
        return None
    chosen = np.zeros(entry.documents, bool)
    rows = np.flatnonzero(segment.kept)
    for row, key in zip(rows.tolist(), segment.documents.ids.strings.take(rows), strict=True):
        chosen[row] = key in wanted or (known is not None and key not in known)
    return _Part(entry, segment=replace(segment, alive=chosen)) if chosen.any() else None


def _known_ids(layout: Layout, manifest: Manifest, parts: Sequence[_Part]) -> Set[str]:
    """The ids of a state, deleted ones included, as far as they are whole."""
    known: set[str] = set()
    for part in parts:
        known |= {key for key in _ids_of(layout, manifest, part.entry) if key is not None}
    return known


def _salvaged(path: Path, files: Mapping[str, FileEntry], losses: _Losses) -> _Folder:
    """The files of a folder with flipped bits corrected, and what else is damaged marked."""
    digests = read_digests(path, files)
    salvaged = {}
    for name, entry in files.items():
        try:
            verify_file(path / name, entry.bytes, entry.sha256)
        except DamagedIndexError:
            salvaged[name] = _salvaged_file(path / name, entry, digests[name], losses)
    stored = b"".join(digests[name].tobytes() for name in sorted(files))
    checksums = path / CHECKSUMS
    return _Folder(path, files, salvaged, checksums.is_file() and checksums.read_bytes() == stored)


def _salvaged_file(path: Path, entry: FileEntry, digests: NDArray[np.uint8], losses: _Losses) -> SalvagedFile:
    content = _content(path, entry.bytes)
    blocks = [slice(start, start + BLOCK) for start in range(0, entry.bytes, BLOCK)]
    wanted = [digest.tobytes() for digest in digests]
    lost = np.array([block_digest(content[block].data) != digest for block, digest in zip(blocks, wanted, strict=True)], bool)
    flipped = np.flatnonzero(lost).tolist()
    for number in flipped:
        whole = corrected(content[blocks[number]].tobytes(), wanted[number])
        if whole is not None:
            content[blocks[number]] = np.frombuffer(whole, np.uint8)
            lost[number] = False
    if turned := len(flipped) - int(np.count_nonzero(lost)):
        losses.corrected.append(f"{path}: {turned} flipped bit{'s' if turned > 1 else ''} turned back")
    return SalvagedFile(content, lost)


def _content(path: Path, size: int) -> NDArray[np.uint8]:
    """The bytes of a damaged file, which may be changed in memory; zeros where it is too short or missing."""
    there = path.stat().st_size if path.is_file() else 0
    if there == size and size:
        return np.asarray(np.memmap(path, np.uint8, "c"))
    content = np.zeros(size, np.uint8)
    if there:
        part = np.fromfile(path, np.uint8, min(there, size))
        content[: len(part)] = part
    return content


def _written(writer: StoreWriter, plan: _Plan) -> Manifest:
    """The manifest of a repair, whose new files are written."""
    codec = plan.manifest.codec
    if not plan.codec_folder.is_whole:
        scratch = writer.scratch("codec")
        holds = plan.codec_folder.write(scratch, writer.disk)
        codec = writer.add_codec(scratch, codec.engine, codec.parameters, holds, apart=True)
    segments = [entry for part in plan.parts for entry in _written_part(writer, plan.codec, part)]
    return replace(plan.manifest, operation="repair", codec=codec, segments=tuple(segments))


def _written_part(writer: StoreWriter, codec: AnyCodec, part: _Part) -> list[SegmentEntry]:
    entry = part.entry
    if part.keep:
        return [entry if part.alive is None else writer.delete(entry, part.alive)]
    if part.folder is not None:
        scratch = writer.scratch("repair")
        holds = part.folder.write(scratch, writer.disk)
        copied = writer.add_segment(scratch, holds, documents=entry.documents, vectors=entry.vectors, tokens=entry.tokens)
        return [copied if part.alive is None or part.alive.all() else writer.delete(copied, part.alive)]
    if part.segment is None:
        return []
    scratch = writer.scratch("repair")
    merged = merge_segments([part.segment], codec, scratch, writer.disk)
    return [writer.add_segment(scratch, merged.holds, documents=merged.documents, vectors=merged.vectors, tokens=merged.tokens)]
