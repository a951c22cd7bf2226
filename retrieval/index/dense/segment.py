"""Searching one segment of compressed vectors: candidates by codes in memory, scores by the refine store.

Every score is the refine store's, whatever found the document: a search that looks at everything and one that does not give a document the
same score, and hits of several segments can be merged.

Shapes: Q queries, P documents, d width, k hits.
"""

from __future__ import annotations

import math
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.dense.refine import RefineStore
from quiver.retrieval.index.engines import Bitmap, Found, Size
from quiver.retrieval.index.record_files import RecordFiles

# Where a filter leaves so few documents, all of them are scored, which is no slower than to look for candidates among all: a multiple of
# the candidates, or a share of all documents as long as that is not too many. A document is scored in the time of some twenty codes.
_FEW = 8
_SHARE = 24
_MANY = 20_000
# How much more widely a search looks under a filter, at most.
_WIDER = 4.0


class DenseEffort(Protocol):
    """What the knobs of all compressed dense engines have in common."""

    @property
    def k_factor(self) -> float:
        """Candidates whose final scores are computed, for each hit wanted."""

    @property
    def exhaustive(self) -> bool:
        """Whether the final scores of all documents are computed."""


def widened(knob: int, allowed: Bitmap | None) -> int:
    """A knob that says how much of an index is looked at, for a search under a filter.

    Where one document in f is allowed, the ten best of those are among the ten f best of all, which lie somewhat farther apart.

    Args:
        knob: Its value without a filter.
        allowed: The rows that may be found, (P,); None for all.

    Example:
        >>> widened(10, np.array([True, False, False, False])), widened(10, None)
        (20, 10)
    """
    if allowed is None:
        return knob
    sparser = len(allowed) / max(1, int(np.count_nonzero(allowed)))
    return round(knob * min(_WIDER, math.sqrt(sparser)))


Effort = TypeVar("Effort", bound=DenseEffort, contravariant=True)
"""The knobs of one engine."""


class Finder(Protocol[Effort]):
    """Finds candidates in one segment. Several threads may search at once."""

    @property
    def size(self) -> Size:
        """What it takes in memory, whether or not it is there yet, and on the disk."""

    def find(self, queries: NDArray[np.float32], count: int, *, effort: Effort, allowed: Bitmap | None) -> list[NDArray[np.int64]]:
        """Documents that may be among the best of each query.

        Args:
            queries: (Q, d) float32, contiguous.
            count: Documents a query, at most.
            effort: The knobs of the search.
            allowed: The rows that may be found, (P,); None for all.

        Returns:
            Rows, all allowed, in no order, each at most once: fewer than ``count`` where no more were met.
        """

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append what it has on the disk of the rows that are kept, (P,), byte for byte."""

    def damaged(self) -> Bitmap:
        """The rows that a salvaged file has lost, (P,)."""


class DenseSegment(Generic[Effort]):
    """The documents of one segment; see `quiver.retrieval.index.engines.Segment`.

    Args:
        store: Gives their scores.
        finder: Finds candidates among them.
    """

    def __init__(self, store: RefineStore, finder: Finder[Effort]) -> None:
        self.store = store
        self._finder = finder

    def __len__(self) -> int:
        return len(self.store)

    @property
    def size(self) -> Size:
        """What it takes in memory, that included which is made at the first search, and on the disk."""
        resident, mapped = self._finder.size
        return Size(resident, mapped + self.store.nbytes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """One vector a row, (P,)."""
        return np.ones(len(self), np.int64)

    def search(
        self,
        queries: NDArray[np.float32],
        k: int,
        *,
        effort: Effort,
        ranks: NDArray[np.uint32],
        allowed: Bitmap | None = None,
    ) -> list[Found]:
        """The k best rows of each query; see `quiver.retrieval.index.engines.Segment`."""
        count = len(self) if allowed is None else int(np.count_nonzero(allowed))
        wanted = min(math.ceil(effort.k_factor * k), count)
        if not len(queries):
            return []
        few = wanted if allowed is None else max(_FEW * wanted, min(len(self) // _SHARE, _MANY))
        if effort.exhaustive or count <= few:
            return self.store.search(queries, k, ranks=ranks, allowed=allowed)
        matrix = np.ascontiguousarray(queries, np.float32)
        found = []
        for number, rows in enumerate(self._finder.find(matrix, wanted, effort=effort, allowed=allowed)):
            best, scores, least = self.store.nearest_of(rows, matrix[number], k, ranks=ranks)
            # Fewer were met than there are, or all from the last hit on are equal: then some that were not met may be so too.
            if len(rows) < k or (len(rows) > k and scores[-1] == least):
                found += self.store.search(matrix[number : number + 1], k, ranks=ranks, allowed=allowed)
            else:
                found.append(Found(best, scores))
        return found

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of some rows by the refine store, (len(rows),)."""
        return self.store.scores(query, rows)

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The vectors of some rows as the refine store has them, (n, d), and one each, (n,)."""
        return self.store.decode(rows), np.ones(len(rows), np.int64)

    def damaged(self) -> Bitmap:
        """See `quiver.retrieval.index.engines.Segment`."""
        return self.store.damaged() | self._finder.damaged()

    def copy(self, files: RecordFiles, keep: Bitmap) -> None:
        """Append the rows that are kept, (P,), to the files of another segment, byte for byte."""
        self._finder.copy(files, keep)
        self.store.copy(files, keep)
