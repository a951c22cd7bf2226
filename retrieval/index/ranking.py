"""Rank documents exactly, given a bound on the error of fast scores: find the candidates of every query, and order them in float64.

Matrix products round the same inner product differently at different positions of the matrix. Scores that are too close to order are
therefore computed again in float64 and rounded once. Equal vectors then have equal scores, and a ranking depends neither on how many
queries are searched together nor on the number of threads, nor on the precision of the first scores.

`rank` asks a `Scorer` for the nearest documents of every query, k and a margin. If the margin does not contain the end of a tie at position
k, a second pass reads every document whose score may reach the k best. Peak memory: one block and Q x (k + margin) candidates.

Shapes: Q queries, P documents, n documents of a block, T token vectors of all documents, k hits, d width.
Source of the error bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Found, in_order

_faiss: Any = faiss  # the type stubs lack the functions that FAISS's Python layer adds
_UNIT_ROUNDOFF = 2.0**-24
_LARGEST = float(np.finfo(np.float32).max)
MARGIN = 32
"""Documents retrieved in addition to k, so that the end of a tie at the cut is usually among them."""

FirstPass = Literal["float32", "bfloat16", "float16"]
"""Precision of the products of vectors from which candidates are chosen."""


@dataclass(frozen=True)
class SearchLimits:
    """Sizes of the parts of an exact search. They bound its memory and do not change its results.

    Attributes:
        block_bytes: Maximum size in bytes of the vectors that are read from disk at a time.
        queries: Queries per pass over the documents: their tokens and Q x (k + margin) candidates are in memory.
        queries_rescored: Queries whose candidates are scored in float64 together.
        tokens_rescored: Token vectors that are gathered at a time to compute scores in float64.
        scores_held: Maximum number of scores in memory, queries x documents of a block: 32 MiB.
        device_scores: The same on a device: 512 MiB.
        device_bytes: Bytes of a segment's vectors that may stay in the memory of a GPU; None for 0.7 of what is free at the first search.
        first_pass: Precision of the first scores on a device; None for float16 on a GPU and float32 on a CPU.
    """

    block_bytes: int = 128 << 20
    queries: int = 1024
    queries_rescored: int = 32
    tokens_rescored: int = 65_536
    scores_held: int = 8 << 20
    device_scores: int = 128 << 20
    device_bytes: int | None = None
    first_pass: FirstPass | None = None

    def block_rows(self, dim: int) -> int:
        """Number of rows of width d in a block."""
        return max(1, self.block_bytes // (4 * dim))


LIMITS = SearchLimits()
"""The default limits."""


def float32_error(terms: int, magnitude: float) -> float:
    """Bound on the error of a float32 sum of products, for any order of summation.

    Args:
        terms: Number of roundings in the computation of one score.
        magnitude: Bound on the sum of the absolute values of the products, such as the product of two norms.

    Returns:
        The bound, with room for rounding the exact score to float32 once more.

    Raises:
        ValueError: The scores may overflow float32; infinities and NaN cannot be ordered.
    """
    if not magnitude < _LARGEST:
        raise ValueError(f"scores up to {magnitude:.3g} do not fit into float32; the norms of the vectors are too large")
    return (terms + 2) * _UNIT_ROUNDOFF * magnitude


class Scorer(Protocol):
    """Scores the documents of one search for its queries."""

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and rows of the k best documents of every query, (Q, k), best first."""

    def exact(self, wanted: Mapping[int, NDArray[np.int64]]) -> Mapping[int, NDArray[np.float64]]:
        """Scores in float64 of the wanted documents of each query, in the given order."""

    def reaching(
        self, queries: Sequence[int], thresholds: NDArray[np.float64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """Yield, block by block, each query with documents whose score reaches its threshold, and their scores in float64."""


@dataclass(frozen=True)
class Block:
    """Some successive documents, whose vectors are in memory."""

    start: int  # row of the first document
    count: int  # number of documents n, at least 1
    scores: Callable[[Sequence[int]], NDArray[np.float32]]  # scores of some queries, (Q', n); minus infinity for excluded documents
    nearest: Callable[[int], tuple[NDArray[np.float32], NDArray[np.int64]]] | None = None  # scores and places of the k best of all queries


@dataclass(frozen=True)
class HostScorer:
    """Scores documents in memory or on disk block by block; implements `Scorer`."""

    queries: int  # number of queries Q
    blocks: Callable[[], Iterable[Block]]  # starts a pass over all documents
    exact_scores: Callable[[int, NDArray[np.int64]], NDArray[np.float64]]  # scores of one query with given rows in float64
    held: int = LIMITS.scores_held  # maximum number of scores in memory

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `Scorer`; k is at most the number of documents that are not excluded."""
        best = _faiss.ResultHeap(self.queries, k, keep_max=True)
        for block in self.blocks():
            if block.nearest is not None:
                scores, places = block.nearest(min(k, block.count))
                best.add_result(scores, places + block.start)
                continue
            for some in self._group_queries(range(self.queries), block):
                scores = np.ascontiguousarray(block.scores(some))
                best.heaps.addn(block.count, _faiss.swig_ptr(scores), block.start, some[0], len(some))
        best.finalize()
        return best.D, best.I

    def exact(self, wanted: Mapping[int, NDArray[np.int64]]) -> Mapping[int, NDArray[np.float64]]:
        """See `Scorer`."""
        return {query: self.exact_scores(query, rows) for query, rows in wanted.items()}

    def reaching(
        self, queries: Sequence[int], thresholds: NDArray[np.float64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """See `Scorer`."""
        least = dict(zip(queries, thresholds, strict=True))
        for block in self.blocks():
            for some in self._group_queries(queries, block):
                for query, scores in zip(some, block.scores(some), strict=True):
                    rows = np.flatnonzero(scores >= least[query]) + block.start
                    if len(rows):
                        yield query, rows, self.exact_scores(query, rows)

    def _group_queries(self, queries: Sequence[int], block: Block) -> Iterator[Sequence[int]]:
        """Groups of queries whose scores with a block fit into memory."""
        size = max(1, self.held // block.count)
        return (queries[start : start + size] for start in range(0, len(queries), size))


def rank(
    scorer: Scorer,
    k: int,
    *,
    findable: int,
    errors: NDArray[np.float64],
    ids: NDArray[Any],
    margin: int = MARGIN,
    all_exact: bool = False,
    group: int = LIMITS.queries_rescored,
) -> list[Found]:
    """The k best documents of every query, by score and then by document id, both descending.

    Args:
        scorer: Computes scores with an error of at most ``errors``, and in float64.
        k: Hits per query, at least 1.
        findable: Number of documents whose score is not minus infinity.
        errors: Bound on the error of a score for each query, (Q,).
        ids: Document ids, or their ranks, (P,).
        margin: Documents retrieved in addition to k.
        all_exact: Compute every returned score in float64 and round it once, not only those that are too close to a neighbour. A score
            then does not depend on the other documents, and results of several indexes can be merged.
        group: Queries whose candidates are scored in float64 together.
    """
    k = min(k, findable)
    if not k:
        return [Found(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in errors]
    fetched = min(findable, k + margin)
    scores, rows = scorer.nearest(fetched)
    # No document outside those retrieved scores above the last of them: it cannot belong to the k best if the last is far enough below.
    cut_off = np.flatnonzero(scores[:, k - 1] - scores[:, -1] <= 2 * errors).tolist() if fetched < findable else []
    found = {query: Found(np.empty(0, np.int64), np.empty(0, np.float32)) for query in cut_off}
    if cut_off:
        for query, some, exact in scorer.reaching(cut_off, scores[cut_off, k - 1] - 2 * errors[cut_off]):
            known = found[query]
            found[query] = in_order(np.append(known.rows, some), np.append(known.scores, exact.astype(np.float32)), k, ids=ids)
    rest = [query for query in range(len(errors)) if query not in found]
    for start in range(0, len(rest), group):
        near: dict[int, NDArray[np.intp]] = {}  # of each query, the positions of scores that have to be computed in float64
        for query in rest[start : start + group]:
            last = np.searchsorted(-scores[query], 2 * errors[query] - scores[query, k - 1], side="right")  # those below cannot be hits
            close = all_exact | (scores[query, : last - 1] - scores[query, 1:last] <= 2 * errors[query])
            near[query] = np.flatnonzero(np.append(close, all_exact) | np.append(all_exact, close))
            rows[query, last:] = -1
        rescored = scorer.exact({query: rows[query, places] for query, places in near.items()})
        for query, places in near.items():
            scores[query, places] = rescored[query]
            kept = rows[query] >= 0
            found[query] = in_order(rows[query, kept], scores[query, kept], k, ids=ids)
    return [found[query] for query in range(len(errors))]


def document_blocks(offsets: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Ranges ``[begin, end)`` of documents with at most ``size`` tokens together; each has at least one document.

    Example:
        >>> list(document_blocks(np.array([0, 2, 2, 5, 6]), 3))
        [(0, 2), (2, 3), (3, 4)]
    """
    begin = 0
    while begin < len(offsets) - 1:
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + size, side="right")) - 1)
        yield begin, end
        begin = end


def picked_offsets(offsets: NDArray[np.int64], documents: NDArray[np.intp]) -> NDArray[np.int64]:
    """First token of each of the given documents if only these are kept, and the number of their tokens, (len(documents) + 1,)."""
    return np.append(0, np.cumsum(offsets[documents + 1] - offsets[documents]))


def token_rows(offsets: NDArray[np.int64], documents: NDArray[np.intp]) -> NDArray[np.int64]:
    """Rows of all tokens of given documents, document after document.

    Example:
        >>> token_rows(np.array([0, 2, 2, 5]), np.array([2, 0]))
        array([2, 3, 4, 0, 1])
    """
    ends = picked_offsets(offsets, documents)
    rows: NDArray[np.int64] = np.repeat(offsets[documents] - ends[:-1], np.diff(ends)) + np.arange(int(ends[-1]))
    return rows
