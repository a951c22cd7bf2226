"""What a search sends to a shard and gets back: a few arrays and one list of ids, however many queries there are.

A thousand small arrays would be a thousand objects to take apart and put together again on the way.

Shapes: Q queries, N vectors of all queries, n hits of all queries, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.documents.metadata import Filter
from quiver.retrieval.index.index import SearchRequest
from quiver.retrieval.index.segments import NamedHits
from quiver.retrieval.records import Hits

# An id, as a filter holds it, takes about so many bytes on the way.
_ID_BYTES = 32


@dataclass(frozen=True)
class PackedRequest:
    """A `SearchRequest`.

    Attributes:
        vectors: (Q, d) for one vector a document; (N, d) for one a token, query after query.
        ends: Where the vectors of each query end, (Q,); None for one vector a document.
        k: Hits a query.
        params: Search parameters, as the codec has them.
        filter: Which documents may be found.
    """

    vectors: NDArray[np.float32]
    ends: NDArray[np.int64] | None
    k: int
    params: Any
    filter: Filter | None

    @classmethod
    def of(cls, request: SearchRequest) -> PackedRequest:
        """Pack a request."""
        queries = request.queries
        if isinstance(queries, np.ndarray):
            return cls(queries, None, request.k, request.params, request.filter)
        vectors = np.concatenate(queries) if queries else np.zeros((0, 0), np.float32)
        ends = np.cumsum([len(query) for query in queries], dtype=np.int64)
        return cls(vectors, ends, request.k, request.params, request.filter)

    def request(self) -> SearchRequest:
        """The request; its queries are views."""
        queries = self.vectors if self.ends is None else np.split(self.vectors, self.ends[:-1]) if len(self.ends) else []
        return SearchRequest(queries, self.k, self.params, self.filter)

    @property
    def queries(self) -> int:
        """Number of queries Q."""
        return len(self.vectors if self.ends is None else self.ends)

    @property
    def nbytes(self) -> int:
        """About how many bytes it is on the way."""
        ids = 0 if self.filter is None or self.filter.ids is None else len(self.filter.ids)
        return self.vectors.nbytes + _ID_BYTES * ids


@dataclass(frozen=True)
class ShardHits:
    """What a shard found.

    Attributes:
        ids: Document ids of all queries, n of them.
        scores: Their scores, (n,).
        ends: Where the hits of each query end, (Q,).
        seconds: How long the shard searched.
    """

    ids: list[str]
    scores: NDArray[np.float32]
    ends: NDArray[np.int64]
    seconds: float = 0.0

    @classmethod
    def of(cls, hits: Hits) -> ShardHits:
        """Pack what an index found.

        Example:
            >>> packed = ShardHits.of(Hits([["b", "a"], ["c"]], [np.float32([2, 1]), np.float32([3])]))
            >>> packed.ids, packed.ends.tolist(), [each.ids for each in packed.each()]
            (['b', 'a', 'c'], [2, 3], [['b', 'a'], ['c']])
        """
        ids = [key for found in hits.ids for key in found]
        scores = np.concatenate([np.zeros(0, np.float32), *hits.scores])
        return cls(ids, scores, np.cumsum([len(found) for found in hits.ids], dtype=np.int64))

    def timed(self, seconds: float) -> ShardHits:
        """The same with the time it took."""
        return replace(self, seconds=seconds)

    def each(self) -> Sequence[NamedHits]:
        """The hits of each query."""
        ends = self.ends.tolist()
        return [NamedHits(self.ids[begin:end], self.scores[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
