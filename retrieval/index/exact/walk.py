"""Exact search as a walk over parts of the documents, of which one is in memory at a time.

Every part gives its nearest documents to every query; the nearest of all parts are kept, k and a margin. Those whose float32 scores
are too close to tell their order are scored again in float64. Where the margin does not show the end of a tie at the cut, a second
walk looks at everything that may belong above it. The ranking is thus that of exact scores, wherever the borders of the parts are.

The peak is one part and Q x (k + margin) candidates, never the documents nor Q x P scores.

Shapes: Q queries, P documents, n documents of a part, k hits a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.exact.ranking import candidates, in_order, is_complete

MARGIN = 32
"""Documents kept beyond k, so that a tie at the cut is usually seen whole."""

# Queries whose candidates are fetched together: enough to share what is read from the disk, few enough to hold.
_TOGETHER = 32

# Scores of a part that are held at a time where it is not FAISS that finds the best, queries x documents: 32 MiB.
_SCORES = 8 << 20

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
    for start in range(0, len(rest), _TOGETHER):
        kept = {query: candidates(rows[query], scores[query], k, errors[query]) for query in rest[start : start + _TOGETHER]}
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
        for head in range(0, len(queries), _TOGETHER):
            group = queries[head : head + _TOGETHER]
            near = part.scores(group) >= thresholds[head : head + _TOGETHER, None]
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
    group = max(1, _SCORES // count)
    found = [_best(part.scores(range(start, min(start + group, queries))), min(k, count)) for start in range(0, queries, group)]
    return np.concatenate([scores for scores, _ in found]), np.concatenate([places for _, places in found])


def _best(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    places = np.argpartition(scores, -k, axis=1)[:, -k:]
    return np.take_along_axis(scores, places, axis=1), places
