"""The documents of a build: read once from end to end before anything is encoded, and then as often as they are needed.

That first reading finds a bad line or an id that comes twice after seconds, not after hours, counts the documents and takes the checksum
that says whether a killed build goes on with the same ones. No more than a chunk of them is ever held, and eight bytes of each one's id
and four of its length.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import checked_document, read_documents
from quiver.retrieval.index.disk import Disk
from quiver.retrieval.index.documents.ids import id_hashes
from quiver.retrieval.records import Document

_CHUNK = 4096
# Documents from one remembered place of a spool to the next: at most so many lines are passed over, unread.
_STRIDE = 256


@dataclass(frozen=True)
class Spool:
    """A file with a line for each document, any of which is found quickly; workers on other machines read it too.

    Attributes:
        path: The file.
        offsets: Where every document whose number is a multiple of `_STRIDE` begins, in bytes.
    """

    path: Path
    offsets: NDArray[np.uint64]

    def __call__(self, first: int) -> Iterator[Document]:
        """The documents from a number on.

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
    """Documents that have been read once.

    Attributes:
        read_from: Starts a reading at a document's number.
        count: How many there are.
        sha256: Of all that is in them, in their order.
        lengths: Characters of each one's text, (count,).
        fields: Names of the metadata fields that any of them has.
    """

    read_from: Callable[[int], Iterator[Document]]
    count: int
    sha256: str
    lengths: NDArray[np.uint32]
    fields: frozenset[str]

    @property
    def spool(self) -> Spool:
        """The file to which they were written on the way.

        Raises:
            ValueError: They were not.
        """
        if not isinstance(self.read_from, Spool):
            raise ValueError("the documents were not spooled; workers cannot read them")
        return self.read_from


class Reading:
    """Documents by their numbers; who asks for them in order reads them once.

    Args:
        read_from: Starts a reading at a document's number.
        count: How many there are.
    """

    def __init__(self, read_from: Callable[[int], Iterator[Document]], count: int) -> None:
        self._read_from, self._count = read_from, count
        self._stream, self._next = iter(list[Document]()), -1

    def span(self, first: int, stop: int) -> list[Document]:
        """Documents ``first`` to ``stop - 1``.

        Raises:
            InputError: A document is malformed, or there are fewer or more than at the first reading.
        """
        if self._next < 0 or first < self._next or (first != self._next and isinstance(self._read_from, Spool)):
            self._stream, self._next = self._read_from(first), first
        documents = list(islice(self._stream, first - self._next, stop - self._next))
        self._next = first + len(documents)
        found = self._next + (sum(1 for _ in self._stream) if stop == self._count else 0)
        if len(documents) < stop - first or found > self._count:
            raise InputError(f"{self._count:,} documents at the first reading, {found:,} at a later one; leave the corpus alone")
        return documents

    def picked(self, numbers: NDArray[np.int64]) -> Iterator[Document]:
        """The documents with these numbers, which ascend."""
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
    """Read all documents once.

    Args:
        corpus: A ``.jsonl[.gz]`` file, a folder with ``corpus.jsonl[.gz]``, or documents. What can be gone through only once is written
            to ``spool`` on the way.
        spool: A file to make; it must stay as long as the source is used.
        disk: Writes the spool.
        spooled: Whether all is written there, whatever the corpus is: for workers that are to read any part of it.
        look: Is shown every chunk.

    Raises:
        InputError: A malformed corpus (file:line), no documents, an id that comes twice or is none, or a document that no file could
            hold.
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
    ordered.sort()  # in place: there may be as many as the memory holds
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
                    raise InputError(f"document id '{document.id}' is there twice; ids must be unique")
                seen.add(document.id)


def _line(document: Document) -> bytes:
    """All that is in a document, on a line.

    Raises:
        InputError: It holds what JSON or UTF-8 cannot, which the segments' files could not hold either: half of a surrogate pair, NaN.
    """
    fields = [document.id, document.text, document.title, dict(document.metadata) if document.metadata else None]
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        raise InputError(f"document {document.id!r} cannot be written as JSON ({error})") from error


def _write(documents: Iterator[Document], path: Path, disk: Disk) -> Spool:
    if path.exists():  # of a build that was killed
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
