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
from quiver.retrieval.protocols import Rows

_UNIT_ROUNDOFF = 2.0**-24
_LARGEST = float(np.finfo(np.float32).max)


def float32_error(terms: int, magnitude: float) -> float:
    """Bound on the error of a float32 sum of products, whatever the order of summation.

    Args:
        terms: Number of roundings on the way to one score.
        magnitude: Bound on the sum of the products' absolute values, such as the product of two lengths.

    Returns:
        The bound, with room for rounding the exact score to float32 once more.

    Raises:
        ValueError: The scores may exceed float32, where infinities and NaN have no order.
    """
    if not magnitude < _LARGEST:
        raise ValueError(f"scores up to {magnitude:.3g} do not fit into float32; the vectors are too long")
    return (terms + 2) * _UNIT_ROUNDOFF * magnitude


def is_complete(scores: NDArray[np.float32], k: int, error: float) -> bool:
    """Whether documents that were not retrieved, none scoring above the last, cannot belong to the k best.

    Args:
        scores: Scores of the documents retrieved, best first, more than k.
        k: Number of hits wanted.
        error: Bound on the error of a score.
    """
    return bool(scores[k - 1] - scores[-1] > 2 * error)


def candidates(
    rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, error: float
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.intp]]:
    """Those of some rows that may belong to the k best.

    Args:
        rows: Rows of the index; all that may belong to the k best must be among them.
        scores: Their scores, with an error of at most ``error``.
        k: Hits wanted, 1 <= k <= number of rows.
        error: Bound on the error of a score.

    Returns:
        Rows and scores, best first, and the places of those whose scores are too close to another to tell the order.
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
    """The first k rows by score and then by document id, both descending, with their scores.

    Args:
        rows: Rows of the index.
        scores: Their scores: what is equal is a tie.
        k: Hits wanted; fewer are given where there are fewer rows.
        ids: Document ids of all rows of the index, or numbers in the order of the ids.
    """
    order = np.argsort(-scores, kind="stable")
    if len(order) > k:  # a tie at the cut is sorted whole, what is below it is not
        order = order[: np.searchsorted(-scores[order], -scores[order[k - 1]], side="right")]
    rows, scores = rows[order], scores[order]
    if (scores[:-1] == scores[1:]).any():
        named: list[tuple[float, Any, int]] = sorted(zip(scores.tolist(), ids[rows].tolist(), rows.tolist(), strict=True), reverse=True)
        rows = np.array([row for _, _, row in named], np.int64)
    return rows[:k], scores[:k]


def check_k(k: SupportsIndex) -> int:
    """The number of hits as an ``int``, whichever integer it was, such as NumPy's: FAISS takes no other.

    Raises:
        TypeError: It is no integer.
        ValueError: k < 1.
    """
    hits = operator.index(k)
    if hits < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    return hits


MARGIN = 32
"""Documents kept beyond k, so that a tie at the cut is usually seen whole."""

# Queries whose candidates are fetched together: enough to share what is read from the disk, few enough to hold.
QUERIES_RESCORED = 32

# Scores of a part that are held at a time where it is not FAISS that finds the best, queries x documents: 32 MiB.
SCORES_HELD = 8 << 20

Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Rows and scores of one query, best first."""


class Part(Protocol):
    """Some documents in memory, and the queries of the walk. A place is a document's number in the part."""

    def nearest(self, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and places of each query's k best, (Q, min(k, n)) in any order; minus infinity for what cannot be found."""

    def scores(self, queries: Sequence[int]) -> NDArray[np.float32]:
        """Scores of all documents for some queries, (len(queries), n)."""

    def exact(self, query: int, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """Scores of some documents for one query in float64."""


class Walk(Protocol):
    """Documents and queries of one search."""

    def parts(self) -> Iterator[tuple[int, Part]]:
        """All documents in parts, each with the number of its first document."""

    def pick(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, Part]]:
        """Chosen documents in parts, in the order given, each with the number of documents in it."""


def search_walk(
    walk: Walk, k: int, *, findable: int, errors: NDArray[np.float64], ids: NDArray[Any], all_exact: bool = False
) -> list[Ranked]:
    """The k best documents of every query, by score and then by document id, both descending.

    Args:
        walk: Gives scores in float32 with an error of at most ``errors``, and in float64.
        k: Hits a query, at least 1.
        findable: Number of documents whose score is not minus infinity.
        errors: For each query the bound on the error of a score, (Q,).
        ids: Document ids, or numbers in the order of the ids, (P,).
        all_exact: Give every score as float64 rounded once, not only those that are too close to another: a document's score is then the
            same in whichever company it is searched, and results of several indexes can be merged.
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
    """Query -> its documents' scores in float64, in the order of the documents given."""
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
    """Query -> its ranking, by looking at every document whose float32 score reaches the threshold."""
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
    """What ``nearest`` of a part gives, from all its scores.

    Args:
        part: Gives the scores.
        queries: Number of queries Q.
        count: Number of documents n of the part.
        k: Documents a query.
    """
    group = max(1, SCORES_HELD // count)
    found = [_best(part.scores(range(start, min(start + group, queries))), min(k, count)) for start in range(0, queries, group)]
    return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])


def _best(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    places = np.argpartition(scores, -k, axis=1)[:, -k:]
    return np.take_along_axis(scores, places, axis=1), places


ROWS = 8192
"""Rows of a matrix that are looked at in one step, so that a check never copies the matrix."""

BLOCK_BYTES = 128 << 20
"""Vectors that a search holds at a time where they are not in memory."""


def first_bad_row(rows: Rows) -> int | None:
    """Number of the first row that holds a NaN or an infinity, or None."""
    for start, block in rows.blocks(ROWS):
        bad = ~np.isfinite(block).all(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def largest_norm(rows: Rows) -> float:
    """Length of the longest row; not finite where a row is not, or where a length does not fit into float32."""
    largest = np.float32(0)
    for _, block in rows.blocks(ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.linalg.norm(block, axis=1).max())
    return float(largest)


def block_rows(dim: int) -> int:
    """Rows of one block of a walk over vectors of width d: 128 MiB of them."""
    return max(1, BLOCK_BYTES // (4 * dim))


def check_new_ids(ids: Sequence[str], count: int) -> None:
    """Refuse ids that cannot name ``count`` documents.

    Raises:
        InputError: There are no documents, or an id is there twice.
        ValueError: The numbers of ids and of documents differ.
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
