"""Exact MaxSim search against sorting all scores in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import IndexReader, exact, index_vectors
from quiver.retrieval.index.ranking import SearchLimits
from quiver.retrieval.records import Hits, MatrixRows, ModelCard

Tokens = NDArray[np.float32]


def exact_index(ids: Sequence[str], documents: Sequence[Tokens], width: int = 16) -> IndexReader:
    card = ModelCard("vectors", "colbert", "", width, "maxsim", 0, 0)
    return index_vectors(ids, np.concatenate(documents), card, lengths=[len(tokens) for tokens in documents])


def searched(ids: Sequence[str], documents: Sequence[Tokens], queries: Sequence[Tokens], k: int, limits: SearchLimits) -> Hits:
    """Search as `exact_index` does, in parts of given sizes."""
    names, rows = np.array(ids, object), MatrixRows(np.concatenate(documents))
    offsets = np.cumsum([0, *map(len, documents)])
    found = exact.search_exact(rows, offsets, queries, k, largest_norm=exact.largest_norm(rows), ids=names, limits=limits)
    return Hits([names[places].tolist() for places, _ in found], [scores for _, scores in found])


def texts(seed: int, lengths: Sequence[int], width: int = 16) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal((length, width)).astype(np.float32) for length in lengths]
    return [matrix / np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in vectors]


def expected(ids: Sequence[str], documents: Sequence[Tokens], query: Tokens) -> list[tuple[float, str]]:
    scores = [
        (float(np.float32((query.astype(float) @ tokens.astype(float).T).max(axis=1).sum())), key)
        for key, tokens in zip(ids, documents, strict=True)
        if len(tokens)
    ]
    return sorted(scores, reverse=True)


LENGTHS = [3, 0, 1, 40, 0, 7, 200, 2, 9, 0]
IDS = [f"d{number}" for number in range(len(LENGTHS))]


@pytest.mark.parametrize("k", [1, 4, 7, 1000])
def test_the_order_is_that_of_exact_scores_and_empty_documents_are_never_found(k: int) -> None:
    documents, queries = texts(0, LENGTHS), texts(1, [1, 5, 32, 2, 8, 8, 8, 8, 3, 11])
    hits = exact_index(IDS, documents).search(queries, k)
    for query, found, scores in zip(queries, hits.ids, hits.scores, strict=True):
        best = expected(IDS, documents, query)[:k]
        assert list(found) == [key for _, key in best]
        assert len(found) == min(k, 7)
        np.testing.assert_allclose(scores, [score for score, _ in best], rtol=1e-5, atol=1e-5)


def test_copies_tie_at_any_position_and_across_the_cut() -> None:
    lengths = np.random.default_rng(2).integers(1, 60, size=400)
    documents = texts(3, lengths.tolist(), width=128)
    for row in range(0, 400, 3):
        documents[row] = documents[7]
    ids = [f"d{number}" for number in np.random.default_rng(3).permutation(400)]
    queries = [np.concatenate([2 * documents[7], query]) for query in texts(4, [30] * 9, width=128)]
    index = exact_index(ids, documents, width=128)
    whole = index.search(queries, 50)
    for query, found, scores in zip(queries, whole.ids, whole.scores, strict=True):
        best = expected(ids, documents, query)[:50]
        assert list(found) == [key for _, key in best]
        assert len(set(scores.tolist())) < 50
    limits = SearchLimits(tokens_rescored=100, queries=2)
    assert searched(ids, documents, queries, 50, limits).ids == whole.ids


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_names_its_document(bad: float) -> None:
    documents = texts(0, LENGTHS)
    documents[5][6, 1] = bad
    with pytest.raises(InputError, match="document 'd5' is not finite"):
        exact_index(IDS, documents)
    index = exact_index(IDS, texts(0, LENGTHS))
    with pytest.raises(ValueError, match="query 9 is not finite"):
        index.search([*texts(1, [2] * 9), np.full((1, 16), bad, np.float32)], 1)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("block", [5, 1000])
def test_with_allowed_documents_it_is_brute_force_over_them(share: float, block: int) -> None:
    rng = np.random.default_rng(int(share * 100))
    documents = [texts(0, [1, 3, 0, 8, 20])[kind] for kind in rng.integers(0, 5, 120)]  # many copies, and some empty
    queries = texts(1, [1, 5, 12])
    ids = np.array([f"d{number}" for number in rng.permutation(120)], object)
    allowed = rng.random(120) < share
    offsets = np.cumsum([0, *map(len, documents)])
    limits = SearchLimits(block_bytes=block * 4 * 16, tokens_rescored=50)
    for k in (1, 10, 500):
        rows = MatrixRows(np.concatenate(documents))
        found = exact.search_exact(rows, offsets, queries, k, largest_norm=1.0, ids=ids, allowed=allowed, limits=limits)
        for query, (places, scores) in zip(queries, found, strict=True):
            kept = np.flatnonzero(allowed)
            best = expected(ids[kept].tolist(), [documents[row] for row in kept], query)[:k]
            assert ids[places].tolist() == [key for _, key in best]
            np.testing.assert_allclose(scores, [score for score, _ in best], rtol=1e-5, atol=1e-5)
