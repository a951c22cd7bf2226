"""Token pooling by hand, and what it may not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index.tokens.token_quantizer import WINDOW, pool


def test_the_first_vector_stays_and_like_ones_are_merged() -> None:
    turn = np.deg2rad([0, 0, 10, 90, 100])
    vectors = np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
    pooled, lengths, ids = pool(vectors, np.array([5]), np.array([7, 1, 2, 3, 4], np.uint32), factor=2)
    assert lengths.tolist() == [3]
    expected = np.deg2rad([0, 5, 95])
    np.testing.assert_allclose(pooled, np.stack([np.cos(expected), np.sin(expected)], axis=1), atol=1e-6)
    assert ids is not None
    assert ids.tolist() == [7, 1, 3]
    assert pooled.dtype == np.float32
    assert ids.dtype == np.uint32


def test_opposite_vectors_leave_the_first() -> None:
    vectors = np.array([[1, 0], [0, 1], [0, -1]], np.float32)
    pooled, _, _ = pool(vectors, np.array([3]), None, factor=4)
    np.testing.assert_array_equal(pooled, [[1, 0], [0, 1]])


@pytest.mark.parametrize("factor", [1, 2, 3, 100])
def test_documents_keep_their_places_and_one_vector_at_least(make_collection: Any, factor: int) -> None:
    tokens = make_collection(60)
    pooled, lengths, ids = pool(tokens.vectors, tokens.lengths, tokens.token_ids, factor=factor)
    free = tokens.lengths - 1
    expected = np.where(tokens.lengths > 1, 1 + np.maximum(1, free // factor), tokens.lengths)
    assert lengths.tolist() == expected.tolist()
    assert len(pooled) == lengths.sum()
    np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), 1, rtol=1e-6)
    assert ids is not None
    heads = np.cumsum(tokens.lengths) - tokens.lengths, np.cumsum(lengths) - lengths
    for first, kept in zip(heads[0][tokens.lengths > 0], heads[1][tokens.lengths > 0], strict=True):
        np.testing.assert_array_equal(pooled[kept], tokens.vectors[first])
        assert ids[kept] == tokens.token_ids[first]
    if factor == 1:
        np.testing.assert_array_equal(pooled, tokens.vectors)
        np.testing.assert_array_equal(ids, tokens.token_ids)


def test_long_documents_are_pooled_in_pieces() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1 + WINDOW + 301, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pooled, lengths, _ = pool(vectors, np.array([len(vectors)]), None, factor=4)
    assert lengths.tolist() == [1 + WINDOW // 4 + 75]
    head, _, _ = pool(vectors[: 1 + WINDOW], np.array([1 + WINDOW]), None, factor=4)
    np.testing.assert_array_equal(pooled[: len(head)], head)
