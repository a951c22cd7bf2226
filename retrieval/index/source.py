"""The documents of a build and their vectors.

Documents are read once before anything is encoded: this finds malformed lines and repeated ids within seconds, counts the documents, and
computes the checksum by which a resumed build recognizes its corpus. Memory: at most one chunk of documents, 8 bytes per id and 4 bytes
per text length.

Shapes: B documents of a chunk, n vectors of them, d width.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import checked_document, read_documents
from quiver.retrieval.data.embedding_store import stack_vectors
from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.documents.strings import id_hashes
from quiver.retrieval.index.mapped import map_array
from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.records import DenseEncoding, DenseModel, Document, TextTokens, TokenModel

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
        fields: Names of all metadata fields.
    """

    read_from: Callable[[int], Iterator[Document]]
    count: int
    sha256: str
    lengths: NDArray[np.uint32]
    fields: frozenset[str]

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
) -> Source:
    """Read all documents once and check them.

    Args:
        corpus: A ``.jsonl[.gz]`` file, a folder with ``corpus.jsonl[.gz]``, or documents. An iterator is written to ``spool``, because it
            can be read only once.
        spool: Path of a file to create; it must exist as long as the source is used.
        disk: Writes the spool.
        spooled: Whether to write any corpus to ``spool``, for workers that need random access to it.
        look: Called with every chunk.

    Raises:
        InputError: The corpus is malformed (names file:line) or empty, an id is empty or repeated, or a document cannot be written as JSON.
    """
    path = Path(corpus) if isinstance(corpus, str | Path) else None
    if spooled or isinstance(corpus, Iterator):
        documents = read_documents(path) if path is not None else map(checked_document, cast(Iterable[Document], corpus))
        return _surveyed(_write(documents, spool, disk), look)
    if path is not None:
        return _surveyed(lambda first: islice(read_documents(path), first, None), look)
    given = cast(Iterable[Document], corpus)
    return _surveyed(lambda first: map(checked_document, islice(given, first, None)), look)


def _surveyed(read_from: Callable[[int], Iterator[Document]], look: Callable[[list[Document]], None] | None) -> Source:
    digest, hashes, lengths, fields, stream = hashlib.sha256(), array("Q"), array("I"), set[str](), read_from(0)
    while chunk := list(islice(stream, _CHUNK)):
        for document in chunk:
            digest.update(_line(document))
            lengths.append(len(document.text))
            fields.update(document.metadata or ())
        hashes.frombytes(id_hashes([document.id for document in chunk]).tobytes())
        if look is not None:
            look(chunk)
    count = len(hashes)
    if not count:
        raise InputError("there are no documents to index")
    ordered = np.frombuffer(hashes, np.uint64)
    ordered.sort()  # in place, to save memory
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if suspects:
        _check_unique(read_from(0), suspects)
    return Source(read_from, count, digest.hexdigest(), np.frombuffer(lengths, np.uint32), frozenset(fields))


def _check_unique(documents: Iterator[Document], suspects: set[int]) -> None:
    seen: set[str] = set()
    while chunk := list(islice(documents, _CHUNK)):
        for document, hashed in zip(chunk, id_hashes([document.id for document in chunk]).tolist(), strict=True):
            if hashed in suspects:
                if document.id in seen:
                    raise InputError(f"document id '{document.id}' occurs twice; ids must be unique")
                seen.add(document.id)


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
        token_ids: Vocabulary ids of the tokens, (n,) uint32; None if the model does not provide them.
        tokens: Token counts of each document.
    """

    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.uint32] | None
    tokens: TextTokens

    def select(self, places: NDArray[np.intp]) -> Encoded:
        """Select documents, in the order given."""
        ends = np.cumsum(self.lengths)
        lengths = self.lengths[places]
        begins = ends[places] - lengths
        rows = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        tokens = TextTokens(self.tokens.tokens[places], self.tokens.truncated[places], self.tokens.empty[places])
        return Encoded(self.vectors[rows], lengths, None if self.token_ids is None else self.token_ids[rows], tokens)


def encode(model: Model, documents: Sequence[Document], *, use_title: bool) -> Encoded:
    """Encode documents.

    Raises:
        InputError: A vector is not finite (names the document).
        ValueError: The vectors do not match the model's card.
    """
    encoding = model.encode([document.content(use_title=use_title) for document in documents], "document")
    given, counts = stack_vectors(encoding, model.card)
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which is rejected below
        vectors = np.ascontiguousarray(given, np.float32)  # files store float32 only
    lengths = np.array(counts, np.int64)
    if len(lengths) != len(documents):
        raise ValueError(f"{model.card.source} gave the vectors of {len(lengths)} texts for {len(documents)}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        key = documents[int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))].id
        what = "the vector" if isinstance(encoding, DenseEncoding) else "a token vector"
        raise InputError(f"{what} of document '{key}' is not finite; check the model")
    token_ids = None
    if not isinstance(encoding, DenseEncoding) and encoding.token_ids is not None:
        token_ids = np.concatenate(encoding.token_ids).astype(np.uint32, copy=False)
    return Encoded(comparable(vectors, model.card), lengths, token_ids, encoding.tokens)


def joined(parts: Sequence[Encoded]) -> Encoded:
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
        return joined(parts).select(np.argsort(np.concatenate(numbers), kind="stable"))
