"""The work of a build in pieces: read the documents, encode them, and write segments that survive a killed process.

Documents are read once before anything is encoded: this finds malformed lines and repeated ids within seconds, counts the documents, and
computes the checksum by which a resumed build recognizes its corpus. Memory: at most one chunk of documents, 8 bytes per id and 4 bytes
per text length.

A *chunk* is a list of documents that the model encodes in one call. Vectors may depend on it in their last bits, because the batch decides
how matrices are multiplied; chunks therefore do not depend on the number of workers. A *piece* is a run of chunks: the work unit of an
executor and the most work that is lost if a process is killed. The plan is stored with the pieces, so that a resumed build has the same
pieces whatever its memory limit or number of workers. A finished piece has a durable marker, and a resumed build makes only the missing
ones.

This module holds what a worker does; it needs only the folder of the index, on a shared file system, and loads the model itself.
`quiver.retrieval.index.build` plans the pieces, distributes them, merges them and commits.

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
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance
from quiver.encoder.schema import RECORD, Count, Field, parse_record, with_config
from quiver.encoder.work_folder import SealedFolder, SealedFolders
from quiver.retrieval.data.column_types import OnTypeError
from quiver.retrieval.data.embedding_store import Encoding, encode_here, stack_vectors
from quiver.retrieval.data.entries import checked_document, unique
from quiver.retrieval.data.source import open_corpus
from quiver.retrieval.index.documents import DESCRIBED_COPIES, DOCUMENT_BYTES, FieldCheck, keeps_field
from quiver.retrieval.index.engines import AnyCodec, Setting, open_codec
from quiver.retrieval.index.files import (
    REAL,
    Disk,
    map_array,
    remove_tree,
    write_array,
)
from quiver.retrieval.index.on_device import clustering_on, device_of
from quiver.retrieval.index.segments import Contents, SegmentFolderWriter
from quiver.retrieval.index.store.reading import Layout, Policy, entries, is_resumable
from quiver.retrieval.index.store.writing import UNFINISHED_SECONDS
from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.models.loading import WorkerModel
from quiver.retrieval.records import DenseEncoding, DenseModel, Document, ModelCard, TextTokens, TokenCounts, TokenModel

# English has about four characters per token, code and other scripts two or three; special tokens are added.
_CHARACTERS_A_VECTOR = 2
_SPECIAL = 3
_CHUNK = 4096
# Distance of stored offsets in a spool, in documents: to find a document, at most this many lines are skipped.
_STRIDE = 256


@dataclass(frozen=True)
class Spool:
    """A file with one document per line and random access, which workers on other machines can read.

    Attributes:
        path: The file.
        offsets: Byte offset of every document whose number is a multiple of `_STRIDE`.
    """

    path: Path
    offsets: NDArray[np.uint64]

    def __call__(self, first: int) -> Iterator[Document]:
        """Read the documents from a number on.

        Raises:
            InputError: The file cannot be read.
        """
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
    """Documents that have been read and checked once.

    Attributes:
        read_from: Function that reads documents from a given number on.
        count: Number of documents.
        sha256: Checksum of their content and order.
        lengths: Characters of each text, (count,).
        types: Type of each metadata field.
    """

    read_from: Callable[[int], Iterator[Document]]
    count: int
    sha256: str
    lengths: NDArray[np.uint32]
    types: Mapping[str, str]

    @property
    def spool(self) -> Spool:
        """The file to which the documents were written during the first reading.

        Raises:
            ValueError: They were not written to a file.
        """
        if not isinstance(self.read_from, Spool):
            raise ValueError("the documents were not spooled; workers cannot read them")
        return self.read_from


class Reading:
    """Reads documents by number; ascending access reads them once.

    Args:
        read_from: Function that reads documents from a given number on.
        count: Number of documents.
    """

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

    def picked(self, numbers: NDArray[np.int64]) -> Iterator[Document]:
        """Read the documents with the given numbers, which must ascend."""
        for number in numbers.tolist():
            yield from self.span(number, number + 1)


def survey(
    corpus: str | Path | Iterable[Document],
    spool: Path,
    *,
    disk: Disk,
    spooled: bool = False,
    look: Callable[[list[Document]], None] | None = None,
    fields: FieldCheck | None = None,
) -> Source:
    """Read all documents once and check them.

    Args:
        corpus: A source of `quiver.retrieval.data.source.open_corpus`, or documents. An iterator is written to ``spool``, because it can
            be read only once.
        spool: Path of a file to create; it must exist as long as the source is used.
        disk: Writes the spool.
        spooled: Whether to write any corpus to ``spool``, for workers that need random access to it.
        look: Called with every chunk.
        fields: Checks the values of fields with known types; those of others are inferred.

    Raises:
        InputError: The corpus is malformed (names file:line) or empty, an id is empty or repeated, a document cannot be written as JSON, or
            a value does not fit the type of its field.
    """
    given = open_corpus(corpus) if isinstance(corpus, str | Path) else corpus
    if spooled or isinstance(given, Iterator):
        return _read_once(_write(map(checked_document, given), spool, disk), look, fields or FieldCheck())
    return _read_once(lambda first: map(checked_document, islice(given, first, None)), look, fields or FieldCheck())


def _read_once(read_from: Callable[[int], Iterator[Document]], look: Callable[[list[Document]], None] | None, fields: FieldCheck) -> Source:
    digest, lengths = hashlib.sha256(), array("I")
    stream = (document for _, document in unique(lambda: ((None, document) for document in read_from(0))))
    while chunk := list(islice(stream, _CHUNK)):
        for document in chunk:
            digest.update(_line(document))
            lengths.append(len(document.text))
            fields.add(document)
        if look is not None:
            look(chunk)
    if not lengths:
        raise InputError("there are no documents to index")
    return Source(read_from, len(lengths), digest.hexdigest(), np.frombuffer(lengths, np.uint32), fields.types())


def _line(document: Document) -> bytes:
    """Serialize a document to one line.

    Raises:
        InputError: It has content that JSON or UTF-8 cannot express, such as a lone surrogate or NaN; segments could not store it either.
    """
    fields = [document.id, document.text, document.title, dict(document.metadata) if document.metadata else None]
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"document {document.id!r} cannot be written as JSON ({error})") from error


def _write(documents: Iterator[Document], path: Path, disk: Disk) -> Spool:
    if path.exists():  # left by a killed build
        disk.unlink(path)
    offsets, place = array("Q"), 0
    with disk.create(path) as file:
        for number, document in enumerate(documents):
            if number % _STRIDE == 0:
                offsets.append(place)
            line = _line(document)
            file.write(line)
            place += len(line)
    return Spool(path, np.frombuffer(offsets, np.uint64) if offsets else np.zeros(0, np.uint64))


Model: TypeAlias = DenseModel | TokenModel
"""A model of either kind; ``model.card.kind`` says which."""


@dataclass(frozen=True)
class Encoded:
    """The vectors of B documents.

    Attributes:
        vectors: (n, d) float32, comparable by inner product, document after document.
        lengths: Number of vectors of each document, (B,).
        token_ids: Vocabulary ids of the tokens, (n,) uint32, or for BM25 the words; None if the model does not provide them.
        tokens: Token counts of each document.
    """

    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64]
    token_ids: NDArray[Any] | None
    tokens: TextTokens

    def select(self, places: NDArray[np.intp]) -> Encoded:
        """Select documents, in the order given."""
        ends = np.cumsum(self.lengths)
        lengths = self.lengths[places]
        begins = ends[places] - lengths
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

    def texts(documents: Sequence[Document]) -> list[str]:
        return [document.content(use_title=use_title) for document in documents]

    with closing(encode_here(model, chunks, texts, "document", advance=advance)) as encoded:
        for documents, encoding in encoded:
            yield documents, _check_encoded(model, documents, encoding)


def _check_encoded(model: Model, documents: Sequence[Document], encoding: Encoding) -> Encoded:
    """The vectors of documents, comparable by inner product."""
    given, counts = stack_vectors(encoding, model.card)
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which is rejected below
        vectors = np.ascontiguousarray(given, np.float32)  # files store float32 only
    lengths = np.array(counts, np.int64)
    if len(lengths) != len(documents):
        raise ValueError(f"{model.card.source} returned vectors for {len(lengths)} texts, expected {len(documents)}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        key = documents[int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))].id
        what = "the vector" if isinstance(encoding, DenseEncoding) else "a token vector"
        raise InputError(f"{what} of document '{key}' is not finite; check the model")
    token_ids = None
    if not isinstance(encoding, DenseEncoding) and encoding.token_ids is not None:
        token_ids = np.concatenate(encoding.token_ids)
        if model.card.kind != "bm25":  # whose tokens are words
            token_ids = token_ids.astype(np.uint32, copy=False)
    return Encoded(comparable(vectors, model.card), lengths, token_ids, encoding.tokens)


def concatenate_encoded(parts: Sequence[Encoded]) -> Encoded:
    """Concatenate the documents of several parts, at least one."""
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    tokens = TextTokens(*(np.concatenate([getattr(part.tokens, name) for part in parts]) for name in ("tokens", "truncated", "empty")))
    return Encoded(
        np.concatenate([part.vectors for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate(ids) if len(ids) == len(parts) else None,
        tokens,
    )


def write_encoded(folder: Path, encoded: Encoded, disk: Disk) -> dict[str, str]:
    """Write vectors to a folder; return what each file holds, by name."""
    write_array(folder / "vectors.f32", encoded.vectors, disk)
    write_array(folder / "lengths.i64", encoded.lengths, disk)
    tokens = np.stack([encoded.tokens.tokens, encoded.tokens.truncated, encoded.tokens.empty]).astype(np.int64)
    write_array(folder / "tokens.i64", tokens, disk)
    holds = {"vectors.f32": "vectors", "lengths.i64": "vectors per document", "tokens.i64": "token counts of each document"}
    if encoded.token_ids is not None:
        write_array(folder / "token_ids.u32", encoded.token_ids, disk)
        holds["token_ids.u32"] = "vocabulary id of each vector's token"
    return holds


def read_encoded(folder: Path, count: int, dim: int) -> Encoded:
    """Memory-map the files that `write_encoded` wrote.

    Args:
        folder: The folder.
        count: Number of documents.
        dim: Vector width d.
    """
    lengths = map_array(folder / "lengths.i64", np.int64, (count,))
    rows = int(lengths.sum())
    tokens = map_array(folder / "tokens.i64", np.int64, (3, count))
    ids = folder / "token_ids.u32"
    return Encoded(
        map_array(folder / "vectors.f32", np.float32, (rows, dim)),
        np.asarray(lengths),
        map_array(ids, np.uint32, (rows,)) if ids.exists() else None,
        TextTokens(tokens[0].astype(np.int32), tokens[1].astype(bool), tokens[2].astype(bool)),
    )


class StoredSample:
    """The vectors of the training sample, by document number in the corpus.

    Args:
        pieces: Document numbers, ascending, with the vectors of these documents.
    """

    def __init__(self, pieces: Sequence[tuple[NDArray[np.int64], Encoded]]) -> None:
        self._pieces = tuple(pieces)

    def has(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of ``count`` successive documents are in the sample, (count,)."""
        known = np.zeros(count, bool)
        for numbers, _ in self._pieces:
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
        parts, numbers = ([] if others is None else [others]), [np.flatnonzero(~known)]
        for mine, encoded in self._pieces:
            low, high = np.searchsorted(mine, [first, first + len(known)])
            if low < high:
                parts.append(encoded.select(np.arange(low, high)))
                numbers.append(mine[low:high] - first)
        return concatenate_encoded(parts).select(np.argsort(np.concatenate(numbers), kind="stable"))


@dataclass(frozen=True)
class PieceSizes:
    """Sizes of the work units of a build.

    The model encodes a chunk of documents in one call: enough to fill a batch, few enough that the progress bar moves every few seconds on
    a CPU. Batches are packed, not padded, so grouping more documents by length gave no measurable speedup. A piece is full when it reaches
    one of its limits; a killed worker loses less than one piece. Small corpora have smaller pieces, about ``count`` of them, so that every
    worker has something to do.

    Attributes:
        chunk_documents: Maximum number of documents in a chunk.
        chunk_characters: A chunk ends when its texts have at least this many characters, about 250,000 tokens: the vectors of a chunk stay
            in memory until they are written.
        documents: Maximum number of documents in a piece.
        characters: Characters of the texts of a piece.
        vector_bytes: Size of the vectors of a piece, in bytes.
        count: Number of pieces of a small corpus; it also limits the number of files that are open at once.
        least_documents: Documents of a piece below which pieces are not made smaller.
        probe_documents: Documents encoded to estimate the number of vectors per document.
        sample_documents: Maximum number of documents in a piece of the training sample.
    """

    chunk_documents: int = 512
    chunk_characters: int = 1 << 20
    documents: int = 8192
    characters: int = 8 << 20
    vector_bytes: int = 256 << 20
    count: int = 256
    least_documents: int = 512
    probe_documents: int = 256
    sample_documents: int = 2048


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
        types: Types of fields, see `quiver.retrieval.data.column_types`, such as ``{"created": "date", "tags": "string[]"}``; those of
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


class Extent(NamedTuple):
    """Size of a segment.

    Attributes:
        documents: Number of documents.
        vectors: Number of their vectors.
        described: Size of the files of ids and metadata, in bytes.
        size: Size of all files, in bytes.
    """

    documents: int
    vectors: int
    described: int = 0
    size: int = 0

    def with_more(self, other: Extent) -> Extent:
        """The sum of two sizes."""
        return Extent(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def memory_needed(codec: AnyCodec, extent: Extent) -> int:
    """Maximum memory in bytes for writing or merging a segment."""
    return codec.memory(extent.documents, extent.vectors) + DOCUMENT_BYTES * extent.documents + DESCRIBED_COPIES * extent.described


@dataclass(frozen=True)
class SegmentPiece:
    """A piece of the index: successive documents that become one segment.

    Attributes:
        name: Name of the piece.
        first: Number of its first document.
        ends: End of each of its chunks as a document number, exclusive and ascending.
    """

    name: str
    first: Count
    ends: Annotated[tuple[Count, ...], Field(min_length=1)]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.ends[-1] - self.first

    def chunks(self) -> Iterable[tuple[int, int]]:
        """Document range of each chunk: first, and one past the last."""
        return zip((self.first, *self.ends), self.ends, strict=False)


@dataclass(frozen=True)
class SamplePiece:
    """Documents that are encoded to train a codec.

    Attributes:
        name: Name of the piece.
        numbers: Numbers of the documents, ascending.
        chunk: Number of documents that the model encodes in one call.
    """

    name: str
    numbers: NDArray[np.int64]
    chunk: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.numbers)


@dataclass(frozen=True)
class PieceLimits:
    """Limits of a piece; it is full when it reaches one of them.

    Attributes:
        documents: Number of documents.
        characters: Characters of their texts.
        vectors: Number of vectors, estimated from the texts.
        memory: Memory limit of the build in bytes; writing a piece may use half of it.
    """

    documents: int
    characters: int
    vectors: int
    memory: int


@with_config(RECORD)
@dataclass(frozen=True)
class PiecePlan:
    """The pieces of a build, as stored with it.

    Attributes:
        pieces: The pieces, in the order of the documents.
    """

    pieces: tuple[SegmentPiece, ...]


def piece_name(number: int) -> str:
    """Name of the piece with a given number."""
    return f"piece-{number:06d}"


def chunk_ends(lengths: NDArray[np.uint32], *, documents: int, characters: int) -> list[int]:
    """End of each chunk as a document number, exclusive.

    Args:
        lengths: Characters of each document, (P,).
        documents: Maximum number of documents per chunk.
        characters: A chunk ends when its texts have at least this many characters.

    Example:
        >>> chunk_ends(np.array([1, 1, 1, 9, 1], np.uint32), documents=2, characters=5)
        [2, 4, 5]
    """
    total, ends, first = np.append(0, np.cumsum(lengths, dtype=np.int64)), list[int](), 0
    while first < len(lengths):
        full = int(np.searchsorted(total, total[first] + characters))
        first = min(first + documents, full, len(lengths))
        ends.append(first)
    return ends


def plan_pieces(lengths: NDArray[np.uint32], ends: Iterable[int], limits: PieceLimits, card: ModelCard, codec: AnyCodec) -> PiecePlan:
    """Group chunks into pieces.

    Args:
        lengths: Characters of each document, (P,).
        ends: End of each chunk as a document number, exclusive.
        limits: Limits of a piece.
        card: Card of the model that encodes.
        codec: Codec of the index; it estimates the memory of writing a piece.
    """
    vectors = np.minimum(lengths // _CHARACTERS_A_VECTOR + _SPECIAL, card.document_length) if card.kind != "dense" else lengths * 0 + 1
    characters = np.append(0, np.cumsum(lengths, dtype=np.int64))
    all_vectors = np.append(0, np.cumsum(vectors, dtype=np.int64))
    pieces, first, held_ends = list[SegmentPiece](), 0, list[int]()

    def is_full(stop: int) -> bool:
        count = int(all_vectors[stop] - all_vectors[first])
        return (
            stop - first >= limits.documents
            or int(characters[stop] - characters[first]) >= limits.characters
            or count >= limits.vectors
            or 2 * memory_needed(codec, Extent(stop - first, count)) >= limits.memory
        )

    for stop in ends:
        held_ends.append(stop)
        if stop == len(lengths) or is_full(stop):
            pieces.append(SegmentPiece(piece_name(len(pieces)), first, tuple(held_ends)))
            first, held_ends = stop, []
    return PiecePlan(tuple(pieces))


logger = logging.getLogger(__name__)

Record = TypeVar("Record")


@dataclass(frozen=True)
class Finished:
    """A finished piece.

    Attributes:
        folder: Folder with its files.
        holds: Description of each file, by name.
        metadata: Further information stored with it, as JSON.
    """

    folder: Path
    holds: Mapping[str, str]
    metadata: Mapping[str, Any]

    def record(self, kind: type[Record]) -> Record:
        """The metadata as the dataclass that was stored.

        Raises:
            SchemaError: They are not those of this dataclass.
        """
        return parse_record(kind, self.metadata, source=str(self.folder))


@dataclass(frozen=True)
class PieceFolders:
    """Stores pieces in the folder of a build, each in a sealed folder.

    Attributes:
        folder: The folder.
        disk: Performs all writes.
        worker: Unique name of the worker; empty for the process that holds the writers' lock.
    """

    folder: Path
    disk: Disk
    worker: str = ""

    @property
    def sealed(self) -> SealedFolders:
        """The sealed folders of the pieces."""
        return SealedFolders(self.folder, "quiver-piece/1", disk=self.disk)

    def finished(self, name: str) -> Finished | None:
        """The finished piece of a name, verified; None if it has to be made.

        Raises:
            InputError: A file cannot be read for a reason other than damage, such as too many open files.
        """
        part = self.sealed.finished(name, "this piece of the build is made again")
        if part is None:
            return None
        about = part.about
        if about.get("sha256") != _digest_of_piece(about.get("holds"), about.get("metadata")):
            logger.warning("%s: %s is damaged; this piece of the build is made again", part.folder, self.sealed.seal)
            return None
        return Finished(part.folder, about["holds"], about["metadata"])

    def discard(self, name: str) -> None:
        """Remove a damaged piece; only for the process that holds the lock."""
        self.sealed.remove(name)

    def begin(self, name: str) -> Path:
        """Create an empty folder for a piece; an existing folder of that name is removed."""
        if not self.worker:
            self.discard(name)
        return self.sealed.begin(name, worker=self.worker).folder

    def finish(self, name: str, folder: Path, holds: Mapping[str, str], metadata: Mapping[str, Any]) -> Finished:
        """Seal a piece; if another worker finished it first, that worker's is returned.

        Args:
            name: Name of the piece.
            folder: Folder that ``begin`` returned.
            holds: Description of each file, by name.
            metadata: Further information to store, as JSON.
        """
        digest = _digest_of_piece(dict(holds), dict(metadata))
        part = SealedFolder(folder, {"holds": dict(holds), "metadata": dict(metadata), "sha256": digest})
        self.sealed.finish(name, part, worker=self.worker)
        return Finished(part.folder, part.about["holds"], part.about["metadata"])


def _digest_of_piece(holds: Any, metadata: Any) -> str:
    """Checksum of what the seal of a piece says beside its files, so that a changed seal is noticed."""
    return hashlib.sha256(json.dumps([holds, metadata], sort_keys=True).encode()).hexdigest()


class BuildFolder:
    """The working folder of one build; the caller holds the writers' lock of the index.

    Args:
        layout: Paths of the index.
        plan: Everything that determines the result, as JSON.
        disk: Performs all writes.

    Attributes:
        folder: The folder.
        pieces: The pieces in it.
    """

    def __init__(self, layout: Layout, plan: Mapping[str, Any], *, disk: Disk) -> None:
        self._disk = disk
        self._layout = layout
        self.folder = layout.pieces(_digest(plan)[:24])
        self.pieces = PieceFolders(self.folder, disk)
        if self.folder.is_dir():
            logger.info("%s: resuming the interrupted build", layout.root)
        else:
            if any(is_resumable(path.name) for path in entries(layout.temporary)):
                logger.warning(
                    "%s: an earlier change with other data or options was not finished; repeat its command to go on with it within %g days",
                    layout.root,
                    UNFINISHED_SECONDS / 86_400,
                )
            disk.mkdir(self.folder)
            disk.sync_folder(layout.temporary)

    @property
    def names(self) -> list[str]:
        """Names of the finished pieces."""
        return self.pieces.sealed.names()

    def scratch(self, name: str) -> Path:
        """Create an empty folder for files that are no piece; an existing one is removed."""
        if (self.folder / name).exists():
            remove_tree(self.folder / name, self._disk)
        self._disk.mkdir(self.folder / name)
        return self.folder / name

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        # Rename first: a worker that outlived its killed build may be about to write another file into the folder, and now cannot. The next
        # writer of the index removes leftovers of such a renamed folder.
        doomed = self._layout.doomed(self.folder.name)
        self._disk.rename(self.folder, doomed)
        remove_tree(doomed, self._disk)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


Piece: TypeAlias = SegmentPiece | SamplePiece
"""A unit of work."""


@dataclass(frozen=True)
class Sampled:
    """The finished pieces of the training sample.

    Attributes:
        pieces: Each piece with its folder.
        dim: Vector width d.
    """

    pieces: tuple[tuple[SamplePiece, Path], ...]
    dim: int

    def encoded(self) -> list[Encoded]:
        """The vectors of each piece, memory-mapped."""
        return [read_encoded(folder, piece.documents, self.dim) for piece, folder in self.pieces]

    def vectors(self) -> StoredSample:
        """The vectors by document number, memory-mapped."""
        return StoredSample([(piece.numbers, encoded) for (piece, _), encoded in zip(self.pieces, self.encoded(), strict=True)])


class PieceMaker:
    """Encodes documents and writes pieces.

    Args:
        model: Encodes the documents.
        reading: Reads the documents.
        options: Options of the build.
        folders: Stores the pieces.
        codec: Writes segments; None if only samples are made.
        sample: Vectors of the training sample, which are not encoded again.
        advance: Called with the number of documents finished since the last call.
    """

    def __init__(
        self,
        model: Model,
        reading: Reading,
        options: BuildOptions,
        folders: PieceFolders,
        *,
        codec: AnyCodec | None,
        sample: StoredSample,
        advance: Advance,
    ) -> None:
        self._model, self._reading, self._options, self._folders = model, reading, options, folders
        self._codec, self._sample, self._advance = codec, sample, advance

    def __call__(self, piece: Piece) -> Finished:
        """Make a piece.

        Raises:
            InputError: A vector is not finite (names the document), or the corpus has changed.
        """
        with clustering_on(device_of(self._model)):
            return self._make_sample(piece) if isinstance(piece, SamplePiece) else self._make_segment(piece)

    def _make_sample(self, piece: SamplePiece) -> Finished:
        stream, parts = self._reading.picked(piece.numbers), list[Encoded]()
        chunks = iter(lambda: list(islice(stream, piece.chunk)), [])
        with closing(encode(self._model, chunks, use_title=self._options.use_title, advance=self._advance)) as encodings:
            parts.extend(encoded for _, encoded in encodings)
        folder = self._folders.begin(piece.name)
        return self._folders.finish(piece.name, folder, write_encoded(folder, concatenate_encoded(parts), self._folders.disk), {})

    def _make_segment(self, piece: SegmentPiece) -> Finished:
        if self._codec is None:
            raise ValueError("train the codec before writing a segment")
        folder, dense = self._folders.begin(piece.name), self._model.card.kind == "dense"
        options = self._options
        writer = SegmentFolderWriter(folder, self._codec, self._folders.disk, texts=options.store_text, types=options.types)
        for documents, encoded in self._encode_piece(piece):
            writer.add(documents, encoded.vectors, None if dense else encoded.lengths, encoded.token_ids, encoded.tokens)
        contents = writer.close()
        counts = SegmentCounts(contents.documents, contents.vectors, contents.tokens)
        return self._folders.finish(piece.name, folder, contents.holds, asdict(counts))

    def _encode_piece(self, piece: SegmentPiece) -> Iterator[tuple[list[Document], Encoded]]:
        taken = deque[_TakenChunk]()

        def missing() -> Iterator[list[Document]]:
            """The documents of each chunk that are not in the sample; chunks without any are only taken."""
            for first, stop in piece.chunks():
                documents = self._reading.span(first, stop)
                known = self._sample.has(first, len(documents))
                taken.append(_TakenChunk(first, documents, known))
                if known.any():
                    self._advance(int(known.sum()))
                if not known.all():
                    yield [document for document, stored in zip(documents, known.tolist(), strict=True) if not stored]

        def from_sample() -> Iterator[tuple[list[Document], Encoded]]:
            while taken and taken[0].known.all():
                chunk = taken.popleft()
                yield chunk.documents, self._sample.fill(chunk.first, chunk.known, None)

        with closing(encode(self._model, missing(), use_title=self._options.use_title, advance=self._advance)) as encodings:
            for _, encoded in encodings:
                yield from from_sample()
                chunk = taken.popleft()
                yield chunk.documents, self._sample.fill(chunk.first, chunk.known, encoded) if chunk.known.any() else encoded
        yield from from_sample()


@dataclass(frozen=True)
class _TakenChunk:
    """Successive documents, the number of the first, and whether the vectors of each are in the sample, (B,)."""

    first: int
    documents: list[Document]
    known: NDArray[np.bool_]


@with_config(RECORD)
@dataclass(frozen=True)
class SegmentCounts:
    """Counts of a piece of the index, as stored with it.

    Attributes:
        documents: Number of documents.
        vectors: Number of vectors.
        tokens: Token counts of the documents.
    """

    documents: Count
    vectors: Count
    tokens: TokenCounts


def contents_of(finished: Finished) -> Contents:
    """Counts and files of a finished piece of the index."""
    counts = finished.record(SegmentCounts)
    return Contents(counts.documents, counts.vectors, counts.tokens, finished.holds)


@dataclass(frozen=True)
class MakeHere:
    """Task that makes pieces in the building process."""

    maker: PieceMaker

    def open(self, advance: Advance) -> Callable[[Piece], Finished]:
        """See `quiver.retrieval.records.WorkerTask`."""
        del advance  # the maker has one
        return self.maker


@dataclass(frozen=True)
class MakeAnywhere:
    """Task that makes pieces in another process, possibly on another machine.

    Attributes:
        folder: Folder of the build's pieces.
        spool: File of the documents.
        count: Number of documents.
        options: Options of the build.
        model: The model.
        threads: Number of threads for torch.
        codec: Engine name and folder of the codec; None if only samples are made.
        sampled: The training sample.
        torch: Version of torch in the building process.
    """

    folder: Path
    spool: Spool
    count: int
    options: BuildOptions
    model: WorkerModel
    threads: int
    codec: tuple[str, Path] | None
    sampled: Sampled
    torch: str = str(torch.__version__)

    def open(self, advance: Advance) -> Callable[[Piece], Finished]:
        """See `quiver.retrieval.records.WorkerTask`."""
        here = platform.node()
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: does not exist on {here}; workers need the folder of the index on a shared file system")
        if str(torch.__version__) != self.torch:
            raise InputError(
                f"torch is {torch.__version__} on {here} but {self.torch} on the building machine; install the same version on all workers"
            )
        torch.set_num_threads(self.threads)
        folders = PieceFolders(self.folder, REAL, uuid.uuid4().hex[:12])
        codec = None if self.codec is None else open_codec(*self.codec)
        reading = Reading(self.spool, self.count)
        return PieceMaker(self.model.load(), reading, self.options, folders, codec=codec, sample=self.sampled.vectors(), advance=advance)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Limit torch to a number of threads; the previous number is restored on exit."""
    former = torch.get_num_threads()
    if threads == former:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)
