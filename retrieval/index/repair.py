"""Check and repair of an index: find damaged blocks, take their rows out, and encode those documents again.

`check_index` reads every byte and compares it with its checksum. `repair_index` commits one new generation and moves damaged files to a
folder in ``quarantine``, which no command reads; its owner deletes it. The content is that of the newest generation whose manifest can be
read, from the manifest or from its copy in HEAD.

A row is healthy if all blocks of its vectors, its id, text and metadata are. Damaged segments are written again with their healthy rows.
The documents of the other rows are read from their stored texts, or from the sources that the index remembers, and encoded again in the
same commit; those that are neither stored nor in a source are lost and named. A damaged codec is read from its copy.

Shapes: P documents of a segment.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import open_corpus, tokens_of
from quiver.retrieval.index.documents import DocumentTable, OpenSegment, SegmentFolderWriter, Texts, merge_segments
from quiver.retrieval.index.engines import AnyCodec, Bitmap, open_codec
from quiver.retrieval.index.files import CHECKSUMS, COPY, REAL, DamagedIndexError, Disk, FileEntry, Files, read_around, read_digests
from quiver.retrieval.index.index import check_model
from quiver.retrieval.index.pieces import DEFAULTS, Model, encode
from quiver.retrieval.index.sources import read_sources
from quiver.retrieval.index.store.reading import (
    CodecEntry,
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
from quiver.retrieval.models.loading import load_index_model
from quiver.retrieval.records import Document

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationReport:
    """Result of checking one generation; the manifest is None if it is damaged, the problems are one line each."""

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
    leftovers = list[Path]()
    with suppress(DamagedIndexError, FileNotFoundError):  # a generation cannot be read, or a writer is removing one
        leftovers += unreferenced(layout, layout.generations())
    return CheckReport(reports, (*leftovers, *entries(layout.temporary)), _find_head_problems(layout))


def _find_head_problems(layout: Layout) -> tuple[str, ...]:
    """Problems of HEAD or of the manifest that it names."""
    known, newest = head_generation(layout), max(layout.generations(), default=0)
    if known is None:
        committed = newest or entries(layout.segments)
        return (f"{layout.head}: missing or changed, so the newest generation is unknown",) if committed else ()
    if known > newest:
        return (f"{layout.manifest(known)}: missing, and it is the newest generation",)
    content = head_manifest(layout)
    with suppress(InputError):
        if layout.head.read_bytes() == head_bytes(known, content) and (not known or parse_manifest(content, layout.head)):
            return ()
    return (f"{layout.head}: changed; quiver index repair writes it again",)


def _check_generation(layout: Layout, generation: int) -> GenerationReport:
    try:
        manifest = read_manifest(layout.manifest(generation))
    except (DamagedIndexError, FileNotFoundError) as error:
        return GenerationReport(generation, None, (str(error),))
    problems = _find_folder_problems(layout.codecs / manifest.codec.name, manifest.codec.files)
    for segment in manifest.segments:
        problems += _find_folder_problems(layout.segments / segment.name, segment.files)
        with _note_damage(problems):
            verify_alive(layout, segment)
    return GenerationReport(generation, manifest, tuple(problems))


def _find_folder_problems(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Descriptions of the damage in a folder, one line per file."""
    problems = list[str]()
    for name, entry in files.items():
        with _note_damage(problems):
            verify_file(folder / name, entry.bytes, entry.sha256)
    stored = b"".join(digests.tobytes() for digests in read_digests(folder, files).values())
    if not problems and (not (folder / CHECKSUMS).is_file() or (folder / CHECKSUMS).read_bytes() != stored):
        problems.append(f"{folder / CHECKSUMS}: missing or changed; quiver index repair writes it again")
    return problems


@contextmanager
def _note_damage(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except DamagedIndexError as error:
        problems.append(str(error))


@dataclass(frozen=True)
class RepairReport:
    """Result of `repair_index`, or its preview.

    Attributes:
        dry_run: Whether nothing was changed.
        generation: Number of the newest generation: the repaired one if a repair took place.
        restored: Number of the generation that was restored.
        problems: Descriptions of the damage.
        documents_before: Documents of the newest generation before the repair; None if its manifest was lost.
        documents: Documents after the repair.
        encoded: Ids of documents that were damaged and encoded again.
        lost: Ids of lost documents.
        lost_unnamed: Number of lost documents whose ids are lost too.
        undone_deletions: Number of documents whose deletion is lost; searches return them again.
        quarantined: Paths of the damaged files in the quarantine.
    """

    dry_run: bool
    generation: int
    restored: int
    problems: tuple[str, ...] = ()
    documents_before: int | None = None
    documents: int = 0
    encoded: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    lost_unnamed: int = 0
    undone_deletions: int = 0
    quarantined: tuple[Path, ...] = ()


def repair_index(
    root: Path | str,
    *,
    model: Model | str | Path | None = None,
    device: str | None = None,
    encode_again: bool = True,
    dry_run: bool = False,
    wait: float = 0.0,
    disk: Disk = REAL,
) -> RepairReport:
    """Commit a generation with all healthy rows of an index, encode damaged documents again, and move damaged files to the quarantine.

    Args:
        root: Folder of the index.
        model: The model that built the index, or its folder or Hub id; None for the one that the index remembers. It is loaded only if
            documents have to be encoded.
        device: Device of a model that is loaded.
        encode_again: Encode damaged documents that are stored or in a known source; if false, they are lost.
        dry_run: Change nothing; report what would be kept, encoded and lost.
        wait: Seconds to wait for another writer to finish.
        disk: Performs all writes.

    Raises:
        InputError: The folder is not an index, another process is writing to it, a file cannot be read, nothing can be kept, or the model
            cannot be loaded or is not that of the index.
    """
    layout = Layout(Path(root).resolve())
    try:
        checked = check_index(layout.root)
        problems = tuple(dict.fromkeys((*checked.head_problems, *(line for each in checked.generations for line in each.problems))))
        if not checked.generations and not problems:
            raise InputError(f"{layout.root}: nothing has been committed; build the index again")
    except DamagedIndexError as error:  # the FORMAT file is damaged
        problems = (str(error),)
    if not problems:
        newest = read_manifest(layout.manifest(layout.generations()[-1]))
        return RepairReport(dry_run, newest.generation, newest.generation, documents_before=newest.documents, documents=newest.documents)
    if dry_run:
        plan = _Plan(layout, model, device)
        return plan.report(problems, [document.id for document in plan.damaged_documents()] if encode_again else [])
    # Opening a damaged index for writing restores FORMAT, and a commit replaces HEAD: move their old content to the quarantine, too.
    before = {path: path.read_bytes() for path in (layout.format, layout.head) if path.is_file()}
    with writing(layout.root, damaged=True, wait=wait, disk=disk) as writer:
        plan, encoded = _Plan(layout, model, device), list[str]()
        added = plan.write_encoded(writer, encoded) if encode_again else []
        segments = [*plan.write_healthy(writer), *added]
        if plan.manifest.documents and not segments:
            raise InputError(f"{layout.root}: no document can be restored; build the index again")
        committed = writer.commit(replace(plan.manifest, operation="repair", codec=plan.write_codec(writer), segments=tuple(segments)))
        replaced = {path: content for path, content in before.items() if path.read_bytes() != content}
        quarantined = tuple(writer.quarantine(replaced=replaced))
    return replace(plan.report(problems, encoded), dry_run=False, generation=committed.generation, quarantined=quarantined)


class _Plan:
    """The healthy rows of the newest readable generation, and the documents of its damaged rows."""

    def __init__(self, layout: Layout, model: Model | str | Path | None, device: str | None) -> None:
        self._layout, self._model, self._device = layout, model, device
        self._newest = max([*layout.generations(), head_generation(layout) or 0])
        self.manifest = _read_newest_manifest(layout)
        self._codec, self._codec_is_whole = _open_damaged_codec(layout, self.manifest)
        self._named: list[str] = []  # ids of damaged rows
        self._unnamed = 0  # damaged rows whose ids are damaged
        self._stored: list[tuple[Texts, NDArray[np.int64]]] = []  # damaged rows whose ids and texts are intact
        self._undone_deletions = 0
        self._intact: list[tuple[SegmentEntry, Bitmap, bool]] = []  # segments, rows that are not deleted, whether tombstones are damaged
        self._healthy: list[OpenSegment] = []  # the healthy rows of damaged segments
        for entry in self.manifest.segments:
            alive, problems = self._find_alive(entry), list[str]()
            with _note_damage(problems):
                verify_alive(layout, entry)
            if not _find_folder_problems(layout.segments / entry.name, entry.files):
                self._intact.append((entry, alive, bool(problems)))
            else:
                self._examine(entry, alive)

    def report(self, problems: tuple[str, ...], encoded: list[str]) -> RepairReport:
        named, again = set(self._named), set(encoded)
        healthy = [*(alive for _, alive, _ in self._intact), *(segment.kept for segment in self._healthy)]
        return RepairReport(
            dry_run=True,
            generation=self.manifest.generation,
            restored=self.manifest.generation,
            problems=problems,
            documents_before=self.manifest.documents if self.manifest.generation == self._newest else None,
            documents=sum(int(np.count_nonzero(rows)) for rows in healthy) + len(encoded),
            encoded=tuple(encoded),
            lost=tuple(key for key in self._named if key not in again),
            lost_unnamed=self._unnamed - len(again - named),
            undone_deletions=self._undone_deletions,
        )

    def write_codec(self, writer: StoreWriter) -> CodecEntry:
        codec = self.manifest.codec
        if self._codec_is_whole:
            return codec
        scratch = writer.scratch("codec")
        return writer.add_codec(scratch, codec.engine, codec.parameters, self._codec.save(scratch, writer.disk), apart=True)

    def write_healthy(self, writer: StoreWriter) -> list[SegmentEntry]:
        """The intact segments, and new ones of the healthy rows of the others."""
        written = [
            writer.delete(entry, alive) if has_damaged_tombstones else entry for entry, alive, has_damaged_tombstones in self._intact
        ]
        for segment in self._healthy:
            scratch = writer.scratch("repair")
            written.append(writer.add_segment(scratch, **vars(merge_segments([segment], self._codec, scratch, writer.disk))))
        return written

    def write_encoded(self, writer: StoreWriter, encoded: list[str]) -> list[SegmentEntry]:
        """Encode the damaged documents as a segment of their own, if there are any; append their ids to ``encoded``."""
        documents, policy = self.damaged_documents(), self.manifest.policy
        if (first := next(documents, None)) is None:
            return []
        model, scratch, stream = self.load_model(), writer.scratch("encoded"), chain([first], documents)
        target = SegmentFolderWriter(scratch, self._codec, writer.disk, texts=policy.store_text, types=policy.types)
        chunks = iter(lambda: list(islice(stream, DEFAULTS.pieces.chunk_documents)), list[Document]())
        for chunk, vectors in encode(model, chunks, use_title=policy.use_title):
            target.add(chunk, vectors.vectors, None if model.card.kind == "dense" else vectors.lengths, vectors.token_ids, vectors.tokens)
            encoded += [document.id for document in chunk]
        return [writer.add_segment(scratch, **vars(target.close()))]

    def damaged_documents(self) -> Iterator[Document]:
        """The documents of damaged rows: the stored ones, then those of the sources."""
        wanted = set(self._named)
        for texts, rows in self._stored:
            for row in rows.tolist():
                document = texts[row]
                wanted.discard(document.id)
                yield document
        sources = read_sources(self._layout.root).sources if wanted or self._unnamed else ()
        tokens = tokens_of(self.load_model()) if sources else None
        # A document whose id is lost is one that a source has and the index has not, unless there are more of those than lost ones.
        known = {key for entry in self.manifest.segments if sources and self._unnamed for key in self._readable_ids(entry)}
        unnamed: dict[str, Document] = {}
        for source in reversed(sources):
            try:
                for document in open_corpus(source.source, source.options, tokens):
                    if document.id in wanted:
                        wanted.discard(document.id)
                        yield document
                    elif self._unnamed and document.id not in known and len(unnamed) <= self._unnamed:
                        unnamed.setdefault(document.id, document)
            except InputError as error:
                logger.warning("%s: no documents of this source can be encoded again (%s)", source.source, error)
        if len(unnamed) <= self._unnamed:
            yield from unnamed.values()
        else:
            logger.warning("%s: the sources have more new documents than were lost; quiver index refresh adds them", self._layout.root)

    def load_model(self) -> Model:
        """The model that built the index."""
        if self._model is None or isinstance(self._model, str | Path):
            source = None if self._model is None else str(self._model)
            try:
                self._model = load_index_model(self.manifest.model, source, device=self._device)
            except InputError as error:
                raise InputError(f"damaged documents have to be encoded again, but {error}; or leave them out: --no-encode") from error
        check_model(self._layout.root, self.manifest, self._model.card)
        return self._model

    def _examine(self, entry: SegmentEntry, alive: Bitmap) -> None:
        """Find the healthy rows of a damaged segment, and what is known of the others."""
        policy, vectors = self.manifest.policy, None
        without_id, without_text, damaged = np.ones((3, entry.documents), bool)
        try:
            files = self._open_around(entry)
            table = DocumentTable.open(files, entry.documents, texts=policy.store_text, types=policy.types)
            without_id, without_text, without_field = table.lost()
            vectors = self._codec.open(files, entry.documents)
            damaged = vectors.damaged() | without_id | without_text | without_field
        except DamagedIndexError as error:
            logger.warning("%s", error)
        self._unnamed += int(np.count_nonzero(alive & without_id))
        named = np.flatnonzero(alive & damaged & ~without_id)
        if len(named):
            self._named += table.ids.strings.take(named)
            if table.texts is not None and not without_text[named].all():
                self._stored.append((table.texts, named[~without_text[named]]))
        if vectors is not None and (alive & ~damaged).any():
            self._healthy.append(OpenSegment(table, vectors, alive & ~damaged))

    def _open_around(self, entry: SegmentEntry) -> Files:
        folder, sizes = self._layout.segments / entry.name, {name: each.bytes for name, each in entry.files.items()}
        return Files(folder, read_digests(folder, entry.files), sizes=sizes, around_damage=True)

    def _find_alive(self, entry: SegmentEntry) -> Bitmap:
        """Rows of a segment that are not deleted, (P,)."""
        try:
            alive = read_alive(self._layout, entry)
            return np.ones(entry.documents, bool) if alive is None else alive
        except DamagedIndexError:  # only replaced documents are known to be deleted: a later segment has their ids
            place = self.manifest.segments.index(entry)
            later = {key for each in self.manifest.segments[place + 1 :] for key in self._readable_ids(each)}
            alive = np.array([key is None or key not in later for key in self._readable_ids(entry)], bool)
            self._undone_deletions += int(np.count_nonzero(alive)) - entry.alive
            return alive

    def _readable_ids(self, entry: SegmentEntry) -> list[str | None]:
        """Ids of a segment by row; None for a damaged one."""
        ids: list[str | None] = [None] * entry.documents
        try:
            table = DocumentTable.open(self._open_around(entry), entry.documents, texts=False, types={})
        except DamagedIndexError as error:
            logger.warning("%s", error)
            return ids
        rows = np.flatnonzero(~table.ids.strings.lost())
        for row, key in zip(rows.tolist(), table.ids.strings.take(rows), strict=True):
            ids[row] = key
        return ids


def _read_newest_manifest(layout: Layout) -> Manifest:
    """The newest readable manifest, from its file or from the copy in HEAD."""
    found: list[Manifest] = []
    in_files = (partial(read_manifest, layout.manifest(generation)) for generation in layout.generations())
    for read in (*in_files, partial(parse_manifest, head_manifest(layout), layout.head)):
        with suppress(DamagedIndexError, FileNotFoundError):
            found.append(read())
    if not found:
        raise InputError(f"{layout.root}: no manifest can be read; build the index again")
    return max(found, key=lambda manifest: manifest.generation)


def _open_damaged_codec(layout: Layout, manifest: Manifest) -> tuple[AnyCodec, bool]:
    """Open a codec, damaged files of it from its copy; return whether all files are intact, too."""
    engine, folder, files = manifest.codec.engine, layout.codecs / manifest.codec.name, manifest.codec.files
    if not _find_folder_problems(folder, files):
        return open_codec(engine, folder), True
    copy, place = read_around(folder / COPY, Path.read_bytes) or b"", 0
    with tempfile.TemporaryDirectory() as name:
        for file in sorted(files.keys() - {COPY}):
            size, target = files[file].bytes, Path(name) / file
            for content in (read_around(folder / file, Path.read_bytes) or b"", copy[place : place + size]):
                target.write_bytes(content)
                problems = list[str]()
                with _note_damage(problems):
                    verify_file(target, size, files[file].sha256)
                if not problems:
                    break
            else:
                raise InputError(f"{folder / file}: the codec and its copy are damaged, so no vector can be read; build the index again")
            place += size
        return open_codec(engine, Path(name)), False
