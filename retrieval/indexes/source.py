"""The documents of a build: read once from end to end before anything is encoded, and then as often as they are needed.

That first reading finds a bad line or an id that comes twice after seconds, not after hours, counts the documents and takes the checksum
that says whether a killed build goes on with the same ones. No more than a chunk of them is ever held, and eight bytes of each one's id.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from encoder.errors import InputError
from retrieval.corpus import read_documents
from retrieval.indexes.disk import Disk
from retrieval.indexes.documents.ids import id_hashes
from retrieval.records import Document

_CHUNK = 4096


@dataclass(frozen=True)
class Source:
    """Documents that have been read once.

    Attributes:
        read: Starts a reading.
        count: How many there are.
        sha256: Of all that is in them, in their order.
    """

    read: Callable[[], Iterator[Document]]
    count: int
    sha256: str

    def chunks(self, size: int, *, first: int = 0, characters: int | None = None) -> Iterator[list[Document]]:
        """The documents from a number on, some at a time.

        Args:
            size: Documents of a chunk, at most.
            first: Number of the first document.
            characters: A chunk ends as soon as its texts have so many.

        Raises:
            InputError: A document is malformed, or there are fewer or more than at the first reading.
        """
        read, held, chunk = first, 0, list[Document]()
        for document in islice(self.read(), first, None):
            chunk.append(document)
            held += len(document.text)
            read += 1
            if len(chunk) == size or (characters is not None and held >= characters):
                yield chunk
                held, chunk = 0, []
        if chunk:
            yield chunk
        if read != self.count:
            raise InputError(f"{self.count:,} documents at the first reading, {read:,} at a later one; leave the corpus alone")


def survey(
    corpus: str | Path | Iterable[Document], spool: Path, *, disk: Disk, look: Callable[[list[Document]], None] | None = None
) -> Source:
    """Read all documents once.

    Args:
        corpus: A ``.jsonl[.gz]`` file, a folder with ``corpus.jsonl[.gz]``, or documents. What can be gone through only once is written
            to ``spool`` on the way.
        spool: A file to make; it must stay as long as the source is used.
        disk: Writes the spool.
        look: Is shown every chunk.

    Raises:
        InputError: A malformed corpus (file:line), no documents, an id that comes twice, or a document that no file could hold.
    """
    if isinstance(corpus, str | Path):
        path = Path(corpus)
        return _surveyed(lambda: read_documents(path), look)
    if isinstance(corpus, Iterator):
        _write(corpus, spool, disk)
        return _surveyed(lambda: _read(spool), look)
    return _surveyed(lambda: iter(corpus), look)


def _surveyed(read: Callable[[], Iterator[Document]], look: Callable[[list[Document]], None] | None) -> Source:
    digest, hashes, stream = hashlib.sha256(), array("Q"), read()
    while chunk := list(islice(stream, _CHUNK)):
        for document in chunk:
            digest.update(_line(document))
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
        _check_unique(read(), suspects)
    return Source(read, count, digest.hexdigest())


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


def _write(documents: Iterable[Document], path: Path, disk: Disk) -> None:
    if path.exists():  # of a build that was killed
        disk.unlink(path)
    with disk.create(path) as file:
        for document in documents:
            file.write(_line(document))


def _read(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        for line in file:
            yield Document(*json.loads(line))
