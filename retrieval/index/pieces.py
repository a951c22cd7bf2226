"""The work of a build and its options: read documents, encode them, and write segments that survive a killed process.

Documents are read once before anything is encoded (`survey`): this finds malformed lines and repeated ids within seconds, counts the
documents, and computes the checksum by which a resumed build recognizes its corpus.

A *chunk* is a list of documents that the model encodes in one call. Vectors may depend on it in their last bits, because the batch decides
how matrices are multiplied; chunks therefore do not depend on the number of workers. A *piece* is a run of chunks: the work unit of an
executor and the most work that is lost if a process is killed. Each is a sealed folder (`quiver.encoder.work_folder`) in the work folder of
the build, and a resumed build makes only the missing ones.

Shapes: P documents of an index, B documents of a chunk, n vectors of some documents, d width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.work_folder import SealedFolder, SealedFolders
from quiver.retrieval.data.entries import OnTypeError, checked_document, unique
from quiver.retrieval.index.documents import Contents, FieldCheck, SegmentFolderWriter, keeps_field
from quiver.retrieval.index.engines import AnyCodec, Setting, clustering_on, open_codec
from quiver.retrieval.index.files import REAL, Disk, map_array, write_array
from quiver.retrieval.index.store.reading import Policy
from quiver.retrieval.models.batches import device_of
from quiver.retrieval.models.encoding import stack_vectors
from quiver.retrieval.models.loading import WorkerModel
from quiver.retrieval.models.pretrained import encode_here
from quiver.retrieval.records import DenseEncoding, DenseModel, Document, TextTokens, TokenCounts, TokenModel

logger = logging.getLogger(__name__)

Model: TypeAlias = DenseModel | TokenModel
"""A model of either kind; ``model.card.kind`` says which."""


@dataclass(frozen=True)
class PieceSizes:
    """Sizes of the work units of a build.

    The model encodes a chunk of documents in one call: enough to fill a batch, few enough that the progress bar moves every few seconds on
    a CPU. Batches are packed, not padded, so grouping more documents by length gave no measurable speedup. A piece is full when it reaches
    one of its limits; a killed worker loses less than one piece. Small corpora have smaller ones, so that every worker has something to do.
    """

    chunk_documents: int = 512
    chunk_characters: int = 1 << 20  # about 250,000 tokens, where a chunk ends: its vectors stay in memory until they are written
    documents: int = 8192  # of a piece, as the next two
    characters: int = 8 << 20
    vector_bytes: int = 256 << 20
    count: int = 256  # number of pieces of a small corpus; it also limits the number of files that are open at once
    least_documents: int = 512  # of a piece, below which pieces are not made smaller
    probe_documents: int = 256  # encoded to estimate the number of vectors per document
    sample_documents: int = 2048  # of a piece of the training sample


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        engine: ``auto`` (chosen by the number of documents), ``exact``, or an engine by name with settings, as in
            ``ivf-dense:nlist=64``; see `quiver.retrieval.index.engines.parse_engine`.
        settings: Settings of the engine; the others are chosen from the size of the corpus.
        seed: Random seed; equal documents, model, options and seed give byte-identical segments.
        memory: Memory limit of a build in bytes, in addition to the model and one chunk of documents.
        use_title: Whether titles are put before the texts.
        store_text: Store the texts, so that hits can be shown.
        fields: Metadata fields that filters can test; some document must have each of them. None for all fields. The name of a field in a
            nested object consists of both names, joined by a dot.
        calibrate: Measure recall and latency of the index at the end of the build (`quiver.retrieval.index.calibration`), unless its engine
            is exact. `quiver.retrieval.index.calibration.allowed_seconds` limits the time.
        types: Types of fields, see `quiver.retrieval.data.entries`, such as ``{"created": "date", "tags": "string[]"}``; those of
            others are inferred from all values.
        on_type_error: What becomes of a value that does not fit the type of its field: ``error``, or ``null``: filters find none.
        threads: Threads that each worker encodes with; None divides the threads of this process among the workers on its machine. A
            resumed build keeps the number that it was started with. With another number, vectors may differ in the last bit because
            libraries may add in another order.
        pieces: Sizes of the work units. They do not change the documents of the index.
    """

    engine: str = "auto"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    seed: int = 0
    memory: int = 2 << 30
    use_title: bool = True
    store_text: bool = True
    fields: Sequence[str] | None = None
    calibrate: bool = True
    threads: int | None = None
    types: Mapping[str, str] = field(default_factory=dict)
    on_type_error: OnTypeError = "error"
    pieces: PieceSizes = field(default_factory=PieceSizes)

    @property
    def policy(self) -> Policy:
        """How documents are encoded and stored."""
        fields = None if self.fields is None else sorted(self.fields)
        return Policy(use_title=self.use_title, store_text=self.store_text, fields=fields, types=dict(self.types))

    def field_types(self, found: Mapping[str, str]) -> dict[str, str]:
        """The types of the fields that filters can test, of those that the documents have.

        Raises:
            InputError: No document has one of the fields that options name.
        """
        missing = [name for name in (*(self.fields or ()), *self.types) if name not in found]
        if missing:
            known = f"the documents have {', '.join(sorted(found))}" if found else "they have none"
            raise InputError(f"no document has the field {', '.join(map(repr, missing))} to filter by; {known}")
        return {name: kind for name, kind in sorted(found.items()) if keeps_field(self.fields, name)}


DEFAULTS = BuildOptions()
"""Default options."""

_CHUNK = 4096
# Distance of stored offsets in a spool, in documents: to find a document, at most this many lines are skipped.
_STRIDE = 256


@dataclass(frozen=True)
class Spool:
    """A file with one document per line and random access, which workers on other machines can read."""

    path: Path
    offsets: NDArray[np.uint64]  # byte offset of every document whose number is a multiple of `_STRIDE`

    def __call__(self, first: int) -> Iterator[Document]:
        """Read the documents from a number on; an `InputError` if the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                if first // _STRIDE < len(self.offsets):
                    file.seek(int(self.offsets[first // _STRIDE]))
                for line in islice(file, first % _STRIDE, None):
                    yield Document(*json.loads(line))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); all workers need the folder of the index") from error


@dataclass(frozen=True)
class Source:
    """Documents that have been read and checked once."""

    read_from: Callable[[int], Iterator[Document]]  # reads documents from a number on; a `Spool` if workers are to read them
    count: int
    sha256: str  # checksum of their content and order
    lengths: NDArray[np.uint32]  # characters of each text, (count,)
    types: Mapping[str, str]  # type of each metadata field


class Reading:
    """Reads documents by number with ``read_from``; ascending access reads them once. ``count`` is the number of documents."""

    def __init__(self, read_from: Callable[[int], Iterator[Document]], count: int) -> None:
        self._read_from, self._count = read_from, count
        self._stream, self._next = iter(list[Document]()), -1

    def span(self, first: int, stop: int) -> list[Document]:
        """Documents ``first`` to ``stop - 1``.

        Raises:
            InputError: A document is malformed, or the number of documents has changed since the first reading.
        """
        if self._next < 0 or first < self._next or (first != self._next and isinstance(self._read_from, Spool)):
            self._stream, self._next = self._read_from(first), first
        documents = list(islice(self._stream, first - self._next, stop - self._next))
        self._next = first + len(documents)
        found = self._next + (sum(1 for _ in self._stream) if stop == self._count else 0)
        if len(documents) < stop - first or found > self._count:
            raise InputError(
                f"{self._count:,} documents at the first reading, {found:,} at a later one; do not change the corpus during a build"
            )
        return documents


def survey(
    corpus: Iterable[Document],
    spool: Path,
    *,
    disk: Disk,
    fields: FieldCheck,
    spooled: bool = False,
    look: Callable[[list[Document]], None] = lambda chunk: None,
    progress: bool = False,
) -> Source:
    """Read all documents once and check them.

    Args:
        corpus: The documents. An iterator is written to ``spool``, because it can be read only once.
        spool: Path of a file to create; it must exist as long as the source is used.
        disk: Writes the spool.
        fields: Checks the values of fields with known types; those of others are inferred.
        spooled: Whether to write any corpus to ``spool``, for workers that need random access to it.
        look: Called with every chunk.
        progress: Show a bar.

    Raises:
        InputError: The corpus is malformed (names file:line) or empty, an id is empty or repeated, a document cannot be written as JSON, or
            a value does not fit the type of its field.
    """

    def read_again(first: int) -> Iterator[Document]:
        return map(checked_document, islice(corpus, first, None))

    read_from = _write_spool(read_again(0), spool, disk) if spooled or isinstance(corpus, Iterator) else read_again
    digest, lengths = hashlib.sha256(), array("I")
    stream = (document for _, document in unique(lambda: ((None, document) for document in read_from(0))))
    with progress_bar("reading", None, enabled=progress) as advance:
        while chunk := list(islice(stream, _CHUNK)):
            for document in chunk:
                digest.update(_document_line(document))
                lengths.append(len(document.text))
                fields.add(document)
            advance(len(chunk))
            look(chunk)
    if not lengths:
        raise InputError("there are no documents to index")
    fields.tell_nulls()
    logger.info("%d documents to index", len(lengths))
    return Source(read_from, len(lengths), digest.hexdigest(), np.frombuffer(lengths, np.uint32), fields.types())


def _document_line(document: Document) -> bytes:
    """A document as one line; an `InputError` for what JSON or UTF-8 cannot express, such as a lone surrogate, and no segment can store."""
    fields = [document.id, document.text, document.title, dict(document.metadata) if document.metadata else None]
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"document {document.id!r} cannot be written as JSON ({error})") from error


def _write_spool(documents: Iterator[Document], path: Path, disk: Disk) -> Spool:
    if path.exists():  # left by a killed build
        disk.unlink(path)
    offsets, place = array("Q"), 0
    with disk.create(path) as file:
        for number, document in enumerate(documents):
            if number % _STRIDE == 0:
                offsets.append(place)
            place += file.write(_document_line(document))
    return Spool(path, np.frombuffer(offsets, np.uint64) if offsets else np.zeros(0, np.uint64))


@dataclass(frozen=True)
class Encoded:
    """The vectors of B documents."""

    vectors: NDArray[np.float32]  # (n, d), comparable by inner product, document after document
    lengths: NDArray[np.int64]  # number of vectors of each document, (B,)
    token_ids: NDArray[Any] | None  # vocabulary ids of the tokens, (n,) uint32, or for BM25 the words; None if the model has none
    tokens: TextTokens  # token counts of each document

    def select(self, places: NDArray[np.intp]) -> Encoded:
        """Select documents, in the order given."""
        lengths = self.lengths[places]
        begins = np.cumsum(self.lengths)[places] - lengths
        rows = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        tokens = TextTokens(self.tokens.tokens[places], self.tokens.truncated[places], self.tokens.empty[places])
        return Encoded(self.vectors[rows], lengths, None if self.token_ids is None else self.token_ids[rows], tokens)


def encode(
    model: Model, chunks: Iterable[Sequence[Document]], *, use_title: bool, advance: Advance = lambda documents: None
) -> Generator[tuple[Sequence[Document], Encoded], None, None]:
    """Encode documents chunk by chunk; yield each chunk with its vectors, and call ``advance`` as `encode_here` does.

    Raises:
        InputError: A vector is not finite (names the document).
        ValueError: The vectors do not match the model's card.
    """

    def contents(documents: Sequence[Document]) -> list[str]:
        return [document.content(use_title=use_title) for document in documents]

    with closing(encode_here(model, chunks, contents, "document", advance=advance)) as encodings:
        for documents, encoding in encodings:
            vectors, lengths, bad = stack_vectors(encoding, model.card, len(documents))
            if bad is not None:
                what = "the vector" if isinstance(encoding, DenseEncoding) else "a token vector"
                raise InputError(f"{what} of document '{documents[bad].id}' is not finite; check the model")
            token_ids = None
            if not isinstance(encoding, DenseEncoding) and encoding.token_ids is not None:
                token_ids = np.concatenate(encoding.token_ids)
                if model.card.kind != "bm25":  # whose tokens are words
                    token_ids = token_ids.astype(np.uint32, copy=False)
            yield documents, Encoded(vectors, lengths, token_ids, encoding.tokens)


def concatenate_encoded(parts: Sequence[Encoded]) -> Encoded:
    """Concatenate the documents of several parts, at least one."""
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    tokens = TextTokens(*(np.concatenate([getattr(part.tokens, name) for part in parts]) for name in ("tokens", "truncated", "empty")))
    vectors, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("vectors", "lengths"))
    return Encoded(vectors, lengths, np.concatenate(ids) if len(ids) == len(parts) else None, tokens)


class StoredSample:
    """The vectors of the training sample by document number, memory-mapped from its pieces.

    Args:
        pieces: Document numbers of each piece, ascending, and its folder.
        dim: Vector width d.
    """

    def __init__(self, pieces: Sequence[tuple[NDArray[np.int64], Path]], dim: int) -> None:
        self.pieces = [(numbers, self._map_piece(folder, len(numbers), dim)) for numbers, folder in pieces]

    @staticmethod
    def write(folder: Path, encoded: Encoded, disk: Disk) -> None:
        """Write a piece."""
        tokens = np.stack([encoded.tokens.tokens, encoded.tokens.truncated, encoded.tokens.empty]).astype(np.int64)
        files: dict[str, NDArray[Any]] = {"vectors.f32": encoded.vectors, "lengths.i64": encoded.lengths, "tokens.i64": tokens}
        if encoded.token_ids is not None:
            files["token_ids.u32"] = encoded.token_ids
        for name, content in files.items():
            write_array(folder / name, content, disk)

    @staticmethod
    def _map_piece(folder: Path, count: int, dim: int) -> Encoded:
        lengths = np.asarray(map_array(folder / "lengths.i64", np.int64, (count,)))
        rows, ids = int(lengths.sum()), folder / "token_ids.u32"
        tokens = map_array(folder / "tokens.i64", np.int64, (3, count))
        return Encoded(
            map_array(folder / "vectors.f32", np.float32, (rows, dim)),
            lengths,
            map_array(ids, np.uint32, (rows,)) if ids.exists() else None,
            TextTokens(tokens[0].astype(np.int32), tokens[1].astype(bool), tokens[2].astype(bool)),
        )

    def has(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of ``count`` successive documents are in the sample, (count,)."""
        known = np.zeros(count, bool)
        for numbers, _ in self.pieces:
            low, high = np.searchsorted(numbers, [first, first + count])
            known[numbers[low:high] - first] = True
        return known

    def fill(self, first: int, known: NDArray[np.bool_], others: Encoded | None) -> Encoded:
        """Combine the vectors of successive documents from the sample and from a new encoding.

        Args:
            first: Number of the first document.
            known: Which of the documents are in the sample, (B,).
            others: Encoding of the documents that are not in the sample, in order; None if there are none.
        """
        if others is not None and not known.any():
            return others
        parts, numbers = ([] if others is None else [others]), [np.flatnonzero(~known)]
        for mine, encoded in self.pieces:
            low, high = np.searchsorted(mine, [first, first + len(known)])
            if low < high:
                parts.append(encoded.select(np.arange(low, high)))
                numbers.append(mine[low:high] - first)
        return concatenate_encoded(parts).select(np.argsort(np.concatenate(numbers), kind="stable"))


@dataclass(frozen=True)
class SegmentPiece:
    """Successive documents that become one segment."""

    name: str
    first: int  # number of the first document
    ends: tuple[int, ...]  # end of each chunk as a document number, exclusive and ascending

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.ends[-1] - self.first


@dataclass(frozen=True)
class SamplePiece:
    """Documents that are encoded to train a codec."""

    name: str
    numbers: NDArray[np.int64]  # numbers of the documents, ascending

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.numbers)


Piece: TypeAlias = SegmentPiece | SamplePiece
"""A unit of work."""


def sealed_pieces(folder: Path, disk: Disk) -> SealedFolders:
    """The finished codec and pieces in the work folder of a build."""
    return SealedFolders(folder, "quiver-piece/2", disk=disk)


def contents_of(piece: SealedFolder) -> Contents:
    """Counts and files of a finished segment."""
    return Contents(**{**piece.about, "tokens": TokenCounts(**piece.about["tokens"])})


@dataclass(frozen=True)
class MakePieces:
    """Task that makes pieces, in this process or in another one, which needs only the folder of the index on a shared file system."""

    folder: Path  # work folder of the build
    reading: Reading
    options: BuildOptions
    model: Model | WorkerModel  # the latter in another process, possibly on another machine
    threads: int  # of torch
    codec: AnyCodec | tuple[str, Path] | None  # in another process its engine and folder; None if only samples are made
    sample: tuple[tuple[NDArray[np.int64], Path], ...]  # see `StoredSample`
    disk: Disk = REAL
    torch: str = str(torch.__version__)  # version in the building process

    def open(self, advance: Advance) -> Callable[[Piece], SealedFolder]:
        """See `quiver.retrieval.records.WorkerTask`."""
        if not isinstance(self.model, WorkerModel):
            return _PieceMaker(self, self.model, "", advance)
        here = platform.node()
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: does not exist on {here}; workers need the folder of the index on a shared file system")
        if str(torch.__version__) != self.torch:
            raise InputError(
                f"torch is {torch.__version__} on {here} but {self.torch} on the building machine; install the same version on all workers"
            )
        torch.set_num_threads(self.threads)
        return _PieceMaker(self, self.model.load(), uuid.uuid4().hex[:12], advance)


class _PieceMaker:
    """Makes pieces with a loaded model; ``worker`` is empty in the process that holds the writers' lock."""

    def __init__(self, task: MakePieces, model: Model, worker: str, advance: Advance) -> None:
        self._model, self._options, self._worker, self._advance, self._disk = model, task.options, worker, advance, task.disk
        self._codec = open_codec(*task.codec) if isinstance(task.codec, tuple) else task.codec
        self._reading, self._sample = task.reading, StoredSample(task.sample, model.card.dim)
        self._sealed = sealed_pieces(task.folder, task.disk)

    def __call__(self, piece: Piece) -> SealedFolder:
        """Make a piece; an `InputError` if a vector is not finite (names the document), or the corpus has changed."""
        with clustering_on(device_of(self._model)), self._sealed.writing(piece.name, worker=self._worker) as made:
            if isinstance(piece, SamplePiece):
                stream = (self._reading.span(number, number + 1)[0] for number in piece.numbers.tolist())
                size = self._options.pieces.chunk_documents
                with self._encode_chunks(iter(lambda: list(islice(stream, size)), [])) as encodings:
                    StoredSample.write(made.folder, concatenate_encoded([encoded for _, encoded in encodings]), self._disk)
                return made
            if self._codec is None:
                raise ValueError("train the codec before writing a segment")
            options, dense = self._options, self._model.card.kind == "dense"
            writer = SegmentFolderWriter(made.folder, self._codec, self._disk, texts=options.store_text, types=options.types)
            for documents, encoded in self._encode_piece(piece):
                writer.add(documents, encoded.vectors, None if dense else encoded.lengths, encoded.token_ids, encoded.tokens)
            made.about = asdict(writer.close())
        return made

    def _encode_chunks(self, chunks: Iterable[Sequence[Document]]) -> closing[Generator[tuple[Sequence[Document], Encoded], None, None]]:
        return closing(encode(self._model, chunks, use_title=self._options.use_title, advance=self._advance))

    def _encode_piece(self, piece: SegmentPiece) -> Iterator[tuple[list[Document], Encoded]]:
        """Yield the documents of each chunk with their vectors, which are in the sample already or encoded now."""
        # The first document of a chunk, its documents, and which of them are in the sample.
        waiting = deque[tuple[int, list[Document], NDArray[np.bool_]]]()

        def missing() -> Iterator[list[Document]]:
            for first, stop in zip((piece.first, *piece.ends), piece.ends, strict=False):
                documents = self._reading.span(first, stop)
                known = self._sample.has(first, len(documents))
                waiting.append((first, documents, known))
                if known.any():
                    self._advance(int(known.sum()))
                if not known.all():
                    yield [document for document, stored in zip(documents, known.tolist(), strict=True) if not stored]

        with self._encode_chunks(missing()) as encodings:
            for encoded in chain((encoded for _, encoded in encodings), [None]):
                while waiting and waiting[0][2].all():
                    first, documents, known = waiting.popleft()
                    yield documents, self._sample.fill(first, known, None)
                if encoded is not None:
                    first, documents, known = waiting.popleft()
                    yield documents, self._sample.fill(first, known, encoded)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Limit torch to a number of threads; the previous number is restored on exit."""
    former = torch.get_num_threads()
    if threads != former:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads != former:
            torch.set_num_threads(former)
