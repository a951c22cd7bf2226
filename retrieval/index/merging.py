"""One ranking from those of several parts of an index: the best by score and then by document id, both descending.

The parts may be segments in this process or shards in others: their scores are of one codec and can be compared, no document is in two of
them, and each gives its k best. The k best of all are then among these, and the ranking is the same however documents are spread.

Shapes: Q queries, k hits a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.documents.strings import PackedStrings
from quiver.retrieval.index.engines import Bitmap, Found
from quiver.retrieval.index.ranking import in_order
from quiver.retrieval.records import Hits


class PartHits(Protocol):
    """What one part found for one query, best first."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,) with n <= k."""

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """The ids of its documents, or of those that are kept, (n,); it is the merging that says whose ids have to be read."""


@dataclass(frozen=True)
class SegmentHits:
    """What a segment found for one query; its ids are read from the segment's file.

    Attributes:
        strings: The segment's ids.
        found: Rows and scores.
    """

    strings: PackedStrings
    found: Found

    @property
    def scores(self) -> NDArray[np.float32]:
        """Scores, (n,)."""
        return self.found.scores

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """The ids, or those that are kept, (n,)."""
        return self.strings.take(self.found.rows if kept is None else self.found.rows[kept])


@dataclass(frozen=True)
class NamedHits:
    """What was found for one query, ids and all.

    Attributes:
        ids: Document ids, n of them.
        scores: Scores, (n,).
    """

    ids: Sequence[str]
    scores: NDArray[np.float32]

    def names(self, kept: Bitmap | None) -> Sequence[str]:
        """The ids, or those that are kept, (n,)."""
        return self.ids if kept is None else [*compress(self.ids, kept.tolist())]


def merged(found: Sequence[Sequence[PartHits]], k: int) -> Hits:
    """The k best of each query.

    Args:
        found: For each query what the parts found, in any order.
        k: Hits a query; fewer are given where fewer were found.

    Example:
        >>> left, right = NamedHits(["b", "c"], np.float32([2, 1])), NamedHits(["d", "a"], np.float32([1, 1]))
        >>> hits = merged([[left, right]], 3)
        >>> hits.ids, hits.scores[0].tolist()
        ([['b', 'd', 'c']], [2.0, 1.0, 1.0])
    """
    best = [_merged(parts, k) for parts in found]
    return Hits([ids for ids, _ in best], [scores for _, scores in best])


def _merged(parts: Sequence[PartHits], k: int) -> tuple[Sequence[str], NDArray[np.float32]]:
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
