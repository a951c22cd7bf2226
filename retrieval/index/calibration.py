"""Calibration: measured recall and latency of an index at each point of its engine's parameter grid.

The first ten queries run at every point, from the cheapest to the first that finds nearly everything; the other queries run only up to
that point. At least two points beyond the uncalibrated ``balanced`` are measured.

Recall is relative to the index's own ``exact`` search, which scores by the best vectors that the index keeps; the loss of compression is
not included. Queries are timed one at a time with FAISS on one thread; the points alternate, so that other load on the machine slows all of
them alike. Without given queries, pseudo queries are mixed from vectors of the index (`pseudo_queries`).

Shapes: n queries, k hits.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.index.documents import OpenSegment
from quiver.retrieval.index.engines import Setting, named_params, one_thread
from quiver.retrieval.index.index import IndexReader, check_has_vectors
from quiver.retrieval.index.recall_table import Calibration, GridPoint, RecallTable, interval
from quiver.retrieval.records import Hits

MIXED = {"dense": 3, "colbert": 4}
"""Number of documents that a pseudo query is mixed from, by kind of model."""

# Tokens of a pseudo query, about as many as a short question has.
_TOKENS = 24

logger = logging.getLogger(__name__)

QUERIES = 200
"""Default number of queries; it determines a recall of 0.95 to about 0.01."""

HITS = (10, 100)
"""Default numbers of hits to measure."""

LEAST_HITS = max(MIXED.values()) + 1
"""Smallest number of hits that pseudo queries can measure: the documents that a query was mixed from are hits that do not count."""

MIN_SECONDS = 5.0
"""Time limit of calibration in seconds after a fast change; after a slow one it is longer, see `allowed_seconds`."""

# Queries that are searched regardless of the time limit; they also decide which grid points the other queries run at.
_LEAST = 10
# The grid ends at the first point whose recall for the first queries is at least _FOUND, but at least _BEYOND points after ``balanced``.
_FOUND = 0.99
_BEYOND = 2
# Time limit of calibration: this share of the time of the build, and at least MIN_SECONDS.
_SHARE = 0.05
# Only every fourth query is searched for more than the smallest k: such a search takes longer, and its recall varies less between queries.
_EVERY = 4
_PACKAGES = {"quiver": "quiver-retrieval", "faiss": "faiss-cpu", "numpy": "numpy", "numba": "numba"}


@dataclass(frozen=True)
class MeasuredQuery:
    """A query and the documents that it was mixed from."""

    vectors: Any  # the query as Index.search takes it: (1, d) for a dense model, a list with one array (n, d) for a ColBERT model
    sources: frozenset[str]  # ids of the documents that it was mixed from; they do not count as hits. Empty for a real query


def pseudo_queries(segments: Sequence[OpenSegment], kind: str, *, count: int, seed: int) -> list[MeasuredQuery]:
    """Make queries by mixing vectors of documents chosen at random.

    Args:
        segments: Segments of an index; deleted documents and documents without a vector are left out.
        kind: ``dense`` or ``colbert``.
        count: Maximum number of queries; there are never more than documents.
        seed: Random seed; equal segments and seed give equal queries.
    """
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(segment.kept & (segment.vectors.lengths > 0)) for segment in segments]
    begins = np.append(0, np.cumsum([len(each) for each in rows], dtype=np.int64))
    total, made = int(begins[-1]), []
    for _ in range(min(count, total)):
        parts, ids = [], []
        for number in rng.choice(total, min(MIXED[kind], total), replace=False).tolist():
            place = int(np.searchsorted(begins, number, side="right")) - 1
            row = int(rows[place][number - begins[place]])
            parts.append(segments[place].vectors.vectors(np.array([row]))[0])
            ids.append(segments[place].documents.ids.strings[row])
        vectors = np.mean(parts, axis=0) if kind == "dense" else [np.concatenate([_some(part, rng) for part in parts])]
        made.append(MeasuredQuery(vectors, frozenset(ids)))
    return made


def _some(tokens: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Choose some token vectors of one document at random, in their order."""
    size = min(_TOKENS // MIXED["colbert"], len(tokens))
    return tokens[np.sort(rng.choice(len(tokens), size, replace=False))]


def calibrate(
    index: IndexReader,
    *,
    queries: Any | None = None,
    count: int = QUERIES,
    ks: Sequence[int] = HITS,
    seed: int = 0,
    seconds: float | None = None,
    progress: bool = False,
) -> Calibration:
    """Measure recall and latency of an index at the points of its engine's grid; log a warning if the recall of ``balanced`` is low.

    Args:
        index: The index; it is not changed.
        queries: Vectors of real queries, as ``Index.search`` takes them; None mixes pseudo queries from vectors of the index.
        count: Maximum number of queries to search; of more given queries, ``count`` are chosen at random.
        ks: Numbers of hits to measure, at least ``LEAST_HITS`` each for pseudo queries. Only every fourth query measures more than the
            smallest k, because such a search takes longer and its recall varies less between queries.
        seed: Random seed. Equal seeds give equal recall; latency varies between runs.
        seconds: Time limit in seconds: after it no further query is begun, but ten are always searched. None for no limit.
        progress: Show a bar over the queries.

    Raises:
        InputError: There are no queries, no document has a vector, or the index is one of BM25.
        ValueError: ``count`` or ``ks`` is too small, or the queries do not fit the index.
    """
    least = LEAST_HITS if queries is None else 1
    if count < 1 or not ks or min(ks) < least:
        raise ValueError(f"count must be >= 1 and every k >= {least}, got {count} and {list(ks)}")
    check_has_vectors(index, "calibrate; it always searches exhaustively")
    kind = index.manifest.model.kind
    sample = pseudo_queries(index.segments, kind, count=count, seed=seed) if queries is None else _given(queries, kind, count, seed)
    if not sample or not any((segment.kept & (segment.vectors.lengths > 0)).any() for segment in index.segments):
        raise InputError(f"{index.path}: nothing to measure: there are no queries, or no document has a vector")
    ks = sorted(set(ks))
    with one_thread():
        course = _Course(index, ks)
        begun = time.monotonic()
        with progress_bar("calibration", len(sample), enabled=progress) as advance:
            course.climb(sample[:_LEAST], advance)
            for query in sample[_LEAST:]:
                if seconds is not None and time.monotonic() - begun > seconds:
                    break
                course.run(query)
                advance(1)
    logger.info("%s: recall and latency measured with %d queries", index.path, course.queries)
    calibration = Calibration(
        documents=len(index),
        largest=max(len(segment.documents) for segment in index.segments),
        origin="index" if queries is None else "given",
        seed=seed,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        processor=platform.processor() or platform.machine(),
        versions={name: installed_version(package) or "not installed" for name, package in _PACKAGES.items()},
        tables=course.tables(),
    )
    if advice := calibration.advice():
        logger.warning("%s: %s", index.path, advice)
    return calibration


def allowed_seconds(spent: float) -> float:
    """Time limit of calibration in seconds, after a change that took ``spent`` seconds: 5% of that, at least `MIN_SECONDS`.

    As in `calibrate`, no query is begun after the limit, but ten are always searched.
    """
    return max(MIN_SECONDS, _SHARE * spent)


@dataclass
class _Point:
    """One grid point for k hits: its search parameters, and recall and milliseconds of every query searched with them."""

    k: int
    search_params: Mapping[str, Setting]
    recalls: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def point(self, counted: Sequence[int]) -> GridPoint:
        low, high = interval(np.array(self.recalls), np.array(counted))
        return GridPoint(self.search_params, float(np.mean(self.recalls)), low, high, *_percentiles(self.times))


class _Course:
    """Measurements of every grid point, for every number of hits."""

    def __init__(self, index: IndexReader, ks: Sequence[int]) -> None:
        self._index = index
        self._ks = ks
        codec, documents = index.codec, max(len(segment.documents) for segment in index.segments)
        grids = {k: [named_params(point) for point in codec.param_grid(k, documents=documents)] for k in ks}
        self._points = {k: [_Point(k, search_params) for search_params in grids[k][:-1]] for k in ks}
        # Minimum number of grid points that are measured for k hits.
        self._always = {k: grids[k].index(named_params(codec.preset_params("balanced", k=k))) + 1 + _BEYOND for k in ks}
        # The reference for recall. Exhaustive search takes the same time for any k, so it runs once per query, with the largest k.
        self._exact = _Point(ks[-1], grids[ks[-1]][-1])
        self._exact_params = {k: grids[k][-1] for k in ks}
        self._counted: dict[int, list[int]] = {k: [] for k in ks}
        self.queries = 0

    def climb(self, queries: Sequence[MeasuredQuery], advance: Advance) -> None:
        """Search the first queries at each grid point in turn, and drop the points after the first that reaches a recall of `_FOUND`."""
        self._ids(queries[0], self._exact)  # warm-up, not timed
        wanted = []
        for query in queries:
            wanted.append(self._wanted(query))  # takes longer than all other searches for the query
            advance(1)
        for k, points in self._points.items():
            for number, point in enumerate(points, start=1):
                self._ids(queries[0], point)
                for query, best in zip(queries, wanted, strict=True):
                    if k in best:
                        self._measure(query, point, best[k])
                if number >= self._always[k] and np.mean(point.recalls) >= _FOUND:
                    del points[number:]
                    break

    def run(self, query: MeasuredQuery) -> None:
        """Search one query at every grid point, in an order that differs between queries."""
        wanted = self._wanted(query)
        points = [point for k in wanted for point in self._points[k]]
        if points:  # warm-up, not timed: the exhaustive search has evicted the index from the CPU caches
            self._ids(query, points[0])
        for place in np.random.default_rng(self.queries).permutation(len(points)).tolist():
            self._measure(query, points[place], wanted[points[place].k])

    def _wanted(self, query: MeasuredQuery) -> dict[int, set[str]]:
        """Ids that the next query has to find, for each number of hits that it is searched for."""
        ks = self._ks if self.queries % _EVERY == 0 else self._ks[:1]
        begun = time.perf_counter()
        best = self._ids(query, self._exact)
        self._exact.times.append(1000 * (time.perf_counter() - begun))
        # Those that the query was mixed from are left out unless there are no others.
        wanted = {k: set(best[:k]) - query.sources or set(best[:k]) for k in ks}
        for k in ks:
            self._counted[k].append(len(wanted[k]))
        self.queries += 1
        return wanted

    def _measure(self, query: MeasuredQuery, point: _Point, wanted: set[str]) -> None:
        begun = time.perf_counter()
        found = self._ids(query, point)
        point.times.append(1000 * (time.perf_counter() - begun))
        point.recalls.append(len(wanted & set(found)) / len(wanted))

    def _ids(self, query: MeasuredQuery, point: _Point) -> Sequence[str]:
        hits: Hits = self._index.search(query.vectors, point.k, effort=point.search_params)
        return hits.ids[0]

    def tables(self) -> tuple[RecallTable, ...]:
        """The measurements as recall tables."""
        times, tables = _percentiles(self._exact.times), []
        for k, counted in self._counted.items():
            points = [*(point.point(counted) for point in self._points[k]), GridPoint(self._exact_params[k], 1.0, 1.0, 1.0, *times)]
            tables.append(RecallTable(k, len(counted), tuple(points)))
        return tuple(tables)


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    p50, p95 = np.percentile(times, [50, 95]).tolist()
    return p50, p95


def _given(queries: Any, kind: str, count: int, seed: int) -> list[MeasuredQuery]:
    chosen = np.sort(np.random.default_rng(seed).choice(len(queries), min(count, len(queries)), replace=False)).tolist()
    return [MeasuredQuery(queries[number : number + 1] if kind == "dense" else [queries[number]], frozenset()) for number in chosen]
