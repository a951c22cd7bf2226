"""Check and repair of an index: find damaged files, keep everything that can still be read.

`check_index` reads every byte and compares it with its checksum. `repair_index` commits one new generation and moves damaged files to a
folder in ``quarantine``, which no command reads; its owner deletes it. The content is that of the newest generation whose manifest can be
read, from the manifest or from its copy in HEAD. A repair keeps every row of a damaged segment whose blocks are intact:

1. A block with one flipped bit is corrected: its digest locates the bit.
2. A row with vectors or an id in another damaged block is lost; texts, metadata and token counts are optional parts of a row. The
   words of BM25 are counted again from a row's text.
3. A lost row is taken from an older generation that has it in a segment of its own.

Ids, texts and metadata are partly redundant. A lost id is read from the stored text of its document, and lost metadata from the stored
texts; only data damaged in both places is lost.

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
from quiver.retrieval.index import exact, words
from quiver.retrieval.index.documents import DocumentTable, MetadataTable, MetadataWriter, is_metadata, open_tokens
from quiver.retrieval.index.engines import AnyCodec, Bitmap, open_codec
from quiver.retrieval.index.files import (
    BLOCK,
    CHECKSUMS,
    REAL,
    CheckedArray,
    DamagedIndexError,
    Disk,
    Files,
    LostTextError,
    SalvagedFile,
    block_digest,
    corrected,
    count_blocks,
    read_digests,
    write_file,
)
from quiver.retrieval.index.index import OpenSegment, merge_segments
from quiver.retrieval.index.store.reading import (
    FileEntry,
    Layout,
    Manifest,
    SegmentEntry,
    check_format,
    entries,
    head_bytes,
    head_generation,
    head_manifest,
    parse_manifest,
    read_alive,
    read_manifest,
    verify_alive,
    verify_file,
)
from quiver.retrieval.index.store.writing import StoreWriter, unreferenced, writing
from quiver.retrieval.index.strings import STEM, IdTable, StringColumn, Texts, lost_line


@dataclass(frozen=True)
class GenerationReport:
    """Result of checking one generation.

    Attributes:
        generation: Its number.
        manifest: Its manifest; None if damaged.
        problems: Descriptions of the damage, one line each.
    """

    generation: int
    manifest: Manifest | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_index`.

    Attributes:
        generations: All existing generations, oldest first; readers open the last.
        leftovers: Files and folders that no generation needs: of an interrupted build, an incomplete commit, or a writer at work.
        head_problems: Problems of HEAD or of the manifest that it names; the newest generation may be missing.
    """

    generations: tuple[GenerationReport, ...]
    leftovers: tuple[Path, ...]
    head_problems: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Descriptions of the damage in the newest generation."""
        return (*self.head_problems, *(self.generations[-1].problems if self.generations else ()))


def check_index(root: Path | str) -> CheckReport:
    """Read every file of every generation and compare it with its checksum; nothing is changed.

    This takes minutes for a large index, and a writer may commit meanwhile: a generation that is removed during the check is left out of
    the report.

    Raises:
        InputError: The folder is not an index, has another format version, or a file cannot be read for a reason other than damage.
    """
    layout = Layout(Path(root).resolve())
    check_format(layout)
    reports: tuple[GenerationReport, ...] = ()
    while not reports and (generations := layout.generations()):
        checked = [_check_generation(layout, generation) for generation in generations]
        there = set(layout.generations())
        reports = tuple(report for report in checked if report.generation in there)
    return CheckReport(reports, (*_leftovers(layout), *entries(layout.temporary)), head_problems(layout))


def head_problems(layout: Layout) -> tuple[str, ...]:
    """Problems of HEAD or of the manifest that it names."""
    known = head_generation(layout)
    newest = max(layout.generations(), default=0)
    if known is None:
        committed = newest or entries(layout.segments)
        return (f"{layout.head}: missing or changed, so the newest generation is unknown",) if committed else ()
    if known > newest:
        return (f"{layout.manifest(known)}: missing, and it is the newest generation",)
    content = head_manifest(layout)
    if layout.head.read_bytes() != head_bytes(known, content) or (known and not _is_manifest(layout, content)):
        return (f"{layout.head}: changed; quiver index repair writes it again",)
    return ()


def _is_manifest(layout: Layout, content: bytes) -> bool:
    try:
        parse_manifest(content, layout.head)
    except InputError:
        return False
    return True


def _leftovers(layout: Layout) -> list[Path]:
    """Files that no generation names; empty if a generation cannot be read or a writer is removing one."""
    try:
        return unreferenced(layout, layout.generations())
    except (DamagedIndexError, FileNotFoundError):
        return []


def _check_generation(layout: Layout, generation: int) -> GenerationReport:
    try:
        manifest = read_manifest(layout.manifest(generation))
    except (DamagedIndexError, FileNotFoundError) as error:
        return GenerationReport(generation, None, (str(error),))
    problems = _folder_problems(layout.codecs / manifest.codec.name, manifest.codec.files)
    for segment in manifest.segments:
        problems += _folder_problems(layout.segments / segment.name, segment.files)
        try:
            verify_alive(layout, segment)
        except DamagedIndexError as error:
            problems.append(str(error))
    return GenerationReport(generation, manifest, tuple(problems))


def _folder_problems(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Descriptions of the damage in a folder, one line per file."""
    problems = []
    for name, entry in files.items():
        try:
            verify_file(folder / name, entry.bytes, entry.sha256)
        except DamagedIndexError as error:
            problems.append(str(error))
    stored = b"".join(digests.tobytes() for digests in read_digests(folder, files).values())
    if not problems and (not (folder / CHECKSUMS).is_file() or (folder / CHECKSUMS).read_bytes() != stored):
        problems.append(f"{folder / CHECKSUMS}: missing or changed; quiver index repair writes it again")
    return problems


# Number of ids decoded at a time.
_TOGETHER = 65_536


@dataclass(frozen=True)
class SalvagedDocuments:
    """The readable documents of a damaged segment.

    Attributes:
        table: The documents; a lost id is an empty string.
        ids: Ids by row; None if an id is lost.
        without_text: Rows whose text is lost, (P,).
        without_fields: Rows whose metadata is lost, (P,).
    """

    table: DocumentTable
    ids: Sequence[str | None]
    without_text: NDArray[np.bool_]
    without_fields: NDArray[np.bool_]


def salvage_documents(files: Files, count: int, *, texts: bool, fields: Sequence[str] | None) -> SalvagedDocuments:
    """Read the undamaged documents of a segment.

    Args:
        files: Files of the segment, with the damaged ones salvaged.
        count: Number of documents P.
        texts: Whether the segment has texts.
        fields: Metadata fields that the segment has; None for all.

    Raises:
        DamagedIndexError: The files are inconsistent.
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
    """Read the metadata columns; also return the rows whose metadata is lost."""
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
    """Result of `repair_index`, or its preview.

    Attributes:
        dry_run: Whether nothing was changed.
        generation: Number of the newest generation: the repaired one if a repair took place.
        restored: Number of the generation that was restored.
        problems: Descriptions of the damage.
        corrected: Files in which flipped bits were corrected.
        documents_before: Documents of the newest generation before the repair; None if its manifest was lost.
        documents: Documents after the repair.
        lost: Ids of lost documents.
        lost_unnamed: Number of lost documents whose ids are lost too.
        recovered: Ids of documents taken from an older generation; later replacements and deletions of these documents are undone.
        without_text: Ids of searchable documents whose text is lost.
        without_fields: Ids of searchable documents whose metadata is lost.
        undone_deletions: Number of documents whose deletion is lost; searches return them again.
        quarantined: Paths of the damaged files in the quarantine.
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
    """Losses of the segments of a generation, collected while they are read."""

    corrected: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lost_unnamed: int = 0
    recovered: list[str] = field(default_factory=list)
    without_text: list[str] = field(default_factory=list)
    without_fields: list[str] = field(default_factory=list)
    undone_deletions: int = 0


@dataclass(frozen=True)
class _Folder:
    """The files of a segment or codec, with the damaged ones salvaged.

    Attributes:
        path: The folder.
        files: Entries of the manifest.
        salvaged: Readable content of damaged files, by name.
        has_checksums: Whether the file of checksums is intact.
    """

    path: Path
    files: Mapping[str, FileEntry]
    salvaged: Mapping[str, SalvagedFile]
    has_checksums: bool

    @property
    def is_whole(self) -> bool:
        """Whether the folder can stay unchanged."""
        return not self.salvaged and self.has_checksums

    @property
    def is_lost(self) -> bool:
        """Whether any damage could not be corrected."""
        return any(file.lost.any() for file in self.salvaged.values())

    def write(self, folder: Path, disk: Disk) -> dict[str, str]:
        """Write the corrected files into an empty folder; return what each holds, by name."""
        for name in self.files:
            content = self.salvaged[name].content if name in self.salvaged else np.fromfile(self.path / name, np.uint8)
            write_file(folder / name, content.tobytes(), disk)
        return {name: entry.holds for name, entry in self.files.items()}


@dataclass(frozen=True)
class _Part:
    """A segment of the repaired generation.

    Attributes:
        entry: Entry of the damaged manifest.
        keep: Whether the segment is intact and stays unchanged.
        folder: The corrected files, if all damage could be corrected.
        segment: Otherwise the rows that are kept, if any.
        alive: Bitmap of rows that are not deleted, if it has to be written again; None if the stored one is intact.
    """

    entry: SegmentEntry
    keep: bool = False
    folder: _Folder | None = None
    segment: OpenSegment | None = None
    alive: Bitmap | None = None

    @property
    def documents(self) -> int:
        """Number of documents kept."""
        if self.keep or self.folder is not None:
            return self.entry.alive if self.alive is None else int(np.count_nonzero(self.alive))
        return 0 if self.segment is None else int(np.count_nonzero(self.segment.kept))


@dataclass(frozen=True)
class _Plan:
    """The generation that a repair will commit."""

    manifest: Manifest
    codec_folder: _Folder
    codec: AnyCodec
    parts: Sequence[_Part]
    losses: _Losses

    @property
    def documents(self) -> int:
        """Number of documents of the repaired generation."""
        return sum(part.documents for part in self.parts)


def repair_index(root: Path | str, *, dry_run: bool = False, wait: float = 0.0, disk: Disk = REAL) -> RepairReport:
    """Commit a generation with all undamaged data of an index, and move damaged files to the quarantine.

    Args:
        root: Folder of the index.
        dry_run: Change nothing; report what would be kept and lost.
        wait: Seconds to wait for another writer to finish.
        disk: Performs all writes.

    Raises:
        InputError: The folder is not an index, another process is writing to it, a file cannot be read, or nothing can be kept.
    """
    layout = Layout(Path(root).resolve())
    problems = _problems(layout)
    if dry_run:
        return _repaired(layout, problems, None, {})
    # Opening a damaged index for writing restores FORMAT, and a commit replaces HEAD: move their old content to the quarantine, too.
    before = {path: path.read_bytes() for path in (layout.format, layout.head) if path.is_file()}
    with writing(layout.root, damaged=True, wait=wait, disk=disk) as writer:
        return _repaired(layout, problems, writer, before)


def _problems(layout: Layout) -> tuple[str, ...]:
    """Descriptions of the damage in any generation."""
    try:
        report = check_index(layout.root)
    except DamagedIndexError as error:  # the FORMAT file is damaged
        return (str(error),)
    if not report.generations and not report.head_problems:
        raise InputError(f"{layout.root}: nothing has been committed; build the index again")
    return (*report.head_problems, *(problem for each in report.generations for problem in each.problems))


def _repaired(layout: Layout, problems: tuple[str, ...], writer: StoreWriter | None, before: Mapping[Path, bytes]) -> RepairReport:
    """Plan a repair, and perform it if there is a writer."""
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
    """The repair that keeps most, and the number of documents of the newest generation if known."""
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
    """Manifests of the readable generations, newest first, from their files or from the copy in HEAD."""
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
    """Open the codec of a generation.

    Raises:
        DamagedIndexError: A part of it is lost; no vector can be decoded without it.
    """
    folder = _salvaged(layout.codecs / manifest.codec.name, manifest.codec.files, losses)
    content = exact.codec_content(manifest.codec.engine, manifest.model.dim) or words.codec_content(manifest.codec.engine)
    if folder.is_lost and content is not None:
        folder = _rebuilt(folder, content)
    if folder.is_lost:
        raise DamagedIndexError(f"{folder.path}: the codec is damaged; no vector can be read without it")
    if not folder.salvaged:
        return folder, open_codec(manifest.codec.engine, folder.path)
    with tempfile.TemporaryDirectory() as name:
        folder.write(Path(name), REAL)
        return folder, open_codec(manifest.codec.engine, Path(name))


def _rebuilt(folder: _Folder, content: Mapping[str, bytes]) -> _Folder:
    """Rebuild a codec whose content follows from the manifest."""
    salvaged = dict(folder.salvaged)
    for name, whole in content.items():
        if name in salvaged and len(whole) == folder.files[name].bytes:
            salvaged[name] = SalvagedFile(np.frombuffer(whole, np.uint8), np.zeros(count_blocks(len(whole)), bool))
    return replace(folder, salvaged=salvaged)


def _part(layout: Layout, manifest: Manifest, entry: SegmentEntry, codec: AnyCodec, older: Sequence[Manifest], losses: _Losses) -> _Part:
    """The part of a segment that is kept."""
    folder = _salvaged(layout.segments / entry.name, entry.files, losses)
    alive, changed = _alive(layout, manifest, entry, older, losses)
    if folder.is_lost:
        return _Part(entry, segment=_rows(folder, manifest, entry, codec, alive, losses))
    if folder.is_whole:
        return _Part(entry, alive=alive if changed else None, keep=True)
    return _Part(entry, folder=folder, alive=alive)


def _alive(layout: Layout, manifest: Manifest, entry: SegmentEntry, older: Sequence[Manifest], losses: _Losses) -> tuple[Bitmap, bool]:
    """Bitmap of the rows that are not deleted, (P,), and whether it has to be written again."""
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
    """The rows of a segment whose ids also occur in a later segment; adding that segment deleted them."""
    place = [each.name for each in manifest.segments].index(entry.name)
    later = set[str | None]().union(*(_ids_of(layout, manifest, each) for each in manifest.segments[place + 1 :])) - {None}
    ids = _ids_of(layout, manifest, entry) or [None] * entry.documents
    return np.array([key in later for key in ids], bool)


def _ids_of(layout: Layout, manifest: Manifest, entry: SegmentEntry) -> Sequence[str | None]:
    """The ids of a segment by row, None for a lost id; empty if all are lost."""
    folder, policy = _salvaged(layout.segments / entry.name, entry.files, _Losses()), manifest.policy
    files = Files(folder.path, salvaged=folder.salvaged)
    try:
        return salvage_documents(files, entry.documents, texts=policy.store_text, fields=policy.fields).ids
    except DamagedIndexError as error:
        logger.info("%s", error)
        return ()


def _alive_before(layout: Layout, entry: SegmentEntry, older: Sequence[Manifest]) -> Bitmap | None:
    """The rows of a segment that are not deleted in an older generation; None if no older generation has the information."""
    for manifest in older:
        for former in manifest.segments:
            if former.name == entry.name and former.deleted is not None:
                try:
                    return read_alive(layout, former)
                except DamagedIndexError as error:
                    logger.info("%s", error)
    return None


def _rows(folder: _Folder, manifest: Manifest, entry: SegmentEntry, codec: AnyCodec, alive: Bitmap, losses: _Losses) -> OpenSegment | None:
    """The rows of a damaged segment that are kept; None if there are none."""
    files, policy = Files(folder.path, salvaged=folder.salvaged), manifest.policy
    try:
        vectors = codec.open(files, entry.documents)
        documents = salvage_documents(files, entry.documents, texts=policy.store_text, fields=policy.fields)
    except DamagedIndexError as error:
        logger.warning("%s", error)
        losses.lost_unnamed += int(np.count_nonzero(alive))
        return None
    named = np.array([key is not None for key in documents.ids], bool)
    lost, texts = vectors.damaged(), documents.table.texts
    if isinstance(vectors, words.WordSegment) and texts is not None and lost.any():
        again = np.flatnonzero(lost & ~documents.without_text).tolist()
        vectors = vectors.recounted({row: texts[row].content(use_title=policy.use_title) for row in again})
        lost[again] = False
    keep = alive & named & ~lost
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
    """Lost documents that are intact in segments of older generations."""
    if not losses.lost and not losses.lost_unnamed:
        return []
    wanted, found = set(losses.lost), []
    # If some ids are lost, any document of an older generation that is missing in this one may be one of them.
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
    """The rows of an older segment that are wanted by id, or whose ids are unknown to the damaged generation."""
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
    """The readable ids of a generation, including deleted documents."""
    known: set[str] = set()
    for part in parts:
        known |= {key for key in _ids_of(layout, manifest, part.entry) if key is not None}
    return known


def _salvaged(path: Path, files: Mapping[str, FileEntry], losses: _Losses) -> _Folder:
    """The files of a folder with flipped bits corrected and other damaged blocks marked."""
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
    """The bytes of a damaged file as a writable copy; zeros where the file is too short or missing."""
    there = path.stat().st_size if path.is_file() else 0
    if there == size and size:
        return np.asarray(np.memmap(path, np.uint8, "c"))
    content = np.zeros(size, np.uint8)
    if there:
        part = np.fromfile(path, np.uint8, min(there, size))
        content[: len(part)] = part
    return content


def _written(writer: StoreWriter, plan: _Plan) -> Manifest:
    """Write the new files of a repair and return its manifest."""
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
