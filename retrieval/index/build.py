"""Build and change an index: build, add, delete, compact and calibrate.

An operation takes the writers' lock, does its work and commits it atomically. An interrupted build or addition resumes when run again.

`Pieces` makes the segments of a build. If a codec has to be trained, documents chosen at random are encoded first, and their vectors wait
on disk until their piece is written. Then all pieces are encoded (`quiver.retrieval.index.pieces`), in this process or by workers, and
merged into segments. Merging copies bytes and encodes nothing; the resulting bytes do not depend on the borders of the pieces or on which
worker made them. Training, merging and the commit happen in the building process.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.schema import RECORD, Field, with_config
from quiver.retrieval.data.column_types import OnTypeError
from quiver.retrieval.data.files import FolderFiles
from quiver.retrieval.data.source import DEFAULTS as DEFAULT_SOURCE
from quiver.retrieval.data.source import Corpus, open_corpus, tokens_of
from quiver.retrieval.data.tables import GivenDocuments, documents_among
from quiver.retrieval.index.calibration import HITS, LEAST_HITS, QUERIES, allowed_seconds, calibrate
from quiver.retrieval.index.documents import FieldCheck, is_described, keeps_field, rows_by_value, widened_types
from quiver.retrieval.index.engines import (
    WORDS,
    AnyCodec,
    Sample,
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
from quiver.retrieval.index.on_device import clustering_on, device_of
from quiver.retrieval.index.pieces import (
    DEFAULTS,
    BuildFolder,
    BuildOptions,
    Encoded,
    Extent,
    Finished,
    MakeAnywhere,
    MakeHere,
    Model,
    Piece,
    PieceLimits,
    PieceMaker,
    PiecePlan,
    PieceSizes,
    Reading,
    Sampled,
    SamplePiece,
    Source,
    chunk_ends,
    computing_with,
    concatenate_encoded,
    contents_of,
    memory_needed,
    plan_pieces,
    survey,
)
from quiver.retrieval.index.segments import Contents, OpenSegment, merge_segments, open_segment
from quiver.retrieval.index.sources import (
    FILE,
    check_replaced,
    describe_source,
    forget_sources,
    is_rereadable,
    options_like,
    read_sources,
    remember_source,
    tell_apart,
    write_sources,
)
from quiver.retrieval.index.store.reading import (
    NOTHING_COMMITTED,
    CodecEntry,
    Manifest,
    Policy,
    SegmentEntry,
    verify_files,
)
from quiver.retrieval.index.store.writing import StoreWriter, writing
from quiver.retrieval.models.index_model import load_index_model
from quiver.retrieval.models.loading import WorkerModel
from quiver.retrieval.models.pretrained import with_absolute_source
from quiver.retrieval.records import IN_PROCESS, Document, Executor, ModelCard

logger = logging.getLogger(__name__)

FAN = 4
"""Number of segments, the new one included, from which an addition is merged with earlier segments."""

FLOOR = 1 << 20
"""Bytes below which the cost of writing a segment does not depend on its size: it has a dozen files, each of which is synced."""


def groups(codec: AnyCodec, extents: Sequence[Extent], memory: int) -> list[range]:
    """Group successive segments so that each group can be merged within the memory limit.

    Args:
        codec: Codec of the segments; it estimates the memory of a merge.
        extents: Size of each segment.
        memory: Memory limit of a merge in bytes; a segment that exceeds it stays alone.
    """
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

    Args:
        extents: Size of each segment without its deleted documents; the last one is the addition.
        fits: Whether a merge that results in a segment of a given size is allowed.

    Returns:
        Number of the first segment to merge; the number of the addition if no merge is due.

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


CODEC = "codec"
"""Name of the piece that holds the codec."""

_PLAN, _THREADS = "plan", "threads"

ENCODES_NOTHING = frozenset({CODEC, _PLAN, _THREADS})
"""Names of the pieces whose creation encodes nothing; all others are worth keeping for a resumed build."""


@with_config(RECORD)
@dataclass(frozen=True)
class AgreedThreads:
    """Number of threads that each worker of a build encodes with, as stored with the build."""

    threads: Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class CodecFolder:
    """A codec on disk.

    Attributes:
        engine: Name of its engine.
        folder: Folder with its files.
        holds: Description of each file, by name.
    """

    engine: str
    folder: Path
    holds: Mapping[str, str]


class Pieces:
    """Makes the codec, the pieces and the segments of one build.

    Args:
        model: Encodes the documents.
        source: The documents.
        options: Options of the build.
        work: Working folder.
        executor: Runs the tasks that make pieces.
        progress: Show progress bars.
    """

    def __init__(
        self, model: Model, source: Source, options: BuildOptions, work: BuildFolder, *, executor: Executor = IN_PROCESS, progress: bool
    ) -> None:
        self._model = model
        self._card: ModelCard = model.card
        self._source = source
        self._options = options
        self._work = work
        self._executor = executor
        self._progress = progress
        self._sampled = Sampled((), self._card.dim)
        self._threads = self._agreed_threads()

    def codec(self, name: str) -> tuple[AnyCodec, CodecFolder]:
        """Return the codec of an engine, trained now or before an interruption."""
        wanted = engine(name, self._card).sample
        if wanted(self._source.count):
            self._sampled = self._encode_sample(self._choose_sample(wanted), "sample")
        done = self._work.pieces.finished(CODEC)
        if done is None:
            folder = self._work.pieces.begin(CODEC)
            done = self._work.pieces.finish(
                CODEC, folder, self._train(name, self._sampled.encoded()).save(folder, self._work.pieces.disk), {}
            )
        # Open the codec from its files even if it was just trained, as a resumed build does.
        return open_codec(name, done.folder), CodecFolder(name, done.folder, done.holds)

    def pieces(self, codec: AnyCodec, place: CodecFolder) -> list[tuple[Path, Contents]]:
        """Encode all documents and return the finished pieces, each with its folder.

        Args:
            codec: Codec of the index.
            place: The same codec on disk.

        Raises:
            InputError: A vector is not finite (names the document).
        """
        plan = self._agreed_plan(codec)
        made = self._make(plan.pieces, "documents", codec=codec, place=place)
        return [(each.folder, contents_of(each)) for each in made]

    def merged(
        self, codec: AnyCodec, pieces: Sequence[tuple[Path, Contents]], *, before: Sequence[OpenSegment] = ()
    ) -> list[tuple[Path, Contents]]:
        """Merge pieces into as few segments as the memory allows; each is returned with its folder.

        Args:
            codec: Codec of the pieces.
            pieces: The finished pieces.
            before: Segments of the index to merge with all pieces into one segment, as chosen by `first_merged`.
        """
        extents = [piece_extent(folder, each) for folder, each in pieces]
        runs = [range(len(pieces))] if before else groups(codec, extents, self._options.memory)
        segments: list[tuple[Path, Contents]] = []
        with progress_bar("merging", len(pieces) if len(pieces) > 1 or before else 0, enabled=self._progress) as advance:
            for run in runs:
                chosen = pieces[run.start : run.stop]
                if len(chosen) == 1 and not before:
                    segments.append(chosen[0])
                else:
                    opened = [*before, *(self._open(codec, *each) for each in chosen)]
                    folder = self._work.scratch(f"segment-{len(segments):04d}")
                    segments.append((folder, merge_segments(opened, codec, folder, self._work.pieces.disk)))
                advance(len(chosen))
        return segments

    def _agreed_threads(self) -> int:
        """The number of threads stored with the build; a new build stores its own."""
        wanted = self._options.threads or self._executor.threads(torch.get_num_threads())
        done = self._work.pieces.finished(_THREADS)
        if done is None:
            folder = self._work.pieces.begin(_THREADS)
            done = self._work.pieces.finish(_THREADS, folder, {}, asdict(AgreedThreads(wanted)))
        threads = done.record(AgreedThreads).threads
        if threads != wanted:
            logger.info("resuming with %d threads per worker, the number that the build was started with", threads)
        return threads

    def _agreed_plan(self, codec: AnyCodec) -> PiecePlan:
        """The plan stored with the build; a new build makes and stores one."""
        done = self._work.pieces.finished(_PLAN)
        if done is not None:
            return done.record(PiecePlan)
        lengths, sizes = self._source.lengths, self._options.pieces
        ends = chunk_ends(lengths, documents=sizes.chunk_documents, characters=sizes.chunk_characters)
        share = max(sizes.chunk_characters, int(lengths.sum(dtype=np.int64)) // sizes.count)
        limits = PieceLimits(
            documents=min(sizes.documents, max(sizes.least_documents, len(lengths) // sizes.count)),
            characters=min(sizes.characters, share),
            vectors=sizes.vector_bytes // (4 * self._card.dim),
            memory=self._options.memory,
        )
        plan = plan_pieces(lengths, ends, limits, self._card, codec)
        self._work.pieces.finish(_PLAN, self._work.pieces.begin(_PLAN), {}, asdict(plan))
        return plan

    def _make(
        self, pieces: Sequence[Piece], description: str, *, codec: AnyCodec | None = None, place: CodecFolder | None = None
    ) -> list[Finished]:
        """Return pieces in the order given; those that are not finished are made."""
        made: dict[str, Finished] = {}
        for piece in pieces:
            if (done := self._work.pieces.finished(piece.name)) is not None:
                made[piece.name] = done
            else:
                self._work.pieces.discard(piece.name)
        missing = [piece for piece in pieces if piece.name not in made]
        if made:
            logger.info("%s: %d of %d pieces were finished before the interruption", description, len(made), len(pieces))
        with progress_bar(description, sum(piece.documents for piece in pieces), enabled=self._progress) as advance:
            if made:
                advance(sum(piece.documents for piece in pieces if piece.name in made))
            if missing:
                with self._running(missing, codec, place, advance) as finished:
                    made.update((piece.name, done) for piece, done in finished)
        return [made[piece.name] for piece in pieces]

    @contextmanager
    def _running(
        self, pieces: Sequence[Piece], codec: AnyCodec | None, place: CodecFolder | None, advance: Advance
    ) -> Iterator[Iterator[tuple[Piece, Finished]]]:
        """Yield pieces as they are finished; the workers are stopped when the block ends."""
        if not self._executor.remote:
            reading = Reading(self._source.read_from, self._source.count)
            vectors = self._sampled.vectors()
            maker = PieceMaker(self._model, reading, self._options, self._work.pieces, codec=codec, sample=vectors, advance=advance)
            with computing_with(self._threads), closing(self._executor.run(MakeHere(maker), pieces, threads=self._threads)) as finished:
                yield finished
            return
        task = MakeAnywhere(
            folder=self._work.folder,
            spool=self._source.spool,
            count=self._source.count,
            options=self._options,
            model=WorkerModel.of(self._model),
            threads=self._threads,
            codec=None if place is None else (place.engine, place.folder),
            sampled=self._sampled,
        )
        with closing(self._executor.run(task, pieces, threads=self._threads, advance=advance)) as finished:
            yield finished

    def _open(self, codec: AnyCodec, folder: Path, contents: Contents) -> OpenSegment:
        return open_segment(Files(folder), codec, contents.documents, self._options.policy)

    def _choose_sample(self, wanted: Callable[[int], int]) -> list[NDArray[np.int64]]:
        """Choose documents at random with as many vectors as the engine wants for training; their numbers, ascending, per piece."""
        count, mean = self._source.count, 1.0
        order = np.random.default_rng(self._options.seed).permutation(count)
        if self._card.kind != "dense":
            probe = self._encode_sample([np.sort(order[: self._options.pieces.probe_documents])], "probe")
            mean = max(float(probe.encoded()[0].lengths.mean()), 1.0)
        # The sample may use half of the memory, training the other half.
        best, fits = wanted(round(mean * count)), self._options.memory // (8 * self._card.dim)
        if fits < best:
            logger.warning(
                "training uses %d vectors instead of %d, to stay within the memory limit; raise the limit for better recall", fits, best
            )
        vectors = min(best, fits)
        numbers = np.sort(order[: max(1, math.ceil(vectors / mean))])
        sizes = self._options.pieces
        size = max(1, min(sizes.sample_documents, int(sizes.vector_bytes / (4 * self._card.dim * mean))))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    def _encode_sample(self, parts: Sequence[NDArray[np.int64]], name: str) -> Sampled:
        """Encode chosen documents, or reuse the result of an interrupted build."""
        pieces = [SamplePiece(f"{name}-{number:04d}", part, self._options.pieces.chunk_documents) for number, part in enumerate(parts)]
        made = self._make(pieces, name)
        return Sampled(tuple((piece, each.folder) for piece, each in zip(pieces, made, strict=True)), self._card.dim)

    def _train(self, name: str, pieces: Sequence[Encoded]) -> AnyCodec:
        count, dense = self._source.count, self._card.kind == "dense"
        sample, mean = Sample(np.zeros((0, self._card.dim), np.float32)), 0.0
        if pieces:
            encoded = concatenate_encoded(pieces)
            sample = Sample(encoded.vectors, None if dense else encoded.lengths, encoded.token_ids)
            mean = len(encoded.vectors) / len(encoded.lengths)
        if pieces and not len(sample.vectors):
            raise InputError("none of the documents has a vector; there is nothing to index")
        vectors = count if dense else round(mean * count)
        settings, seed = self._options.settings, self._options.seed
        with clustering_on(device_of(self._model)), progress_bar("training", int(bool(pieces)), enabled=self._progress):
            return train_codec(name, sample, self._card, documents=count, vectors=vectors, settings=settings, seed=seed)


def piece_extent(folder: Path, contents: Contents) -> Extent:
    """Size of a finished piece."""
    sizes = {file: (folder / file).stat().st_size for file in contents.holds}
    described = sum(size for file, size in sizes.items() if is_described(file))
    return Extent(contents.documents, contents.vectors, described, sum(sizes.values()))


# Peak memory of preparing an index for searching, as a multiple of the memory that searching needs: the preparation makes sorted copies.
_MAKING = 3


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
    corpus = _opened_corpus(corpus, model)
    spec = parse_engine(options.engine)
    options = replace(options, engine=spec.name, settings={**spec.settings, **options.settings}, types={**options.types, **(types or {})})
    options = replace(options, on_type_error=on_type_error or options.on_type_error)
    fields = FieldCheck(options.types, options.on_type_error)
    engine(engine_name(options.engine, model.card, 0), model.card)
    if out is None:
        return _warn_of_truncation(_build_in_memory(corpus, model, options, executor, begun, progress=progress))
    out = Path(out)
    with (
        writing(out, create=True, overwrite=overwrite, wait=wait, disk=disk) as writer,
        _survey_corpus(writer, corpus, fields, spooled=executor.remote, progress=progress) as source,
    ):
        options = replace(options, types=options.field_types(source.types))
        name = engine_name(options.engine, model.card, source.count)
        engine(name, model.card).check(options.settings, model.card)
        plan = {"engine": name, "settings": dict(options.settings), "seed": options.seed, "use_title": options.use_title}
        with _open_pieces(writer, source, model.card, {**plan, **_describe_storage(options)}) as work:
            build = Pieces(model, source, options, work, executor=executor, progress=progress)
            codec, place = build.codec(name)
            segments = build.merged(codec, build.pieces(codec, place))
            if not sum(contents.vectors for _, contents in segments):
                work.remove()  # the same build would fail again, so there is nothing to resume
                raise InputError(f"none of the documents has a {'word' if name == WORDS else 'vector'}; there is nothing to index")
            policy = options.policy
            draft = new_manifest(
                "build", with_absolute_source(model.card), policy, CodecEntry(name, "", codec.parameters, {}), _draft_entries(segments)
            )
            if options.calibrate and is_approximate(codec):
                # Calibrate before the commit moves the pieces: a build that is killed during calibration can then still resume.
                index = IndexReader(out, draft, codec, _open_segments(segments, codec, policy))
                draft = replace(
                    draft, calibration=measure_recall(index, begun, memory=options.memory, seed=options.seed, progress=progress)
                )
            forget_sources(out, disk)
            entry = writer.add_codec(place.folder, name, codec.parameters, place.holds)
            writer.commit(replace(draft, codec=entry, segments=tuple(_add_segments(writer, segments))))
            work.remove()
        if isinstance(corpus, Corpus) and is_rereadable(corpus):
            write_sources(out, last_committed(writer).generation, [describe_source(corpus, source.count)], disk)
        writer.collect_garbage()
    built = _warn_of_truncation(open_index(out))
    built.model = model
    return built


def _warn_of_truncation(changed: IndexReader, before: int = 0) -> IndexReader:
    """Warn if the model did not read all of the documents that were added.

    Args:
        changed: The index.
        before: Number of documents that the model had not read completely before.
    """
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


def _opened_corpus(corpus: Any, model: Model, extended: Path | None = None) -> Iterable[Document]:
    """Open a source with the model's tokens as the measure of passages; make documents of texts, mappings and data frames.

    A source to add to an index is read as its others.
    """
    if isinstance(corpus, str | Path):
        options = DEFAULT_SOURCE if extended is None else options_like(extended, str(corpus))
        return open_corpus(corpus, options, tokens_of(model), taken_over=extended is not None)
    if isinstance(corpus, Iterator):  # it can be read only once
        return documents_among(corpus)
    if isinstance(corpus, Corpus):
        return corpus if corpus.measured is None else corpus.measured(tokens_of(model))
    return GivenDocuments(corpus)


def _build_in_memory(
    corpus: str | Path | Iterable[Document], model: Model, options: BuildOptions, executor: Executor, begun: float, *, progress: bool
) -> IndexReader:
    if executor.remote:
        raise InputError("workers write to the folder of an index; name a folder to build with them, or build without workers")
    index = build_in_memory(corpus, model, options, progress=progress)
    index.model = model
    if not options.calibrate or not is_approximate(index.codec):
        return index
    calibration = measure_recall(index, begun, memory=options.memory, seed=options.seed, progress=progress)
    calibrated = IndexReader(index.path, replace(index.manifest, calibration=calibration), index.codec, index.segments)
    calibrated.model = model
    return calibrated


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
    corpus = _opened_corpus(corpus, model, path)
    with writing(path, wait=wait, disk=disk) as writer:
        before = last_committed(writer)
        check_model(path, before, model.card)
        index = open_manifest(writer.layout, before)
        known, replaced = read_sources(path).sources, list[str]()
        if isinstance(corpus, Corpus):
            corpus = tell_apart(corpus, known, index)
        fields = FieldCheck(widened_types(path, before.policy.types, types or {}), on_type_error, is_index=True)
        with _survey_corpus(writer, corpus, fields, index=index, replaced=replaced, progress=progress) as source:
            if delete is None:
                check_replaced(path, corpus, known, replaced, replace_existing=replace_existing)
                replaced += _other_passages(index, corpus, replaced)
            else:
                replaced += delete()
            policy = before.policy
            options = BuildOptions(
                memory=memory, use_title=policy.use_title, store_text=policy.store_text, fields=policy.fields, pieces=pieces
            )
            options = replace(options, types={name: kind for name, kind in source.types.items() if keeps_field(policy.fields, name)})
            index = open_manifest(writer.layout, replace(before, policy=options.policy))
            policy = options.policy
            plan = {"codec": before.codec.name, "use_title": policy.use_title, **_describe_storage(options)}
            with _open_pieces(writer, source, model.card, plan) as work:
                place = CodecFolder(before.codec.name, writer.layout.codecs / before.codec.name, {})
                build = Pieces(model, source, options, work, progress=progress)
                made = build.pieces(index.codec, place)
                stay, join = _divide_segments(
                    writer, index, without_documents(index, replaced), [piece_extent(*each) for each in made], memory
                )
                segments = build.merged(index.codec, made, before=join)
                entries = [entry for _, entry in stay]
                draft = replace(before, operation="add", versions=versions(), policy=policy, segments=(*entries, *_draft_entries(segments)))
                opened = [*(segment for segment, _ in stay), *_open_segments(segments, index.codec, policy)]
                draft = measure_recall_again(draft, index, opened, begun, memory=memory, progress=progress)
                writer.commit(replace(draft, segments=(*entries, *_add_segments(writer, segments))))
                work.remove()
        remember_source(path, last_committed(writer).generation, corpus, source.count, disk)
        writer.collect_garbage()
    return _warn_of_truncation(open_index(path), before.tokens.truncated)


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


def measure_recall(
    index: IndexReader, begun: float, *, memory: int, seed: int, progress: bool, ks: Sequence[int] = HITS
) -> dict[str, Any] | None:
    """Calibrate an index after a change, in the form of the manifest; None if searching it needs more memory than allowed.

    Args:
        index: The index; it need not be committed yet.
        begun: Time at which the change began, as ``time.monotonic()`` returns it; it determines the time limit of the calibration.
        memory: Memory limit of the change in bytes.
        seed: Random seed of the pseudo queries.
        progress: Show a progress bar.
        ks: Numbers of hits to measure.
    """
    if _MAKING * sum(segment.vectors.size.resident for segment in index.segments) > memory:
        logger.warning(
            "%s: recall is not measured because that needs more memory than allowed; run quiver index calibrate later", index.path
        )
        return None
    found = calibrate(index, ks=ks, seed=seed, seconds=allowed_seconds(time.monotonic() - begun), progress=progress)
    return found.to_json()


def measure_recall_again(
    draft: Manifest, index: IndexReader, segments: Sequence[OpenSegment], begun: float, *, memory: int, progress: bool
) -> Manifest:
    """Return the manifest of a changed index with a valid calibration: the existing one if it still holds, otherwise a new one.

    An index without calibration stays without.

    Args:
        draft: Manifest to be committed.
        index: The index before the change.
        segments: Segments of the draft, opened.
        begun: Time at which the change began, as ``time.monotonic()`` returns it.
        memory: Memory limit of the change in bytes.
        progress: Show a progress bar.
    """
    former = index.calibration
    if former is None or former.holds_for(segment.documents for segment in draft.segments):
        return draft
    ks = sorted({max(LEAST_HITS, table.k) for table in former.tables})
    changed = IndexReader(index.path, draft, index.codec, segments)
    return replace(draft, calibration=measure_recall(changed, begun, memory=memory, seed=former.seed, progress=progress, ks=ks))


def without_documents(index: IndexReader, ids: Sequence[str]) -> list[OpenSegment]:
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


def live_extent(segment: OpenSegment, entry: SegmentEntry) -> Extent:
    """Size of a segment without its deleted documents, except that ids and metadata count in full because a merge reads all of them."""
    kept = segment.kept
    count = int(kept.sum())
    described = sum(file.bytes for name, file in entry.files.items() if is_described(name))
    size = sum(file.bytes for file in entry.files.values()) * count // max(entry.documents, 1)
    return Extent(count, int(segment.vectors.lengths[kept].sum()), described, size)


def _divide_segments(
    writer: StoreWriter, index: IndexReader, segments: Sequence[OpenSegment], added: Sequence[Extent], memory: int
) -> tuple[list[tuple[OpenSegment, SegmentEntry]], list[OpenSegment]]:
    """Split the segments of an index into those to keep, with their manifest entries, and those to merge with an addition."""
    there = [each for each in zip(segments, index.segments, index.manifest.segments, strict=True) if each[0].kept.any()]
    extents = [live_extent(segment, entry) for segment, _, entry in there]
    whole = reduce(Extent.with_more, added)
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


def last_committed(writer: StoreWriter) -> Manifest:
    """The last committed state.

    Raises:
        InputError: Nothing has been committed yet.
    """
    if writer.manifest is None:
        raise InputError(f"{writer.layout.root}: {NOTHING_COMMITTED}")
    return writer.manifest


def _describe_storage(options: BuildOptions) -> dict[str, Any]:
    fields = None if options.fields is None else sorted(options.fields)
    return {"store_text": options.store_text, "fields": fields, "types": dict(options.types)}


@contextmanager
def _survey_corpus(
    writer: StoreWriter,
    corpus: str | Path | Iterable[Document],
    fields: FieldCheck,
    *,
    spooled: bool = False,
    index: IndexReader | None = None,
    replaced: list[str] | None = None,
    progress: bool,
) -> Iterator[Source]:
    """Read the corpus once and collect the ids that the index already has.

    The spool file for workers gets a unique name: a worker that outlives a killed build must not read the documents of the next build.
    """

    def look(chunk: list[Document]) -> None:
        advance(len(chunk))
        if index is not None and replaced is not None:
            ids = [document.id for document in chunk]
            replaced.extend(key for key, place in zip(ids, index.locate(ids), strict=True) if place is not None)

    spool = writer.layout.temporary / (f"corpus-{uuid.uuid4().hex[:12]}.jsonl" if spooled else "corpus.jsonl")
    try:
        with progress_bar("reading", None, enabled=progress) as advance:
            source = survey(corpus, spool, disk=writer.disk, spooled=spooled, look=look, fields=fields)
        fields.tell_nulls()
        logger.info("%d documents to index", source.count)
        yield source
    finally:
        if spool.exists():
            writer.disk.unlink(spool)


@contextmanager
def _open_pieces(writer: StoreWriter, source: Source, card: ModelCard, plan: Mapping[str, Any]) -> Iterator[BuildFolder]:
    """The working folder of the build; after an error it is kept if it holds encoded pieces."""
    whole = {**plan, "documents": source.sha256, "model": card.fingerprint}
    work = BuildFolder(writer.layout, whole, disk=writer.disk)
    try:
        yield work
    finally:
        if work.folder.is_dir() and not set(work.names) - ENCODES_NOTHING:
            work.remove()


def _draft_entries(segments: Sequence[tuple[Path, Contents]]) -> tuple[SegmentEntry, ...]:
    """Manifest entries of segments in the working folder; the commit moves their files to the folder of segments."""
    return tuple(SegmentEntry(folder.name, each.documents, each.vectors, each.tokens, {}, None) for folder, each in segments)


def _open_segments(segments: Sequence[tuple[Path, Contents]], codec: AnyCodec, policy: Policy) -> list[OpenSegment]:
    return [open_segment(Files(folder), codec, each.documents, policy) for folder, each in segments]


def _add_segments(writer: StoreWriter, segments: Sequence[tuple[Path, Contents]]) -> list[SegmentEntry]:
    entries = []
    for folder, each in segments:
        entries.append(writer.add_segment(folder, each.holds, documents=each.documents, vectors=each.vectors, tokens=each.tokens))
    return entries


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
            first = f"{missing[0]}#1"
            known = index.locate([first])[0] is not None
            passages = (
                f"; its passages are {first} and so on, and quiver index refresh drops files that are gone or excluded" if known else ""
            )
            raise InputError(f"{path}: document '{missing[0]}' is not in this index{others}; nothing was deleted{passages}")
        if wanted:
            changed = zip(index.segments, without_documents(index, wanted), before.segments, strict=True)
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
        extents = [live_extent(segment, entry) for segment, entry in zip(index.segments, before.segments, strict=True)]
        segments: list[SegmentEntry] = []
        with progress_bar("merging", len(extents), enabled=progress) as advance:
            for run in groups(index.codec, extents, memory) if extents else ():
                segments += _compact_run(writer, index, run)
                advance(len(run))
        if tuple(segments) != before.segments:
            draft = replace(before, operation="compact", versions=versions(), segments=tuple(segments))
            opened = open_manifest(writer.layout, draft).segments
            writer.commit(measure_recall_again(draft, index, opened, begun, memory=memory, progress=progress))
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
        vectors = None if queries is None else _encode_real_queries(index, model, queries, progress=progress)
        found = calibrate(index, queries=vectors, count=count, ks=ks, seed=seed, progress=progress)
        writer.commit(replace(before, operation="calibrate", versions=versions(), calibration=found.to_json()))
        writer.collect_garbage()
    return open_index(path)


def _encode_real_queries(index: IndexReader, model: Model | None, queries: Sequence[str], *, progress: bool) -> Any:
    """Encode queries for ``Index.search``."""
    if model is None:
        raise ValueError("model is required to encode queries")
    index.check_model(model.card)
    return encoded_queries(model.encode_texts(queries, "query", progress=progress), model.card)


def _compact_run(writer: StoreWriter, index: IndexReader, run: range) -> list[SegmentEntry]:
    """Merge a run of successive segments into one, or into none if all their documents are deleted."""
    chosen = [index.segments[number] for number in run]
    if not any(segment.kept.any() for segment in chosen):
        return []
    if len(chosen) == 1 and chosen[0].alive is None:
        return [index.manifest.segments[run[0]]]
    folder = writer.scratch("compact")
    merged = merge_segments(chosen, index.codec, folder, writer.disk)
    return [writer.add_segment(folder, merged.holds, documents=merged.documents, vectors=merged.vectors, tokens=merged.tokens)]
