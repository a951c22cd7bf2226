"""Exact rankings from float32 scores: ties are found and broken by document id, wherever the documents are stored.

Matrix products round the same inner product differently at different positions of the matrix: with FAISS and 300 queries of width 768,
copies of one document got different scores for most queries. Scores that are too close to order in float32 are therefore computed again
in float64 and rounded once. Equal vectors then have equal scores, and a ranking depends neither on how many queries are searched
together nor on the number of threads.

`search_walk` searches the documents block by block, one block in memory at a time. Each block returns its nearest documents for every
query; the k best of all blocks and a margin are kept. If the margin does not contain the end of a tie at position k, a second pass reads
every document whose score may reach the k best. Peak memory: one block and Q x (k + margin) candidates.

Shapes: Q queries, P documents, n documents of a block, k hits, d width.
Source of the error bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 3.1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.records import Rows

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


def in_order(
    rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, *, ids: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Order rows by score and then by document id, both descending; return the first k rows and their scores.

    Args:
        rows: Rows of the index.
        scores: Their scores; equal scores are ties.
        k: Maximum number of rows to return.
        ids: Document ids of all rows of the index, or their ranks.
    """
    order = np.argsort(-scores, kind="stable")
    if len(order) > k:  # sort a tie at the cut completely, but nothing below it
        order = order[: np.searchsorted(-scores[order], -scores[order[k - 1]], side="right")]
    rows, scores = rows[order], scores[order]
    if (scores[:-1] == scores[1:]).any():
        named: list[tuple[float, Any, int]] = sorted(zip(scores.tolist(), ids[rows].tolist(), rows.tolist(), strict=True), reverse=True)
        rows = np.array([row for _, _, row in named], np.int64)
    return rows[:k], scores[:k]


def check_k(k: SupportsIndex) -> int:
    """Convert the number of hits, such as a NumPy integer, to ``int``, which FAISS requires.

    Raises:
        TypeError: k is not an integer.
        ValueError: k < 1.
    """
    hits = operator.index(k)
    if hits < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    return hits


MARGIN = 32
"""Documents retrieved in addition to k, so that the end of a tie at the cut is usually among them."""

# Queries whose candidates are fetched together: many enough to share disk reads, few enough to limit memory.
QUERIES_RESCORED = 32

# Maximum number of scores of a part in memory if FAISS does not select the best, queries x documents: 32 MiB.
SCORES_HELD = 8 << 20

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


def search_walk(
    walk: Walk, k: int, *, findable: int, errors: NDArray[np.float64], ids: NDArray[Any], all_exact: bool = False
) -> list[Ranked]:
    """The k best documents of every query, by score and then by document id, both descending.

    Args:
        walk: Computes scores in float32 with an error of at most ``errors``, and in float64.
        k: Hits per query, at least 1.
        findable: Number of documents whose score is not minus infinity.
        errors: Bound on the error of a score for each query, (Q,).
        ids: Document ids, or their ranks, (P,).
        all_exact: Compute every returned score in float64 and round it once, not only those that are too close to a neighbour. A score
            then does not depend on the other documents, and results of several indexes can be merged.
    """
    k = min(k, findable)
    if not k:
        return [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in errors]
    fetched = min(findable, k + MARGIN)
    scores, rows = _nearest(walk, fetched)
    cut_off = [query for query in range(len(errors)) if fetched < findable and not is_complete(scores[query], k, errors[query])]
    found = _second_walk(walk, cut_off, k, thresholds=scores[cut_off, k - 1] - 2 * errors[cut_off], ids=ids) if cut_off else {}
    rest = [query for query in range(len(errors)) if query not in found]
    for start in range(0, len(rest), QUERIES_RESCORED):
        kept = {query: candidates(rows[query], scores[query], k, errors[query]) for query in rest[start : start + QUERIES_RESCORED]}
        if all_exact:
            kept = {query: (some, values, np.arange(len(some))) for query, (some, values, _) in kept.items()}
        exact = _rescored(walk, {query: rows[doubtful] for query, (rows, _, doubtful) in kept.items()})
        for query, (documents, values, doubtful) in kept.items():
            values[doubtful] = exact[query]
            found[query] = in_order(documents, values, k, ids=ids)
    return [found[query] for query in range(len(errors))]


def _nearest(walk: Walk, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores and rows of the k best documents of every query, (Q, k), best first."""
    scores: NDArray[np.float32] | None = None
    for start, part in walk.parts():
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


def _rescored(walk: Walk, wanted: dict[int, NDArray[np.int64]]) -> dict[int, NDArray[np.float64]]:
    """Scores of the wanted documents of each query in float64, in the given order."""
    exact = {query: np.empty(len(rows), np.float64) for query, rows in wanted.items()}
    chosen = np.unique(np.concatenate([np.zeros(0, np.int64), *wanted.values()]))
    first = 0
    for size, part in walk.pick(chosen):
        for query, rows in wanted.items():
            places = np.searchsorted(chosen, rows) - first
            here = (places >= 0) & (places < size)
            if here.any():
                exact[query][here] = part.exact(query, places[here])
        first += size
    return exact


def _second_walk(walk: Walk, queries: list[int], k: int, *, thresholds: NDArray[np.float64], ids: NDArray[Any]) -> dict[int, Ranked]:
    """Rank the documents of some queries by scoring every document whose float32 score reaches the threshold in float64."""
    best = {query: (np.empty(0, np.int64), np.empty(0, np.float32)) for query in queries}
    for start, part in walk.parts():
        for head in range(0, len(queries), QUERIES_RESCORED):
            group = queries[head : head + QUERIES_RESCORED]
            near = part.scores(group) >= thresholds[head : head + QUERIES_RESCORED, None]
            for query, reached in zip(group, near, strict=True):
                if (places := np.flatnonzero(reached)).size:
                    rows, scores = best[query]
                    rows, scores = np.append(rows, places + start), np.append(scores, part.exact(query, places).astype(np.float32))
                    best[query] = in_order(rows, scores, k, ids=ids)
    return best


def nearest_by_scores(part: Part, queries: int, count: int, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Implementation of ``Part.nearest`` that computes all scores.

    Args:
        part: Computes the scores.
        queries: Number of queries Q.
        count: Number of documents n of the part.
        k: Documents per query.
    """
    group = max(1, SCORES_HELD // count)
    found = [_best(part.scores(range(start, min(start + group, queries))), min(k, count)) for start in range(0, queries, group)]
    return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])


def _best(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    places = np.argpartition(scores, -k, axis=1)[:, -k:]
    return np.take_along_axis(scores, places, axis=1), places


ROWS = 8192
"""Rows of a matrix that are checked in one step, so that a check never copies the complete matrix."""

BLOCK_BYTES = 128 << 20
"""Maximum size in bytes of the vectors that a search reads from disk at a time."""


def first_bad_row(rows: Rows) -> int | None:
    """Number of the first row with a NaN or infinity, or None."""
    for start, block in rows.blocks(ROWS):
        bad = ~np.isfinite(block).all(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def largest_norm(rows: Rows) -> float:
    """Length of the longest row; not finite if a row is not, or if a length overflows float32."""
    largest = np.float32(0)
    for _, block in rows.blocks(ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.linalg.norm(block, axis=1).max())
    return float(largest)


def block_rows(dim: int) -> int:
    """Number of rows of width d in a block of 128 MiB."""
    return max(1, BLOCK_BYTES // (4 * dim))


def check_new_ids(ids: Sequence[str], count: int) -> None:
    """Check that ids are unique and that there are ``count`` of them.

    Raises:
        InputError: There are no documents, or an id is repeated.
        ValueError: The number of ids is wrong.
    """
    if len(ids) != count:
        raise ValueError(f"{len(ids)} ids for the vectors of {count} documents")
    if not count:
        raise InputError("an index needs at least one document, got none")
    seen: set[str] = set()
    for key in ids:
        if key in seen:
            raise InputError(f"document id '{key}' occurs twice; ids must be unique")
        seen.add(key)
