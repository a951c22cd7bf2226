"""Build and change an index: each operation takes the writers' lock, does its work and commits it atomically.

A build reads the corpus once (`quiver.retrieval.index.pieces.survey`), trains a codec if the engine has one, encodes the documents piece by
piece in this process or by workers, and merges the pieces into segments. Merging copies bytes and encodes nothing; the resulting bytes do
not depend on the borders of the pieces or on which worker made them. An interrupted build or addition resumes when run again: its work
folder (`quiver.encoder.work_folder`) is named after everything that decides the result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.progress import progress_bar
from quiver.encoder.work_folder import SealedFolder, WorkFolder
from quiver.retrieval.data.entries import OnTypeError, parse_types
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.source import DEFAULTS as DEFAULT_SOURCE
from quiver.retrieval.data.source import Corpus, open_corpus, tokens_of
from quiver.retrieval.data.tables import GivenDocuments, documents_among
from quiver.retrieval.index.calibration import HITS, LEAST_HITS, QUERIES, allowed_seconds, calibrate
from quiver.retrieval.index.documents import (
    DESCRIBED_COPIES,
    DOCUMENT_BYTES,
    Contents,
    FieldCheck,
    OpenSegment,
    is_described,
    keeps_field,
    merge_segments,
    open_segment,
    rows_by_value,
    widened_types,
)
from quiver.retrieval.index.engines import (
    WORDS,
    AnyCodec,
    Sample,
    clustering_on,
    engine,
    engine_name,
    is_approximate,
    open_codec,
    parse_engine,
    train_codec,
)
from quiver.retrieval.index.files import REAL, DamagedIndexError, Disk, Files
from quiver.retrieval.index.index import IndexReader, check_model, encoded_queries, open_index, open_manifest
from quiver.retrieval.index.memory import build_in_memory
from quiver.retrieval.index.pieces import (
    DEFAULTS,
    BuildOptions,
    MakePieces,
    Model,
    Piece,
    PieceSizes,
    Reading,
    SamplePiece,
    SegmentPiece,
    Source,
    StoredSample,
    computing_with,
    concatenate_encoded,
    contents_of,
    sealed_pieces,
    survey,
)
from quiver.retrieval.index.sources import (
    FILE,
    check_replaced,
    describe_source,
    is_rereadable,
    options_like,
    read_sources,
    remember_source,
    sources_file,
    tell_apart,
    write_sources,
)
from quiver.retrieval.index.store.reading import NOTHING_COMMITTED, CodecEntry, Manifest, SegmentEntry, entries, is_resumable, verify_files
from quiver.retrieval.index.store.writing import UNFINISHED_SECONDS, StoreWriter, writing
from quiver.retrieval.models.batches import device_of
from quiver.retrieval.models.loading import WorkerModel, load_index_model
from quiver.retrieval.models.pretrained import with_absolute_source
from quiver.retrieval.records import IN_PROCESS, Document, Executor, ModelCard

logger = logging.getLogger(__name__)

FAN = 4
"""Number of segments, the new one included, from which an addition is merged with earlier segments."""

FLOOR = 1 << 20
"""Bytes below which the cost of writing a segment does not depend on its size: it has a dozen files, each of which is synced."""

# English has about four characters per token, code and other scripts two or three; special tokens are added.
_CHARACTERS_A_VECTOR = 2
_SPECIAL = 3
# Peak memory of preparing an index for searching, as a multiple of the memory that searching needs: the preparation makes sorted copies.
_PREPARATION_COPIES = 3

_CODEC, _PLAN, _THREADS = "codec", "plan", "threads"


def build_index(  # noqa: PLR0913 - the public entry: one option for each choice
    corpus: str | Path | Iterable[Document] | Iterable[str] | Iterable[Mapping[str, object]],
    model: Model | str | Path,
    out: Path | str | None = None,
    *,
    options: BuildOptions = DEFAULTS,
    executor: Executor = IN_PROCESS,
    overwrite: bool = False,
    wait: float = 0.0,
    progress: bool = False,
    types: Mapping[str, str] | None = None,
    on_type_error: OnTypeError | None = None,
    disk: Disk = REAL,
) -> IndexReader:
    """Encode a corpus into a new index and open it for reading; arguments and errors as `quiver.retrieval.search.index.build_index`.

    ``disk`` performs all writes.
    """
    begun = time.monotonic()
    if not isinstance(options, BuildOptions):
        raise InputError(f"options must be BuildOptions, got {type(options).__name__}; how documents are read is said by open_corpus")
    model = load_index_model(str(model)) if isinstance(model, str | Path) else model
    corpus = _corpus_for_model(corpus, model)
    spec = parse_engine(options.engine)
    types = {**parse_types(options.types), **parse_types(types or {})}
    options = replace(options, engine=spec.name, settings={**spec.settings, **options.settings}, types=types)
    options = replace(options, on_type_error=on_type_error or options.on_type_error)
    engine(engine_name(options.engine, model.card, 0), model.card)
    if out is None:
        return _build_without_folder(corpus, model, options, executor, begun, progress=progress)
    out, fields = Path(out), FieldCheck(options.types, options.on_type_error)
    with (
        writing(out, create=True, overwrite=overwrite, wait=wait, disk=disk) as writer,
        _survey_corpus(writer, corpus, fields, spooled=executor.remote, progress=progress) as source,
    ):
        options = replace(options, types=options.field_types(source.types))
        name = engine_name(options.engine, model.card, source.count)
        engine(name, model.card).check(options.settings, model.card)
        settings = {"engine": name, "settings": dict(options.settings), "seed": options.seed}
        with _open_work_folder(writer, source, model.card, options, settings) as work:
            build = _SegmentBuild(model, source, options, work, disk, executor, progress)
            codec_folder = build.train_codec(name)
            segments, codec = build.merged(build.pieces()), build.codec
            if not sum(contents.vectors for _, contents in segments):
                work.remove()  # the same build would fail again, so there is nothing to resume
                raise InputError(f"none of the documents has a {'word' if name == WORDS else 'vector'}; there is nothing to index")
            entry = CodecEntry(name, "", codec.parameters, {})
            card, uncommitted = with_absolute_source(model.card), _uncommitted_entries(segments)
            draft = Manifest(0, "", "build", versions(), card, options.policy, entry, uncommitted)
            if options.calibrate and is_approximate(codec):
                # Calibrate before the commit moves the pieces: a build that is killed during calibration can then still resume.
                index = IndexReader(out, draft, codec, [build.open_segment(*segment) for segment in segments])
                draft = replace(draft, calibration=_measure_recall(index, begun, options.memory, options.seed, progress=progress))
            if sources_file(out).exists():  # of an index that is replaced
                disk.unlink(sources_file(out))
            entry = writer.add_codec(codec_folder.folder, name, codec.parameters, codec_folder.about["holds"])
            writer.commit(replace(draft, codec=entry, segments=tuple(_add_segments(writer, segments))))
            work.remove()
        if isinstance(corpus, Corpus) and is_rereadable(corpus):
            write_sources(out, last_committed(writer).generation, [describe_source(corpus, source.count)], disk)
        writer.collect_garbage()
    built = _warn_of_truncation(open_index(out))
    built.model = model
    return built


def _build_without_folder(
    corpus: Iterable[Document], model: Model, options: BuildOptions, executor: Executor, begun: float, *, progress: bool
) -> IndexReader:
    if executor.remote:
        raise InputError("workers write to the folder of an index; name a folder to build with them, or build without workers")
    index = build_in_memory(corpus, model, options, progress=progress)
    if options.calibrate and is_approximate(index.codec):
        calibration = _measure_recall(index, begun, options.memory, options.seed, progress=progress)
        index = IndexReader(index.path, replace(index.manifest, calibration=calibration), index.codec, index.segments)
    index.model = model
    return _warn_of_truncation(index)


def add_documents(  # noqa: PLR0913 - the public entry: one option for each choice
    path: Path | str,
    corpus: str | Path | Iterable[Document] | Iterable[str] | Iterable[Mapping[str, object]],
    model: Model | str | Path,
    *,
    replace_existing: bool = False,
    delete: Callable[[], Sequence[str]] | None = None,
    memory: int = DEFAULTS.memory,
    pieces: PieceSizes = DEFAULTS.pieces,
    wait: float = 0.0,
    progress: bool = False,
    types: Mapping[str, str] | None = None,
    on_type_error: OnTypeError = "error",
    disk: Disk = REAL,
) -> IndexReader:
    """Add documents to an index with its existing codec. An interrupted addition resumes.

    Small segments are merged with the addition once there are several (`quiver.retrieval.index.build.first_merged`), so that an index that
    grows by single documents is searched about as fast as a compacted one. The calibration is kept where it still holds
    (`quiver.retrieval.index.recall_table.Calibration.holds_for`); otherwise the index is calibrated again.

    Args:
        path: Folder of the index.
        corpus: Documents to add; see `build_index`. The name of a source is read with the options of the index's latest source of the same
            kind. Files, and rows without ids, get ids that begin with a label, see `SourceOptions`, if other documents are in the index.
        model: The model that built the index, or its folder, hub id or ``"bm25"``.
        replace_existing: Replace documents whose ids are already in the index, and with a passage all passages of its file.
        delete: Given by a refresh, whose documents are those of all sources: gives the ids of documents to delete in the same commit;
            called once, after all documents have been read. Unknown ids are ignored.
        memory: Memory limit in bytes, in addition to the model and one chunk of documents.
        pieces: Sizes of the work units.
        wait: Seconds to wait for another writer to finish.
        progress: Show progress bars.
        types: Types of fields that the index does not have, or wider ones of those that it has.
        on_type_error: ``null`` to store no value for filters where one does not fit its type, instead of an error.
        disk: Performs all writes.

    Returns:
        The changed index.

    Raises:
        InputError: As `build_index`; or another model built the index, or a document is already in it and ``replace_existing`` is false.
    """
    path, begun = Path(path), time.monotonic()
    if isinstance(model, str | Path):
        model = load_index_model(open_index(path).manifest.model, str(model))
    corpus = _corpus_for_model(corpus, model, path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = last_committed(writer)
        check_model(path, before, model.card)
        index = open_manifest(writer.layout, before)
        known, replaced = read_sources(path).sources, list[str]()
        if isinstance(corpus, Corpus):
            corpus = tell_apart(corpus, known, index)
        fields = FieldCheck(widened_types(path, before.policy.types, types or {}), on_type_error, is_index=True)

        def note_known_ids(chunk: list[Document]) -> None:
            places = index.locate([document.id for document in chunk])
            replaced.extend(document.id for document, place in zip(chunk, places, strict=True) if place is not None)

        with _survey_corpus(writer, corpus, fields, look=note_known_ids, progress=progress) as source:
            if delete is None:
                check_replaced(path, corpus, known, replaced, replace_existing=replace_existing)
                replaced += _other_passages(index, corpus, replaced)
            else:
                replaced += delete()
            stored = before.policy
            kept_types = {name: kind for name, kind in source.types.items() if keeps_field(stored.fields, name)}
            options = BuildOptions(
                memory=memory,
                use_title=stored.use_title,
                store_text=stored.store_text,
                fields=stored.fields,
                types=kept_types,
                pieces=pieces,
            )
            index = open_manifest(writer.layout, replace(before, policy=options.policy))
            with _open_work_folder(writer, source, model.card, options, {"codec": before.codec.name}) as work:
                build = _SegmentBuild(model, source, options, work, disk, progress=progress)
                build.codec = index.codec
                made = build.pieces()
                stay, join = _divide_segments(writer, index, _without_documents(index, replaced), made, memory)
                segments = build.merged(made, before=join)
                staying = [entry for _, entry in stay]
                drafted = (*staying, *_uncommitted_entries(segments))
                draft = replace(before, operation="add", versions=versions(), policy=options.policy, segments=drafted)
                opened = [*(segment for segment, _ in stay), *(build.open_segment(*segment) for segment in segments)]
                draft = _measure_recall_again(draft, index, opened, begun, memory, progress=progress)
                writer.commit(replace(draft, segments=(*staying, *_add_segments(writer, segments))))
                work.remove()
        remember_source(path, last_committed(writer).generation, corpus, source.count, disk)
        writer.collect_garbage()
    return _warn_of_truncation(open_index(path), before.tokens.truncated)


def delete_documents(path: Path | str, ids: Sequence[str], *, wait: float = 0.0, disk: Disk = REAL) -> IndexReader:
    """Delete documents. Searches no longer return them; compaction frees their disk space.

    Args:
        path: Folder of the index.
        ids: Ids of the documents; repeated ids are allowed.
        wait: Seconds to wait for another writer to finish.
        disk: Performs all writes.

    Returns:
        The changed index.

    Raises:
        InputError: A document does not exist; nothing is deleted.
    """
    path = Path(path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = last_committed(writer)
        index = open_manifest(writer.layout, before)
        wanted = list(dict.fromkeys(ids))
        missing = [key for key, place in zip(wanted, index.locate(wanted), strict=True) if place is None]
        if missing:
            others = f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else ""
            message = f"{path}: document '{missing[0]}' is not in this index{others}; nothing was deleted"
            if index.locate([first := f"{missing[0]}#1"])[0] is not None:
                message += f"; its passages are {first} and so on, and quiver index refresh drops files that are gone or excluded"
            raise InputError(message)
        if wanted:
            changed = zip(index.segments, _without_documents(index, wanted), before.segments, strict=True)
            segments = [entry if after is former else writer.delete(entry, after.kept) for former, after, entry in changed]
            writer.commit(replace(before, operation="delete", versions=versions(), segments=tuple(segments)))
        writer.collect_garbage()
    return open_index(path)


def compact_index(
    path: Path | str, *, memory: int = DEFAULTS.memory, wait: float = 0.0, progress: bool = False, disk: Disk = REAL
) -> IndexReader:
    """Merge the segments into as few as the memory allows and drop deleted documents. Nothing is encoded or trained again.

    A calibrated index is calibrated again if its largest segment has grown.

    Args:
        path: Folder of the index.
        memory: Memory limit in bytes.
        wait: Seconds to wait for another writer to finish.
        progress: Show progress bars.
        disk: Performs all writes.

    Returns:
        The compacted index; the unchanged index if there is nothing to do.
    """
    path, begun = Path(path), time.monotonic()
    with writing(path, wait=wait, disk=disk) as writer:
        before = last_committed(writer)
        index = open_manifest(writer.layout, before)
        extents = [_live_extent(segment, entry) for segment, entry in zip(index.segments, before.segments, strict=True)]
        segments: list[SegmentEntry] = []
        with progress_bar("merging", len(extents), enabled=progress) as advance:
            for run in groups(index.codec, extents, memory) if extents else ():
                chosen = [index.segments[number] for number in run]
                if len(chosen) == 1 and chosen[0].alive is None:
                    segments.append(before.segments[run[0]])
                elif any(segment.kept.any() for segment in chosen):  # otherwise all of their documents are deleted
                    folder = writer.scratch("compact")
                    segments += _add_segments(writer, [(folder, merge_segments(chosen, index.codec, folder, disk))])
                advance(len(run))
        if tuple(segments) != before.segments:
            draft = replace(before, operation="compact", versions=versions(), segments=tuple(segments))
            opened = open_manifest(writer.layout, draft).segments
            writer.commit(_measure_recall_again(draft, index, opened, begun, memory, progress=progress))
        writer.collect_garbage()
    return open_index(path)


def calibrate_index(  # noqa: PLR0913 - the public entry: one option for each choice
    path: Path | str,
    model: Model | None = None,
    *,
    queries: Sequence[str] | None = None,
    count: int = QUERIES,
    ks: Sequence[int] = HITS,
    seed: int = 0,
    wait: float = 0.0,
    progress: bool = False,
    disk: Disk = REAL,
) -> IndexReader:
    """Measure the recall and latency of an index and store the result as a new generation with the same documents.

    Args:
        path: Folder of the index.
        model: The model that built the index; required with ``queries``.
        queries: Texts of real queries. None makes pseudo queries from vectors of the index, which are less representative.
        count: Maximum number of queries to search.
        ks: Numbers of hits to measure; see `quiver.retrieval.index.calibration.calibrate`.
        seed: Random seed of the pseudo queries or of the choice among the given ones.
        wait: Seconds to wait for another writer to finish.
        progress: Show progress bars.
        disk: Performs all writes.

    Returns:
        The index with its new ``calibration``.

    Raises:
        InputError: Another model built the index, there are no queries, or no document has a vector.
        ValueError: Queries without a model, or ``count`` or ``ks`` is too small.
    """
    path = Path(path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = last_committed(writer)
        index = open_manifest(writer.layout, before)
        vectors = None
        if queries is not None:
            if model is None:
                raise ValueError("model is required to encode queries")
            index.check_model(model.card)
            vectors = encoded_queries(model.encode_texts(queries, "query", progress=progress), model.card)
        found = calibrate(index, queries=vectors, count=count, ks=ks, seed=seed, progress=progress)
        writer.commit(replace(before, operation="calibrate", versions=versions(), calibration=found.to_json()))
        writer.collect_garbage()
    return open_index(path)


def _corpus_for_model(corpus: Any, model: Model, extended: Path | None = None) -> Iterable[Document]:
    """Open a source as the others of an index, with the model's tokens; make documents of texts, mappings and data frames."""
    if isinstance(corpus, str | Path):
        options = DEFAULT_SOURCE if extended is None else options_like(extended, str(corpus))
        return open_corpus(corpus, options, tokens_of(model), taken_over=extended is not None)
    if isinstance(corpus, Iterator):  # it can be read only once
        return documents_among(corpus)
    if isinstance(corpus, Corpus):
        return corpus if corpus.measured is None else corpus.measured(tokens_of(model))
    return GivenDocuments(corpus)


@contextmanager
def _survey_corpus(
    writer: StoreWriter,
    corpus: Iterable[Document],
    fields: FieldCheck,
    *,
    spooled: bool = False,
    look: Callable[[list[Document]], None] = lambda chunk: None,
    progress: bool,
) -> Iterator[Source]:
    # The spool file for workers gets a unique name: a worker that outlives a killed build must not read the documents of the next build.
    spool = writer.layout.temporary / (f"corpus-{uuid.uuid4().hex[:12]}.jsonl" if spooled else "corpus.jsonl")
    try:
        yield survey(corpus, spool, disk=writer.disk, fields=fields, spooled=spooled, look=look, progress=progress)
    finally:
        if spool.exists():
            writer.disk.unlink(spool)


def _other_passages(index: IndexReader, corpus: object, replaced: Sequence[str]) -> list[str]:
    """Ids of all passages of the files, or of the rows, of which a source replaces passages."""
    field = FILE if isinstance(getattr(corpus, "read", None), FolderFiles) else "document"
    if not replaced or not isinstance(corpus, Corpus) or not (field == FILE or corpus.options.passages):
        return []
    masks = [np.zeros(len(segment.documents), bool) for segment in index.segments]
    for place in index.locate(replaced):
        if place is not None:
            masks[place.segment][place.row] = True
    return [
        key
        for places in rows_by_value([segment.documents for segment in index.segments], field).values()
        if any(masks[segment][rows].any() for segment, rows in places)
        for segment, rows in places
        for key in index.segments[segment].documents.ids.strings.take(rows[index.segments[segment].kept[rows]].astype(np.intp))
    ]


def _warn_of_truncation(changed: IndexReader, before: int = 0) -> IndexReader:
    """Warn if the model did not read all of the documents that were added; ``before`` counts those it had not read completely before."""
    tokens = changed.manifest.tokens
    if tokens.truncated > before:
        logger.warning(
            "the model reads %d tokens; %s of %s documents are longer, and their ends are not searched. Cut them into passages: --passages"
            " headings, which cuts texts without headings, too; in Python open_corpus([{'text': ...}, ...],"
            " SourceOptions(passages='headings'))",
            changed.manifest.model.document_length,
            f"{tokens.truncated:,}",
            f"{tokens.texts:,}",
        )
    return changed


@contextmanager
def _open_work_folder(
    writer: StoreWriter, source: Source, card: ModelCard, options: BuildOptions, settings: Mapping[str, Any]
) -> Iterator[WorkFolder]:
    """The work folder of a build or addition, named after all that decides the result; after an error it stays if pieces are encoded."""
    layout, whole = writer.layout, {**settings, **asdict(options.policy), "documents": source.sha256, "model": card.fingerprint}
    work = WorkFolder(layout.pieces(hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]), writer.disk)
    if work.path.is_dir():
        logger.info("%s: resuming the interrupted build", layout.root)
    else:
        if any(is_resumable(path.name) for path in entries(layout.temporary)):
            logger.warning(
                "%s: an earlier change with other data or options was not finished; repeat its command to go on with it within %g days",
                layout.root,
                UNFINISHED_SECONDS / 86_400,
            )
        writer.disk.mkdir(work.path)
        writer.disk.sync_folder(layout.temporary)
    try:
        yield work
    finally:
        if work.path.is_dir() and set(sealed_pieces(work.path, writer.disk).names()) <= {_CODEC}:
            work.remove()


class Extent(NamedTuple):
    """Size of a segment."""

    documents: int
    vectors: int
    described: int = 0  # size of the files of ids and metadata, in bytes
    size: int = 0  # size of all files, in bytes

    def with_more(self, other: Extent) -> Extent:
        """The sum of two sizes."""
        return Extent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def memory_needed(codec: AnyCodec, extent: Extent) -> int:
    """Maximum memory in bytes for writing or merging a segment."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described


def groups(codec: AnyCodec, extents: Sequence[Extent], memory: int) -> list[range]:
    """Group successive segments so that each group can be merged within a memory limit in bytes; one that exceeds it stays alone."""
    runs: list[range] = []
    begin, whole = 0, Extent(0, 0)
    for number, extent in enumerate(extents):
        whole = whole.with_more(extent)
        if number > begin and memory_needed(codec, whole) > memory:
            runs.append(range(begin, number))
            begin, whole = number, extent
    return [*runs, range(begin, len(extents))]


def first_merged(extents: Sequence[Extent], fits: Callable[[Extent], bool]) -> int:
    """Choose the segments that an addition is merged with, so that small segments stay few and none is rewritten often.

    This is a size-tiered merge policy, as in Lucene and log-structured stores: going back from the addition, a segment joins the merge if
    it is no larger than all newer segments together, and the merge takes place if it has at least `FAN` segments. A merged segment at least
    doubles in size: n additions of equal size rewrite each document at most log2(n) times and leave about log2(n) + `FAN` segments.
    Segments smaller than `FLOOR` count as that size; they are rewritten more often and stay fewer.

    ``extents`` are those of the documents that are not deleted, the addition last; ``fits`` says whether a merge of some size is allowed.
    Returns the number of the first segment to merge, which is that of the addition if no merge is due.

    Example:
        >>> def first(*sizes):
        ...     return first_merged([Extent(1, 1, 0, size << 20) for size in sizes], lambda extent: True)
        >>> first(90, 1, 1), first(90, 1, 1, 1), first(90, 1, 1, 1, 1), first(90, 8, 4, 1, 1, 1, 1), first(90, 64, 9, 9, 9, 9)
        (2, 3, 1, 1, 2)
    """
    begin, whole = len(extents) - 1, extents[-1]
    while begin and extents[begin - 1].size <= max(whole.size, FLOOR) and fits(extents[begin - 1].with_more(whole)):
        begin -= 1
        whole = whole.with_more(extents[begin])
    return begin if len(extents) - begin >= FAN else len(extents) - 1


def plan_pieces(lengths: NDArray[np.uint32], options: BuildOptions, card: ModelCard, codec: AnyCodec) -> list[list[int]]:
    """Divide documents into pieces of chunks; for each piece the end of each of its chunks as a document number, exclusive.

    ``lengths`` are the characters of each document, (P,). The codec estimates the memory of writing a piece: at most half of the limit.
    """
    sizes, count = options.pieces, len(lengths)
    most_documents = min(sizes.documents, max(sizes.least_documents, count // sizes.count))
    most_characters = min(sizes.characters, max(sizes.chunk_characters, int(lengths.sum(dtype=np.int64)) // sizes.count))
    most_vectors = sizes.vector_bytes // (4 * card.dim)
    estimated = np.minimum(lengths // _CHARACTERS_A_VECTOR + _SPECIAL, card.document_length) if card.kind != "dense" else lengths * 0 + 1
    characters, vectors = (np.append(0, np.cumsum(each, dtype=np.int64)) for each in (lengths, estimated))
    pieces, first, stop = [list[int]()], 0, 0
    while stop < count:
        if pieces[-1]:
            many = int(vectors[stop] - vectors[first])
            if (
                stop - first >= most_documents
                or characters[stop] - characters[first] >= most_characters
                or many >= most_vectors
                or 2 * memory_needed(codec, Extent(stop - first, many)) >= options.memory
            ):
                pieces.append([])
                first = stop
        full = int(np.searchsorted(characters, characters[stop] + sizes.chunk_characters))
        stop = min(stop + sizes.chunk_documents, full, count)
        pieces[-1].append(stop)
    return pieces


@dataclass
class _SegmentBuild:
    """Makes the codec, the pieces and the segments of a build or addition in its work folder."""

    model: Model
    source: Source
    options: BuildOptions
    work: WorkFolder
    disk: Disk
    executor: Executor = IN_PROCESS
    progress: bool = False
    codec: AnyCodec = field(init=False)
    sample: tuple[tuple[NDArray[np.int64], Path], ...] = ()  # encoded documents to train a codec, see `StoredSample`

    def __post_init__(self) -> None:
        self.card, self.sealed = self.model.card, sealed_pieces(self.work.path, self.disk)
        wanted = self.options.threads or self.executor.threads(torch.get_num_threads())
        self.threads = self._agree(_THREADS, lambda: wanted)
        if self.threads != wanted:
            logger.info("resuming with %d threads per worker, the number that the build was started with", self.threads)

    def _agree(self, name: str, choose: Callable[[], Any]) -> Any:
        """What a build was started with, as JSON; a new build chooses."""
        found = self.work.find(name)
        if found is None:
            self.work.save(name, found := json.dumps(choose()).encode())
        return json.loads(found)

    def train_codec(self, name: str) -> SealedFolder:
        """Train the codec of an engine, or open the one that was trained before an interruption; return its folder."""
        wanted, count, dense = engine(name, self.card).sample, self.source.count, self.card.kind == "dense"
        if wanted(count):
            self.sample = self._encode_sample("sample", self._choose_sample(wanted))
        folder = self._find_finished(_CODEC)
        if folder is None:
            sample, mean = Sample(np.zeros((0, self.card.dim), np.float32)), 0.0
            if self.sample:
                encoded = concatenate_encoded([encoded for _, encoded in StoredSample(self.sample, self.card.dim).pieces])
                sample = Sample(encoded.vectors, None if dense else encoded.lengths, encoded.token_ids)
                mean = len(encoded.vectors) / len(encoded.lengths)
                if not len(sample.vectors):
                    raise InputError("none of the documents has a vector; there is nothing to index")
            settings, seed, vectors = self.options.settings, self.options.seed, count if dense else round(mean * count)
            with clustering_on(device_of(self.model)), progress_bar("training", int(bool(self.sample)), enabled=self.progress):
                codec = train_codec(name, sample, self.card, documents=count, vectors=vectors, settings=settings, seed=seed)
            with self.sealed.writing(_CODEC) as folder:
                folder.about["holds"] = dict(codec.save(folder.folder, self.disk))
        # Open the codec from its files even if it was just trained, as a resumed build and workers do.
        self.codec, self.stored_codec = open_codec(name, folder.folder), (name, folder.folder)
        return folder

    def _choose_sample(self, wanted: Callable[[int], int]) -> list[NDArray[np.int64]]:
        """Choose documents at random with as many vectors as the engine wants for training; their numbers, ascending, per piece."""
        count, mean, sizes, width = self.source.count, 1.0, self.options.pieces, 4 * self.card.dim
        order = np.random.default_rng(self.options.seed).permutation(count)
        if self.card.kind != "dense":
            probe = StoredSample(self._encode_sample("probe", [np.sort(order[: sizes.probe_documents])]), self.card.dim)
            mean = max(float(probe.pieces[0][1].lengths.mean()), 1.0)
        # The sample may use half of the memory, training the other half.
        best, fits = wanted(round(mean * count)), self.options.memory // (2 * width)
        if fits < best:
            logger.warning(
                "training uses %d vectors instead of %d, to stay within the memory limit; raise the limit for better recall", fits, best
            )
        numbers = np.sort(order[: max(1, math.ceil(min(best, fits) / mean))])
        size = max(1, min(sizes.sample_documents, int(sizes.vector_bytes / (width * mean))))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _encode_sample(self, name: str, parts: Sequence[NDArray[np.int64]]) -> tuple[tuple[NDArray[np.int64], Path], ...]:
        made = self._make([SamplePiece(f"{name}-{number:04d}", part) for number, part in enumerate(parts)], name)
        return tuple((part, piece.folder) for part, piece in zip(parts, made, strict=True))

    def pieces(self) -> list[tuple[Path, Contents]]:
        """Encode all documents and return the finished pieces, each with its folder."""
        plan = self._agree(_PLAN, lambda: plan_pieces(self.source.lengths, self.options, self.card, self.codec))
        firsts = [0, *(ends[-1] for ends in plan)]
        pieces = [SegmentPiece(f"piece-{number:06d}", firsts[number], tuple(ends)) for number, ends in enumerate(plan)]
        made = self._make(pieces, "documents", self.stored_codec if self.executor.remote else self.codec)
        return [(piece.folder, contents_of(piece)) for piece in made]

    def _make(self, pieces: Sequence[Piece], description: str, codec: AnyCodec | tuple[str, Path] | None = None) -> list[SealedFolder]:
        """Return pieces in the order given; those that are not finished are made."""
        found = {piece.name: self._find_finished(piece.name) for piece in pieces}
        missing = [piece for piece in pieces if found[piece.name] is None]
        if len(missing) < len(pieces):
            logger.info("%s: %d of %d pieces were finished before the interruption", description, len(pieces) - len(missing), len(pieces))
        with progress_bar(description, sum(piece.documents for piece in pieces), enabled=self.progress) as advance:
            if len(missing) < len(pieces):
                advance(sum(piece.documents for piece in pieces if found[piece.name] is not None))
            if missing:
                remote, threads = self.executor.remote, self.threads
                for piece in missing:
                    self.sealed.remove(piece.name)  # a damaged one
                task = MakePieces(
                    folder=self.work.path,
                    reading=Reading(self.source.read_from, self.source.count),
                    options=self.options,
                    model=WorkerModel.of(self.model) if remote else self.model,
                    threads=threads,
                    codec=codec,
                    sample=self.sample,
                    disk=REAL if remote else self.disk,
                )
                with (
                    computing_with(torch.get_num_threads() if remote else threads),
                    closing(self.executor.run(task, missing, threads=threads, advance=advance)) as finished,
                ):
                    found.update((piece.name, folder) for piece, folder in finished)
        return [folder for folder in found.values() if folder is not None]

    def _find_finished(self, name: str) -> SealedFolder | None:
        return self.sealed.finished(name, "this piece of the build is made again")

    def merged(self, pieces: Sequence[tuple[Path, Contents]], before: Sequence[OpenSegment] = ()) -> list[tuple[Path, Contents]]:
        """Merge pieces into as few segments as the memory allows, or with some segments of the index, ``before``, into one."""
        runs = [range(len(pieces))] if before else groups(self.codec, [_piece_extent(*piece) for piece in pieces], self.options.memory)
        segments: list[tuple[Path, Contents]] = []
        with progress_bar("merging", len(pieces) if len(pieces) > 1 or before else 0, enabled=self.progress) as advance:
            for run in runs:
                chosen = pieces[run.start : run.stop]
                if len(chosen) == 1 and not before:
                    segments.append(chosen[0])
                else:
                    opened = [*before, *(self.open_segment(*piece) for piece in chosen)]
                    folder = self.work.scratch(f"segment-{len(segments):04d}")
                    segments.append((folder, merge_segments(opened, self.codec, folder, self.disk)))
                advance(len(chosen))
        return segments

    def open_segment(self, folder: Path, contents: Contents) -> OpenSegment:
        """Open a segment in the work folder."""
        return open_segment(Files(folder), self.codec, contents.documents, self.options.policy)


def _piece_extent(folder: Path, contents: Contents) -> Extent:
    sizes = {file: (folder / file).stat().st_size for file in contents.holds}
    described = sum(size for file, size in sizes.items() if is_described(file))
    return Extent(contents.documents, contents.vectors, described, sum(sizes.values()))


def _live_extent(segment: OpenSegment, entry: SegmentEntry) -> Extent:
    """Size of a segment without its deleted documents, except that ids and metadata count in full because a merge reads all of them."""
    kept = segment.kept
    count = int(kept.sum())
    described = sum(file.bytes for name, file in entry.files.items() if is_described(name))
    size = sum(file.bytes for file in entry.files.values()) * count // max(entry.documents, 1)
    return Extent(count, int(segment.vectors.lengths[kept].sum()), described, size)


def _without_documents(index: IndexReader, ids: Sequence[str]) -> list[OpenSegment]:
    """Return the segments of an index with some documents marked as deleted; unknown ids are ignored, unaffected segments are reused."""
    segments = []
    for segment in index.segments:
        rows = segment.rows_of(ids)
        rows = rows[rows >= 0]
        if len(rows):
            alive = segment.kept.copy()
            alive[rows] = False
            segment = replace(segment, alive=alive)
        segments.append(segment)
    return segments


def _divide_segments(
    writer: StoreWriter, index: IndexReader, segments: Sequence[OpenSegment], added: Sequence[tuple[Path, Contents]], memory: int
) -> tuple[list[tuple[OpenSegment, SegmentEntry]], list[OpenSegment]]:
    """Split the segments of an index into those to keep, with their manifest entries, and those to merge with an addition."""
    there = [each for each in zip(segments, index.segments, index.manifest.segments, strict=True) if each[0].kept.any()]
    extents = [_live_extent(segment, entry) for segment, _, entry in there]
    whole = reduce(Extent.with_more, [_piece_extent(*piece) for piece in added])
    first = first_merged([*extents, whole], lambda extent: memory_needed(index.codec, extent) <= memory)
    for number in range(len(there) - 1, first - 1, -1):
        entry = there[number][2]
        try:
            verify_files(writer.layout.segments / entry.name, entry.files, full=True)
        except DamagedIndexError as error:  # keep the damaged segment, so that it can be repaired
            logger.warning("%s; the addition is not merged with it", error)
            first = number + 1
            break
    stay = [(segment, entry if segment is former else writer.delete(entry, segment.kept)) for segment, former, entry in there[:first]]
    return stay, [segment for segment, _, _ in there[first:]]


def versions() -> dict[str, str]:
    """Package -> version, for the manifest."""
    return {
        "quiver": installed_version("quiver-retrieval") or "not installed",
        "torch": str(torch.__version__),
        "faiss": faiss.__version__,
        "numpy": np.__version__,
    }


def last_committed(writer: StoreWriter) -> Manifest:
    """The last committed state.

    Raises:
        InputError: Nothing has been committed yet.
    """
    if writer.manifest is None:
        raise InputError(f"{writer.layout.root}: {NOTHING_COMMITTED}")
    return writer.manifest


def _uncommitted_entries(segments: Sequence[tuple[Path, Contents]]) -> tuple[SegmentEntry, ...]:
    """Manifest entries of segments in the work folder; the commit moves their files to the folder of segments."""
    return tuple(SegmentEntry(folder.name, each.documents, each.vectors, each.tokens, {}, None) for folder, each in segments)


def _add_segments(writer: StoreWriter, segments: Sequence[tuple[Path, Contents]]) -> list[SegmentEntry]:
    return [writer.add_segment(folder, **vars(contents)) for folder, contents in segments]


def _measure_recall(
    index: IndexReader, begun: float, memory: int, seed: int, *, progress: bool, ks: Sequence[int] = HITS
) -> dict[str, Any] | None:
    """Calibrate an index for its manifest, within a time limit by the time since ``begun``; None if that needs more memory than allowed."""
    if _PREPARATION_COPIES * sum(segment.vectors.size.resident for segment in index.segments) > memory:
        logger.warning(
            "%s: recall is not measured because that needs more memory than allowed; run quiver index calibrate later", index.path
        )
        return None
    return calibrate(index, ks=ks, seed=seed, seconds=allowed_seconds(time.monotonic() - begun), progress=progress).to_json()


def _measure_recall_again(
    draft: Manifest, index: IndexReader, segments: Sequence[OpenSegment], begun: float, memory: int, *, progress: bool
) -> Manifest:
    """Give the manifest of a changed index a new calibration if ``index``, the one before, had one that does not hold for its segments."""
    former = index.calibration
    if former is None or former.holds_for(segment.documents for segment in draft.segments):
        return draft
    ks = sorted({max(LEAST_HITS, table.k) for table in former.tables})
    changed = IndexReader(index.path, draft, index.codec, segments)
    return replace(draft, calibration=_measure_recall(changed, begun, memory, former.seed, progress=progress, ks=ks))
