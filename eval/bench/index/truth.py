"""What exact search finds, and how much of it others find.

Shapes: Q queries, P documents, k hits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.files import atomic_file
from quiver.eval.bench.index.vectors import DOCUMENTS, VectorFolder, drawn
from quiver.eval.metrics import score
from quiver.retrieval.data.rows import MatrixRows
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.records import ModelCard, Qrels

# Documents whose exact scores are apart by rounding are equally right.
_ROUNDING = 1e-6

NDCG = "ndcg@10"
"""The measure against judgements."""


@dataclass(frozen=True)
class Exact:
    """The best documents of each query by exact search, deeper than what is compared with it.

    Attributes:
        rows: Rows of documents, best first, Q arrays.
        scores: Their scores, Q arrays.
    """

    rows: list[NDArray[np.int64]]
    scores: list[NDArray[np.float32]]


def exact_search(vectors: VectorFolder, depth: int, *, allowed: int | None = None) -> Exact:
    """Score every document for every query in float32; twice the depth, so that all documents that tie at it are known.

    Args:
        vectors: Real ones: nothing is compared with made-up documents.
        depth: The largest k.
        allowed: How many documents, drawn at random, may be found; their vectors are held. None for all.
    """
    matrix, lengths = np.load(vectors.path / DOCUMENTS, mmap_mode="r"), vectors.lengths
    ids = vectors.ids
    numbers = {key: row for row, key in enumerate(ids)}
    if allowed is not None:
        chosen = drawn(len(vectors)) < allowed
        matrix = matrix[np.repeat(chosen, lengths)]
        ids, lengths = [ids[row] for row in np.flatnonzero(chosen).tolist()], lengths[chosen]
    rows, dense = MatrixRows(matrix), vectors.kind == "dense"
    card = ModelCard(str(vectors.path), vectors.kind, "", vectors.dim, "dot" if dense else "maxsim", 0, 0)
    if dense:
        hits = index_vectors(ids, rows, card).search(np.stack(vectors.queries), 2 * depth)
    else:
        hits = index_vectors(ids, rows, card, lengths=lengths).search(vectors.queries, 2 * depth)
    return Exact([np.array([numbers[key] for key in found], np.int64) for found in hits.ids], list(hits.scores))


def recall(found: Sequence[Sequence[int]], exact: Exact, k: int) -> float:
    """Share of the k best documents that is among the first k found, the mean over the queries.

    A document that ties with the k-th best is as good as that one. Where fewer than k documents can be found, those count.

    Args:
        found: Rows of documents of each query, best first.
        exact: What exact search found.
        k: Documents.

    Example:
        >>> truth = Exact([np.array([4, 2, 7])], [np.array([3.0, 2.0, 2.0], np.float32)])
        >>> recall([[4, 7]], truth, 2), recall([[7, 1]], truth, 2)
        (1.0, 0.5)
    """
    shares = []
    for rows, best, scores in zip(found, exact.rows, exact.scores, strict=True):
        wanted = min(k, len(best))
        if not wanted:
            continue
        lowest = float(scores[wanted - 1])
        right = set(best[scores >= lowest - _ROUNDING * max(1.0, abs(lowest))].tolist())
        shares.append(min(wanted, len(right.intersection(rows[:k]))) / wanted)
    return float(np.mean(shares)) if shares else 1.0


def ndcg(found: Sequence[Sequence[int]], vectors: VectorFolder, qrels: Qrels) -> float:
    """nDCG@10 of what was found, against judgements.

    Args:
        found: Rows of documents of each query, best first, ten at least where there are ten.
        vectors: Name the rows and queries.
        qrels: Judgements.
    """
    run: Mapping[str, Mapping[str, float]] = {
        query: {vectors.ids[row]: -float(place) for place, row in enumerate(rows)}
        for query, rows in zip(vectors.query_ids, found, strict=True)
    }
    return score(qrels, run, [NDCG]).means[NDCG]


def fault(found: Sequence[Sequence[int]], *, documents: int, queries: int, k: int) -> str | None:
    """What is wrong with the answer of a search, whatever its quality; None if nothing is.

    Args:
        found: Rows of documents of each query.
        documents: How many there are.
        queries: How many were asked.
        k: Hits that were asked for.

    Example:
        >>> fault([[0, -1]], documents=3, queries=1, k=2)
        'gave the row -1, there are 3 documents'
    """
    if len(found) != queries:
        return f"answered {len(found)} of {queries} queries"
    for rows in found:
        outside = [row for row in rows if not 0 <= row < documents]
        if outside:
            return f"gave the row {outside[0]}, there are {documents:,} documents"
        if len(set(rows)) != len(rows):
            return "gave a document twice"
        if len(rows) > k:
            return f"gave {len(rows)} documents, {k} were asked for"
    return None


def save_exact(exact: Exact, path: Path) -> None:
    """Write what exact search found, whole or not at all: a run that is started again believes it."""
    lengths = np.array([len(rows) for rows in exact.rows], np.int64)
    with atomic_file(path) as file:
        np.savez(file, lengths=lengths, rows=np.concatenate(exact.rows), scores=np.concatenate(exact.scores))


def load_exact(path: Path) -> Exact:
    """Read what `save_exact` wrote."""
    with np.load(path, allow_pickle=False) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        return Exact(np.split(file["rows"], ends), np.split(file["scores"], ends))
