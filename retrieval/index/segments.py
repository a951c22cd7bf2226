"""Segments of an index: a document table and the vectors of an engine, row by row; written, opened, merged, and their hits.

Shapes: P documents, k hits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.columns import StringColumn
from quiver.retrieval.index.documents import DocumentTable, DocumentTableWriter, merge_documents
from quiver.retrieval.index.engines import (
    AnyCodec,
    AnySegment,
    Bitmap,
    Found,
    in_order,
)
from quiver.retrieval.index.files import Disk, Files
from quiver.retrieval.index.store.reading import (
    Policy,
)
from quiver.retrieval.records import (
    Document,
    Hits,
    TextTokens,
    TokenCounts,
)


class PartHits(Protocol):
    """Hits of one part for one query, best first."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,) with n <= k."""

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of the hits, (n,); with ``kept``, only those where it is true. The merge reads only the ids that it needs."""


@dataclass(frozen=True)
class SegmentHits:
    """Hits of a segment for one query; ids are read from the segment's file on access."""

    strings: StringColumn
    found: Found

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,)."""
        return self.found.scores

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of all hits, or of those that are kept, (n,)."""
        return self.strings.take(self.found.rows if kept is None else self.found.rows[kept])


@dataclass(frozen=True)
class NamedHits:
    """Hits for one query with ids in memory."""

    ids: Sequence[str]
    scores: NDArray[np.float32]

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """Ids of all hits, or of those that are kept, (n,)."""
        return self.ids if kept is None else [*compress(self.ids, kept.tolist())]


def merged(found: Sequence[Sequence[PartHits]], k: int) -> Hits:
    """Merge the hits of several parts into at most k of each query; ``found`` has the hits of the parts of each query, in any order.

    Example:
        >>> left, right = NamedHits(["b", "c"], np.float32([2, 1])), NamedHits(["d", "a"], np.float32([1, 1]))
        >>> hits = merged([[left, right]], 3)
        >>> hits.ids, hits.scores[0].tolist()
        ([['b', 'd', 'c']], [2.0, 1.0, 1.0])
    """
    best = [_merge_parts(parts, k) for parts in found]
    return Hits([ids for ids, _ in best], [scores for _, scores in best])


def _merge_parts(parts: Sequence[PartHits], k: int) -> tuple[Sequence[str], NDArray[np.float32]]:
    if len(parts) == 1:
        return parts[0].names(None), parts[0].scores
    scores = np.concatenate([np.zeros(0, np.float32), *(part.scores for part in parts)])
    if not len(scores):
        return [], scores
    lowest = np.partition(scores, len(scores) - k)[len(scores) - k] if len(scores) > k else -np.inf
    names: list[str] = []
    for part in parts:
        names += part.names(part.scores >= lowest)
    kept = scores[scores >= lowest]
    ids = np.array(names, object)
    rows, ordered = in_order(np.arange(len(kept)), kept, k, ids=ids)
    return ids[rows].tolist(), ordered


@dataclass(frozen=True)
class OpenSegment:
    """A segment opened for searching.

    Attributes:
        documents: Ids, texts and metadata by row.
        vectors: The engine's segment.
        alive: Rows that are not deleted; None if none is deleted.
    """

    documents: DocumentTable
    vectors: AnySegment
    alive: Bitmap | None

    @property
    def kept(self) -> Bitmap:
        """The rows that are not deleted, (P,)."""
        return np.ones(len(self.documents), bool) if self.alive is None else self.alive

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The row of each id; -1 if the document does not exist or is deleted."""
        rows = self.documents.ids.rows_of(ids)
        return rows if self.alive is None else np.where(self.alive[rows] & (rows >= 0), rows, -1)


@dataclass(frozen=True)
class Contents:
    """Counts of a segment, those of deleted documents included, and a description of each file by name."""

    documents: int
    vectors: int
    tokens: TokenCounts
    holds: Mapping[str, str]


class SegmentFolderWriter:
    """Writes a segment into an empty folder, a chunk of documents at a time, with their texts if ``texts`` says so."""

    def __init__(self, folder: Path, codec: AnyCodec, disk: Disk, *, texts: bool, types: Mapping[str, str]) -> None:
        self._documents = DocumentTableWriter(folder, disk, texts=texts, types=types)
        self._vectors = codec.writer(folder, disk)
        self._folder, self._codec, self._disk = folder, codec, disk
        self._counts = TokenCounts(0, 0, 0, 0)
        self.documents = 0
        self.vectors = 0

    def add(
        self,
        documents: Sequence[Document],
        vectors: NDArray[np.float32],
        lengths: NDArray[np.int64] | None,
        token_ids: NDArray[Any] | None,
        tokens: TextTokens,
    ) -> None:
        """Append documents with their vectors, whose similarity is the inner product."""
        self._documents.add(documents, tokens)
        self._vectors.add(vectors, lengths, token_ids)
        self._counts = total_counts([self._counts, tokens.total()])
        self.documents += len(documents)
        self.vectors += len(vectors)

    def close(self) -> Contents:
        """Finish the files."""
        holds = {**self._documents.close(), **self._vectors.close()}
        # An engine may keep fewer vectors than it was given.
        kept = int(self._codec.open(Files.written(self._folder, self._disk), self.documents).lengths.sum())
        return Contents(self.documents, kept, self._counts, holds)


def open_segment(files: Files, codec: AnyCodec, count: int, policy: Policy, *, alive: Bitmap | None = None) -> OpenSegment:
    """Open a segment of ``count`` documents; ``alive`` has the rows that are not deleted.

    Raises:
        FileNotFoundError: A file is missing.
        InputError: The files are inconsistent.
    """
    documents = DocumentTable.open(files, count, texts=policy.store_text, types=policy.types)
    return OpenSegment(documents, codec.open(files, count), alive)


def merge_segments(parts: Sequence[OpenSegment], codec: AnyCodec, folder: Path, disk: Disk) -> Contents:
    """Merge segments into one in an empty folder, without their deleted documents; nothing is encoded again."""
    kept = [(part, part.kept) for part in parts if part.kept.any()]
    holds = {**merge_documents([(part.documents, keep) for part, keep in kept], folder, disk)}
    holds |= codec.merge([(part.vectors, keep) for part, keep in kept], folder, disk)
    documents = sum(int(np.count_nonzero(keep)) for _, keep in kept)
    vectors = sum(int(part.vectors.lengths[keep].sum()) for part, keep in kept)
    return Contents(documents, vectors, total_counts([part.documents.ids.token_counts(keep) for part, keep in kept]), holds)


def total_counts(counts: Sequence[TokenCounts]) -> TokenCounts:
    """The sum of the token counts of several sets of texts."""
    return TokenCounts(*(sum(getattr(count, field.name) for count in counts) for field in fields(TokenCounts)))
