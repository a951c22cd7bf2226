"""From documents and a model to an index on the disk, and documents added to one: streamed, within a budget of memory, resumable.

This is the order of things: the lock, one reading of all documents, the work that can be resumed (`retrieval.index.pieces`), the commit.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from quiver.encoder.errors import InputError
from quiver.retrieval.index.calibration import HITS, LEAST_HITS, allowed_seconds, calibrate, is_approximate
from quiver.retrieval.index.disk import REAL, Disk
from quiver.retrieval.index.documents.table import is_described
from quiver.retrieval.index.encoded import Model
from quiver.retrieval.index.engine_table import engine, engine_name, parse_engine
from quiver.retrieval.index.engines import AnyCodec
from quiver.retrieval.index.errors import DamagedIndexError
from quiver.retrieval.index.extents import Extent, first_merged, held
from quiver.retrieval.index.index import Index, check_model, open_index, open_manifest
from quiver.retrieval.index.mapped import Files
from quiver.retrieval.index.memory import build_in_memory
from quiver.retrieval.index.options import DEFAULTS, BuildOptions
from quiver.retrieval.index.pieces import ENCODES_NOTHING, CodecPlace, Pieces, piece_extent
from quiver.retrieval.index.segments import Contents, OpenSegment, open_segment
from quiver.retrieval.index.source import Source, survey
from quiver.retrieval.index.store.manifest import CodecEntry, Manifest, Policy, SegmentEntry
from quiver.retrieval.index.store.reading import NOTHING_COMMITTED, verify_files
from quiver.retrieval.index.store.writing import StoreWriter, writing
from quiver.retrieval.index.work import WorkFolder
from quiver.retrieval.models.loading import with_absolute_source
from quiver.retrieval.protocols import IN_PROCESS, Executor
from quiver.retrieval.records import Document, ModelCard
from quiver.retrieval.versions import installed_version

logger = logging.getLogger(__name__)

# What an index holds while it makes what it searches in memory, as a multiple of that: sorted copies of it.
_MAKING = 3


def build_index(  # noqa: PLR0913 - the public entry: one option for each choice
    corpus: str | Path | Iterable[Document],
    model: Model,
    out: Path | str | None = None,
    *,
    options: BuildOptions = DEFAULTS,
    executor: Executor = IN_PROCESS,
    overwrite: bool = False,
    wait: float = 0.0,
    progress: bool = False,
    disk: Disk = REAL,
) -> Index:
    """Encode a corpus into a new index and open it; a build of the same that was killed goes on where it was.

    Args:
        corpus: A ``.jsonl[.gz]`` file, a folder with ``corpus.jsonl[.gz]``, or documents; it is read several times, and what can be gone
            through only once is written to the index's folder first.
        model: Encodes the documents.
        out: Folder to write; until the index is complete it opens as what it was before, or not at all. None keeps the index in memory.
        options: How it is built.
        executor: Who encodes: by default this process. Whoever it is, the index has the same bytes. Other workers load the model by its
            card, and need ``out`` on a file system that they share with this process.
        overwrite: Replace an index that is at ``out``.
        wait: Seconds to wait for another writer to finish.
        progress: Show bars over the documents.
        disk: Takes all changes.

    Raises:
        InputError: A malformed corpus (file:line), no documents, an id twice, a field to filter by that no document has, a vector that is
            not finite, options that do not go with the model, ``out`` is taken, or a worker cannot see it or load the model.
        WorkerError: Workers died, again and again; run it once more, which resumes.
    """
    begun = time.monotonic()
    spec = parse_engine(options.engine)
    options = replace(options, engine=spec.name, settings={**spec.settings, **options.settings})
    engine(engine_name(options.engine, model.card, 0), model.card)
    if out is None:
        return _build_in_memory(corpus, model, options, executor, begun, progress=progress)
    out = Path(out)
    with (
        writing(out, create=True, overwrite=overwrite, wait=wait, disk=disk) as writer,
        _surveyed(writer, corpus, spooled=executor.remote) as source,
    ):
        options.check_fields(source.fields)
        name = engine_name(options.engine, model.card, source.count)
        engine(name, model.card).check(options.settings, model.card)
        plan = {"engine": name, "settings": dict(options.settings), "seed": options.seed, "use_title": options.use_title}
        with _work(writer, source, model.card, {**plan, **_kept(options)}) as work:
            build = Pieces(model, source, options, work, executor=executor, progress=progress)
            codec, place = build.codec(name)
            segments = build.merged(codec, build.pieces(codec, place))
            if not sum(contents.vectors for _, contents in segments):
                raise InputError("none of the documents has a vector; there is nothing to index")
            fields = None if options.fields is None else sorted(options.fields)
            policy = Policy(use_title=options.use_title, store_text=options.store_text, fields=fields)
            draft = new_manifest(
                "build", with_absolute_source(model.card), policy, CodecEntry(name, "", codec.parameters, {}), _drafted(segments)
            )
            if options.calibrate and is_approximate(codec):
                # Before the pieces are moved to where the commit wants them: a build that is killed here still goes on behind them.
                index = Index(out, draft, codec, _opened(segments, codec, policy))
                draft = replace(draft, calibration=measured(index, begun, memory=options.memory, seed=options.seed, progress=progress))
            entry = writer.add_codec(place.folder, name, codec.parameters, place.holds)
            writer.commit(replace(draft, codec=entry, segments=tuple(_added(writer, segments))))
            work.remove()
        writer.collect_garbage()
    return open_index(out)


def _build_in_memory(
    corpus: str | Path | Iterable[Document], model: Model, options: BuildOptions, executor: Executor, begun: float, *, progress: bool
) -> Index:
    if executor.remote:
        raise InputError("workers write to the folder of an index; name a folder to build with them, or build without workers")
    index = build_in_memory(corpus, model, options, progress=progress)
    if not options.calibrate or not is_approximate(index.codec):
        return index
    calibration = measured(index, begun, memory=options.memory, seed=options.seed, progress=progress)
    return Index(index.path, replace(index.manifest, calibration=calibration), index.codec, index.segments)


def add_documents(
    path: Path | str,
    corpus: str | Path | Iterable[Document],
    model: Model,
    *,
    replace_existing: bool = False,
    memory: int = DEFAULTS.memory,
    wait: float = 0.0,
    progress: bool = False,
    disk: Disk = REAL,
) -> Index:
    """Add documents to an index, with the codec that it has; an addition that was killed goes on where it was.

    Small segments are merged with the addition where there are several (`retrieval.index.extents.first_merged`), so that an index that
    grows by single documents is searched about as fast as a compacted one. What was measured of the index stays where it still holds
    (`quiver.retrieval.index.recall_table.Calibration.holds_for`); otherwise the index is measured again.

    Args:
        path: The index.
        corpus: As for `build_index`.
        model: The one that built the index.
        replace_existing: A document whose id is in the index takes the place of that one.
        memory: Bytes that it may hold beside the model and one chunk of texts.
        wait: Seconds to wait for another writer to finish.
        progress: Show a bar over the documents.
        disk: Takes all changes.

    Returns:
        The index with the documents.

    Raises:
        InputError: As for `build_index`; another model built the index, or a document is in it already.
    """
    path, begun = Path(path), time.monotonic()
    with writing(path, wait=wait, disk=disk) as writer:
        before = committed(writer)
        check_model(path, before, model.card)
        index = open_manifest(writer.layout, before)
        replaced: list[str] = []
        with _surveyed(writer, corpus, index=index, replaced=replaced) as source:
            if replaced and not replace_existing:
                raise InputError(
                    f"{path}: document '{replaced[0]}' is in this index already; replace it with --replace, or give it another id"
                )
            policy = before.policy
            options = BuildOptions(memory=memory, use_title=policy.use_title, store_text=policy.store_text, fields=policy.fields)
            plan = {"codec": before.codec.name, "use_title": policy.use_title, **_kept(options)}
            with _work(writer, source, model.card, plan) as work:
                place = CodecPlace(before.codec.name, writer.layout.codecs / before.codec.name, {})
                build = Pieces(model, source, options, work, progress=progress)
                pieces = build.pieces(index.codec, place)
                stay, join = _divided(writer, index, without(index, replaced), [piece_extent(*each) for each in pieces], memory)
                segments = build.merged(index.codec, pieces, before=join)
                entries = [entry for _, entry in stay]
                draft = replace(before, operation="add", versions=versions(), segments=(*entries, *_drafted(segments)))
                opened = [*(segment for segment, _ in stay), *_opened(segments, index.codec, policy)]
                draft = remeasured(draft, index, opened, begun, memory=memory, progress=progress)
                writer.commit(replace(draft, segments=(*entries, *_added(writer, segments))))
                work.remove()
        writer.collect_garbage()
    return open_index(path)


def measured(index: Index, begun: float, *, memory: int, seed: int, progress: bool, ks: Sequence[int] = HITS) -> dict[str, Any] | None:
    """What a manifest says of the recall and latency of an index; None where it cannot be searched within the memory.

    Args:
        index: The index, which need not be committed yet.
        begun: When the change of which this is the last part began, by the monotonic clock.
        memory: Bytes that the change may hold.
        seed: Of what is chosen at random.
        progress: Show a bar.
        ks: Numbers of hits.
    """
    if _MAKING * sum(segment.vectors.size.resident for segment in index.segments) > memory:
        logger.warning("%s: recall is not measured, which takes more memory than allowed; quiver index calibrate does it", index.path)
        return None
    found = calibrate(index, ks=ks, seed=seed, seconds=allowed_seconds(time.monotonic() - begun), progress=progress)
    return found.to_json()


def remeasured(draft: Manifest, index: Index, segments: Sequence[OpenSegment], begun: float, *, memory: int, progress: bool) -> Manifest:
    """A changed manifest with a calibration that holds for it, if the index has one: the one it has, or a new one.

    Args:
        draft: What is to be committed.
        index: The index before.
        segments: The segments of the draft.
        begun: When the change began, by the monotonic clock.
        memory: Bytes that the change may hold.
        progress: Show a bar.
    """
    former = index.calibration
    if former is None or former.holds_for(segment.documents for segment in draft.segments):
        return draft
    ks = sorted({max(LEAST_HITS, table.k) for table in former.tables})
    changed = Index(index.path, draft, index.codec, segments)
    return replace(draft, calibration=measured(changed, begun, memory=memory, seed=former.seed, progress=progress, ks=ks))


def without(index: Index, ids: Sequence[str]) -> list[OpenSegment]:
    """The segments of an index without some documents; ids that it does not have are passed over, and a segment that has none is itself."""
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


def live_extent(segment: OpenSegment, entry: SegmentEntry) -> Extent:
    """How large a segment is without its deleted documents; ids and metadata of those are counted, which a merge reads all the same."""
    kept = segment.kept
    count = int(kept.sum())
    described = sum(file.bytes for name, file in entry.files.items() if is_described(name))
    size = sum(file.bytes for file in entry.files.values()) * count // max(entry.documents, 1)
    return Extent(count, int(segment.vectors.lengths[kept].sum()), described, size)


def _divided(
    writer: StoreWriter, index: Index, segments: Sequence[OpenSegment], added: Sequence[Extent], memory: int
) -> tuple[list[tuple[OpenSegment, SegmentEntry]], list[OpenSegment]]:
    """Divide the segments of an index into those that stay, with their entries, and those that an addition is merged with.

    Args:
        writer: Writes the tombstones of those that stay and have lost documents.
        index: The index before.
        segments: Its segments without the documents that the addition replaces.
        added: How large the pieces of the addition are.
        memory: Bytes that a merge may hold.
    """
    there = [each for each in zip(segments, index.segments, index.manifest.segments, strict=True) if each[0].kept.any()]
    extents = [live_extent(segment, entry) for segment, _, entry in there]
    whole = reduce(Extent.with_more, added)
    first = first_merged([*extents, whole], lambda extent: held(index.codec, extent) <= memory)
    for number in range(len(there) - 1, first - 1, -1):
        entry = there[number][2]
        try:
            verify_files(writer.layout.segments / entry.name, entry.files, full=True)
        except DamagedIndexError as error:  # it can be repaired as long as it stays what it is
            logger.warning("%s; the addition is not merged with it", error)
            first = number + 1
            break
    stay = [(segment, entry if segment is former else writer.delete(entry, segment.kept)) for segment, former, entry in there[:first]]
    return stay, [segment for segment, _, _ in there[first:]]


def new_manifest(operation: str, card: ModelCard, policy: Policy, codec: CodecEntry, segments: Sequence[SegmentEntry]) -> Manifest:
    """A manifest that has not been committed."""
    return Manifest(0, "", operation, versions(), card, policy, codec, tuple(segments))


def versions() -> dict[str, str]:
    """Package -> version, for the manifest."""
    return {
        "quiver": installed_version("quiver-retrieval") or "not installed",
        "torch": str(torch.__version__),
        "faiss": faiss.__version__,
        "numpy": np.__version__,
    }


def committed(writer: StoreWriter) -> Manifest:
    """The state that is to be changed.

    Raises:
        InputError: There is none yet.
    """
    if writer.manifest is None:
        raise InputError(f"{writer.layout.root}: {NOTHING_COMMITTED}")
    return writer.manifest


def _kept(options: BuildOptions) -> dict[str, Any]:
    return {"store_text": options.store_text, "fields": None if options.fields is None else sorted(options.fields)}


@contextmanager
def _surveyed(
    writer: StoreWriter,
    corpus: str | Path | Iterable[Document],
    *,
    spooled: bool = False,
    index: Index | None = None,
    replaced: list[str] | None = None,
) -> Iterator[Source]:
    """The documents, read once; ids that the index has are collected on the way.

    What workers read has a name of its own: one that has outlived a build that was killed must not read the documents of the next.
    """

    def look(chunk: list[Document]) -> None:
        if index is not None and replaced is not None:
            ids = [document.id for document in chunk]
            replaced.extend(key for key, place in zip(ids, index.locate(ids), strict=True) if place is not None)

    spool = writer.layout.temporary / (f"corpus-{uuid.uuid4().hex[:12]}.jsonl" if spooled else "corpus.jsonl")
    try:
        source = survey(corpus, spool, disk=writer.disk, spooled=spooled, look=look)
        logger.info("%d documents to index", source.count)
        yield source
    finally:
        if spool.exists():
            writer.disk.unlink(spool)


@contextmanager
def _work(writer: StoreWriter, source: Source, card: ModelCard, plan: Mapping[str, Any]) -> Iterator[WorkFolder]:
    """The folder of the work; after an error it stays if anything in it is encoded."""
    whole = {**plan, "documents": source.sha256, "model": card.fingerprint}
    work = WorkFolder(writer.layout, whole, disk=writer.disk)
    try:
        yield work
    finally:
        if work.folder.is_dir() and not set(work.names) - ENCODES_NOTHING:
            work.remove()


def _drafted(segments: Sequence[tuple[Path, Contents]]) -> tuple[SegmentEntry, ...]:
    """Entries of segments that are not where readers look; their files come with the commit."""
    return tuple(SegmentEntry(folder.name, each.documents, each.vectors, each.tokens, {}) for folder, each in segments)


def _opened(segments: Sequence[tuple[Path, Contents]], codec: AnyCodec, policy: Policy) -> list[OpenSegment]:
    return [open_segment(Files(folder), codec, each.documents, texts=policy.store_text) for folder, each in segments]


def _added(writer: StoreWriter, segments: Sequence[tuple[Path, Contents]]) -> list[SegmentEntry]:
    entries = []
    for folder, each in segments:
        entries.append(writer.add_segment(folder, each.holds, documents=each.documents, vectors=each.vectors, tokens=each.tokens))
    return entries
