"""Rank documents exactly, given a bound on the error of fast scores: find the candidates of every query, and order them in float64.

Matrix products round the same inner product differently at different positions of the matrix: with FAISS and 300 queries of width 768,
copies of one document got different scores for most queries. Scores that are too close to order are therefore computed again in float64
and rounded once. Equal vectors then have equal scores, and a ranking depends neither on how many queries are searched together nor on the
number of threads, nor on the precision of the first scores.

`rank` asks a `Scorer` for the nearest documents of every query, k and a margin. If the margin does not contain the end of a tie at position
k, a second pass reads every document whose score may reach the k best. `InParts` is the scorer on the host: it reads the documents block by
block, one block in memory at a time; `quiver.retrieval.index.on_device` holds the scorers on a device. Peak memory: one block and
Q x (k + margin) candidates.

Shapes: Q queries, P documents, n documents of a block, T token vectors of all documents, k hits, d width.
Source of the error bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.engines import in_order

_UNIT_ROUNDOFF = 2.0**-24
_LARGEST = float(np.finfo(np.float32).max)


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


def is_complete(scores: NDArray[np.float32], k: int, error: float) -> bool:
    """Whether no document outside the retrieved ones can belong to the k best, given that none scores above the last.

    Args:
        scores: Scores of the documents retrieved, best first, more than k.
        k: Number of hits wanted.
        error: Bound on the error of a score.
    """
    return bool(scores[k - 1] - scores[-1] > 2 * error)


def candidates(
    rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, error: float
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.intp]]:
    """Select the rows that may belong to the k best.

    Args:
        rows: Rows of the index, which include all candidates for the k best.
        scores: Their scores, with an error of at most ``error``.
        k: Number of hits, 1 <= k <= number of rows.
        error: Bound on the error of a score.

    Returns:
        Rows and scores, best first, and the positions of scores that are too close to a neighbour to be ordered.
    """
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k] - 2 * error
    kept = np.flatnonzero(scores >= threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    scores = scores[kept]
    close = scores[:-1] - scores[1:] <= 2 * error
    doubtful = np.zeros(len(scores), bool)
    doubtful[:-1] = close
    doubtful[1:] |= close
    return rows[kept], scores, np.flatnonzero(doubtful)


MARGIN = 32
"""Documents retrieved in addition to k, so that the end of a tie at the cut is usually among them."""

FirstPass = Literal["float32", "bfloat16", "float16"]
"""Precision of the products of vectors from which candidates are chosen."""


@dataclass(frozen=True)
class SearchLimits:
    """Sizes of the parts of an exact search. They bound its memory and do not change its results.

    Attributes:
        block_bytes: Maximum size in bytes of the vectors that are read from disk at a time.
        dense_queries: Queries per pass over documents with one vector: their candidates, Q x (k + margin), take 50 MB for k = 1000.
        token_queries: Queries per pass over documents with token vectors; their tokens and candidates are in memory.
        queries_rescored: Queries whose candidates are fetched together: many enough to share disk reads, few enough to limit memory.
        tokens_rescored: Token vectors that are gathered at a time to recompute close scores in float64.
        scores_held: Maximum number of scores of a part in memory if FAISS does not select the best, queries x documents: 32 MiB.
        device_scores: The same on a device: 512 MiB.
        device_bytes: Bytes of a segment's vectors that may stay in the memory of a GPU; None for 0.7 of what is free at the first search.
        first_pass: Precision of the first scores on a device; None for float16 on a GPU and float32 on a CPU.
    """

    block_bytes: int = 128 << 20
    dense_queries: int = 4096
    token_queries: int = 1024
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

Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Rows and scores of one query, best first."""


class Part(Protocol):
    """Some documents in memory, and the queries of the search. A place is a document's position in the part."""

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and places of the k best of each query, (Q, min(k, n)), unordered; minus infinity for excluded documents."""

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        """Scores of all documents for some queries, (len(queries), n)."""

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """Scores of given documents for one query in float64."""


class Walk(Protocol):
    """Documents and queries of one search."""

    def parts(self) -> Iterator[tuple[int, Part]]:
        """Yield all documents in parts, each with the number of its first document."""

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, Part]]:
        """Yield chosen documents in parts, in the order given, each with its number of documents."""


class Scorer(Protocol):
    """Scores the documents of one search for its queries."""

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and rows of the k best documents of every query, (Q, k), best first."""

    def exact(self, wanted: Mapping[int, NDArray[np.int64]]) -> dict[int, NDArray[np.float64]]:
        """Scores in float64 of the wanted documents of each query, in the given order."""

    def reaching(
        self, queries: Sequence[int], thresholds: NDArray[np.float64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """Yield, block by block, each query with documents whose score reaches its threshold, and their scores in float64."""


class InParts:
    """Scores a walk's documents part by part; implements `Scorer`.

    Args:
        walk: Documents and queries.
        group: Queries whose candidates are fetched together.
    """

    def __init__(self, walk: Walk, group: int = LIMITS.queries_rescored) -> None:
        self._walk, self._group = walk, group

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `Scorer`."""
        scores: NDArray[np.float32] | None = None
        for start, part in self._walk.parts():
            some_scores, places = part.nearest(k)
            some_rows = places + start
            if scores is None:
                scores, rows = some_scores, some_rows
                continue
            scores, rows = np.concatenate([scores, some_scores], axis=1), np.concatenate([rows, some_rows], axis=1)
            if scores.shape[1] > k:
                kept = np.argpartition(scores, -k, axis=1)[:, -k:]
                scores, rows = np.take_along_axis(scores, kept, axis=1), np.take_along_axis(rows, kept, axis=1)
        if scores is None:
            raise ValueError("a walk needs at least one part")
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)

    def exact(self, wanted: Mapping[int, NDArray[np.int64]]) -> dict[int, NDArray[np.float64]]:
        """See `Scorer`."""
        exact = {query: np.empty(len(rows), np.float64) for query, rows in wanted.items()}
        chosen = np.unique(np.concatenate([np.zeros(0, np.int64), *wanted.values()]))
        first = 0
        for size, part in self._walk.pick(chosen):
            for query, rows in wanted.items():
                places = np.searchsorted(chosen, rows) - first
                here = (places >= 0) & (places < size)
                if here.any():
                    exact[query][here] = part.exact(query, places[here])
            first += size
        return exact

    def reaching(
        self, queries: Sequence[int], thresholds: NDArray[np.float64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
        """See `Scorer`."""
        for start, part in self._walk.parts():
            for head in range(0, len(queries), self._group):
                some = queries[head : head + self._group]
                near = part.scores(some) >= thresholds[head : head + self._group, None]
                for query, reached in zip(some, near, strict=True):
                    if (places := np.flatnonzero(reached)).size:
                        yield query, places + start, part.exact(query, places)


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
) -> list[Ranked]:
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
        group: Queries whose candidates are fetched together.
    """
    k = min(k, findable)
    if not k:
        return [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in errors]
    fetched = min(findable, k + margin)
    scores, rows = scorer.nearest(fetched)
    cut_off = [query for query in range(len(errors)) if fetched < findable and not is_complete(scores[query], k, errors[query])]
    found = dict[int, Ranked]()
    if cut_off:
        found = {query: (np.empty(0, np.int64), np.empty(0, np.float32)) for query in cut_off}
        for query, some, exact in scorer.reaching(cut_off, scores[cut_off, k - 1] - 2 * errors[cut_off]):
            held, values = found[query]
            found[query] = in_order(np.append(held, some), np.append(values, exact.astype(np.float32)), k, ids=ids)
    rest = [query for query in range(len(errors)) if query not in found]
    for start in range(0, len(rest), group):
        kept = {query: candidates(rows[query], scores[query], k, errors[query]) for query in rest[start : start + group]}
        if all_exact:
            kept = {query: (some, values, np.arange(len(some))) for query, (some, values, _) in kept.items()}
        rescored = scorer.exact({query: documents[doubtful] for query, (documents, _, doubtful) in kept.items()})
        for query, (documents, values, doubtful) in kept.items():
            values[doubtful] = rescored[query]
            found[query] = in_order(documents, values, k, ids=ids)
    return [found[query] for query in range(len(errors))]


def nearest_by_scores(
    part: Part, queries: int, count: int, k: int, *, held: int = LIMITS.scores_held
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Implementation of ``Part.nearest`` that computes all scores.

    Args:
        part: Computes the scores.
        queries: Number of queries Q.
        count: Number of documents n of the part.
        k: Documents per query.
        held: Maximum number of scores in memory.
    """
    group = max(1, held // count)
    found = [_best(part.scores(range(start, min(start + group, queries))), min(k, count)) for start in range(0, queries, group)]
    return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])


def _best(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    places = np.argpartition(scores, -k, axis=1)[:, -k:]
    return np.take_along_axis(scores, places, axis=1), places


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


def token_pieces(offsets: NDArray[np.int64], documents: NDArray[np.intp], size: int) -> Iterator[tuple[int, int]]:
    """Ranges of ``documents`` with at most ``size`` tokens together; each has at least one document."""
    ends = np.cumsum(offsets[documents + 1] - offsets[documents])
    begin = held = 0
    while begin < len(documents):
        end = max(begin + 1, int(np.searchsorted(ends, held + size, side="right")))
        yield begin, end
        begin, held = end, int(ends[end - 1])


def token_rows(offsets: NDArray[np.int64], documents: NDArray[np.intp]) -> NDArray[np.int64]:
    """Rows of all tokens of given documents, document after document.

    Example:
        >>> token_rows(np.array([0, 2, 2, 5]), np.array([2, 0]))
        array([2, 3, 4, 0, 1])
    """
    lengths = offsets[documents + 1] - offsets[documents]
    ends = np.cumsum(lengths)
    rows: NDArray[np.int64] = np.repeat(offsets[documents] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    return rows
