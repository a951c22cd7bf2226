"""Exact dense search against sorting all float64 inner products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.retrieval.index import IndexReader, exact, index_vectors
from quiver.retrieval.index.ranking import SearchLimits
from quiver.retrieval.records import Hits, MatrixRows, ModelCard


def exact_index(ids: Sequence[str], vectors: NDArray[np.float32]) -> IndexReader:
    return index_vectors(ids, vectors, ModelCard("vectors", "dense", "", vectors.shape[1], "dot", 0, 0))


def unit(seed: int, rows: int, width: int) -> NDArray[np.float32]:
    matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def expected(ids: list[str], vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> list[list[str]]:
    scores = (queries.astype(np.float64) @ vectors.T.astype(np.float64)).astype(np.float32)
    return [[key for _, key in sorted(zip(row.tolist(), ids, strict=True), reverse=True)[:k]] for row in scores]


def check(hits: Hits, ids: list[str], vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> None:
    assert [list(found) for found in hits.ids] == expected(ids, vectors, queries, k)
    for query, found, scores in zip(queries, hits.ids, hits.scores, strict=True):
        assert scores.dtype == np.float32
        rows = [ids.index(key) for key in found]
        np.testing.assert_allclose(scores, vectors[rows] @ query, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [3, 64, 768])
@pytest.mark.parametrize("asked", [1, 7, 60])
@pytest.mark.parametrize("k", [1, 10, 300])
def test_the_order_is_that_of_exact_scores(width: int, asked: int, k: int) -> None:
    ids = [f"d{number}" for number in range(300)]
    vectors, queries = unit(0, 300, width), unit(1, asked, width)
    check(exact_index(ids, vectors).search(queries, k), ids, vectors, queries, k)


def test_copies_of_a_document_tie_although_float32_products_part_them() -> None:
    """FAISS's scores of copies differ by their place in the matrix; the index must not let that decide."""
    rng = np.random.default_rng(4)
    vectors = unit(2, 5003, 768)
    copies = rng.choice(5003, 1500, replace=False)
    vectors[copies] = vectors[copies[0]]
    queries = unit(3, 300, 768)
    queries[:150] = (queries[:150] + vectors[copies[0]]) / 2
    ids = [f"d{number}" for number in range(5003)]
    index = exact_index(ids, vectors)
    for k in (10, 2000):
        assert [list(found) for found in index.search(queries, k).ids] == expected(ids, vectors, queries, k)
    together = index.search(queries, 100)
    alone = [index.search(queries[row : row + 1], 100) for row in range(0, 300, 50)]
    for row, hits in zip(range(0, 300, 50), alone, strict=True):
        assert list(hits.ids[0]) == list(together.ids[row])
    assert all(len(set(scores.tolist())) == 1 for scores in together.scores[:150])


@pytest.mark.parametrize("equal", [5, 40, 200])
@pytest.mark.parametrize("k", [1, 4, 20])
def test_a_tie_across_the_cut_goes_to_the_greater_ids(equal: int, k: int) -> None:
    """Also when it is longer than everything fetched: 200 equal documents are more than k and the margin."""
    ids = [f"d{number}" for number in np.random.default_rng(6).permutation(250)]
    vectors = np.zeros((250, 8), np.float32)
    vectors[:, 1] = np.linspace(-1, 0, 250)
    vectors[100 : 100 + min(equal, 150), 0] = 1.0
    vectors[:50, 0] = 1.0 if equal == 200 else 0.0
    vectors[vectors[:, 0] == 1.0, 1] = 0.0
    queries = np.array([[1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]], np.float32)
    hits = exact_index(ids, vectors).search(queries, k)
    tied = sorted((ids[row] for row in np.flatnonzero(vectors[:, 0])), reverse=True)
    assert len(tied) == equal
    assert list(hits.ids[0])[:equal] == tied[:k]
    assert list(hits.ids[1]) == sorted(ids, reverse=True)[:k]


@pytest.mark.filterwarnings("ignore:overflow")
def test_scores_beyond_float32_are_refused_since_they_have_no_order() -> None:
    vectors = np.array([[3e38, -3e38], [1, 1]], np.float32)
    with pytest.raises(ValueError, match="do not fit into float32"):
        exact_index(["a", "b"], vectors).search(np.array([[3e38, 3e38]], np.float32), 2)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("block", [7, 1000])
def test_with_allowed_rows_it_is_brute_force_over_them(share: float, block: int) -> None:
    """Copies among allowed and hidden rows, ties across the cut, k beyond what may be found."""
    rng = np.random.default_rng(int(share * 100))
    vectors, queries = unit(0, 40, 16)[rng.integers(0, 40, 400)], unit(1, 9, 16)
    allowed = rng.random(400) < share
    ids = np.array([f"d{number}" for number in rng.permutation(400)], object)
    limits = SearchLimits(block_bytes=block * 4 * 16, scores_held=900)
    for k in (1, 10, 500):
        rows = MatrixRows(vectors)
        found = exact.search_exact(rows, None, queries, k, largest_norm=1.0, ids=ids, allowed=allowed, all_exact=True, limits=limits)
        for query, (places, scores) in zip(queries, found, strict=True):
            wanted = vectors[places].astype(np.float64) @ query.astype(np.float64)
            np.testing.assert_array_equal(scores, wanted.astype(np.float32))
        best = expected(ids[allowed].tolist(), vectors[allowed], queries, k)
        assert [ids[rows].tolist() for rows, _ in found] == best
        assert [len(scores) for _, scores in found] == [min(k, int(allowed.sum()))] * 9
