"""Centroids in groups: every vector goes to the nearest of its own group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index.quantization import Clustering, Grouping, cluster


@pytest.fixture(scope="module")
def tokens(make_collection: Any) -> Any:
    return make_collection(600)


def nearest(clustering: Clustering, vector: np.ndarray, low: int, high: int) -> int:
    return low + int(((clustering.centroids[low:high] - vector) ** 2).sum(axis=1).argmin())


def test_a_token_has_centroids_of_its_own_and_more_the_more_frequent_it_is(tokens: Any) -> None:
    clustering = cluster(tokens.vectors, tokens.token_ids, count=400, grouping="tokens", seed=0)
    assert clustering.tokens is not None
    ids, counts = np.unique(tokens.token_ids, return_counts=True)
    assert clustering.tokens.tolist() == ids[counts >= 8].tolist()
    budget, sizes = np.diff(clustering.groups), counts[counts >= 8]
    assert budget.min() >= 1
    assert 300 < len(clustering.centroids) < 500
    assert np.corrcoef(budget, sizes**0.75)[0, 1] > 0.97
    found = clustering.assign(tokens.vectors, tokens.token_ids)
    for row in range(0, len(found), 97):
        group = np.flatnonzero(clustering.tokens == tokens.token_ids[row])
        low, high = (clustering.groups[group[0]], clustering.groups[group[0] + 1]) if len(group) else (0, len(clustering.centroids))
        assert found[row] == nearest(clustering, tokens.vectors[row], low, high)
    rare = np.flatnonzero(~np.isin(tokens.token_ids, clustering.tokens))
    assert len(rare)
    assert all(found[row] == nearest(clustering, tokens.vectors[row], 0, len(clustering.centroids)) for row in rare)


def test_without_token_ids_all_centroids_are_compared(tokens: Any) -> None:
    clustering = cluster(tokens.vectors, tokens.token_ids, count=200, grouping="tokens", seed=0)
    found = clustering.assign(tokens.vectors[:50], None)
    assert all(found[row] == nearest(clustering, tokens.vectors[row], 0, len(clustering.centroids)) for row in range(50))


@pytest.mark.parametrize("grouping", ["flat", "two-level"])
def test_the_error_is_that_of_k_means(tokens: Any, grouping: Grouping) -> None:
    few = cluster(tokens.vectors, None, count=20, grouping=grouping, seed=0)
    many = cluster(tokens.vectors, None, count=400, grouping=grouping, seed=0)
    errors = [((tokens.vectors - each.centroids[each.assign(tokens.vectors, None)]) ** 2).sum(axis=1).mean() for each in (few, many)]
    assert errors[1] < 0.75 * errors[0] < 0.75
    assert abs(len(many.centroids) - 400) < 80


@pytest.mark.parametrize("grouping", ["flat", "two-level", "tokens"])
def test_equal_seeds_give_equal_centroids_of_half_precision(tokens: Any, grouping: Grouping) -> None:
    first, second, other = (cluster(tokens.vectors, tokens.token_ids, count=100, grouping=grouping, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.centroids, second.centroids)
    np.testing.assert_array_equal(first.groups, second.groups)
    assert not np.array_equal(first.centroids, other.centroids)
    np.testing.assert_array_equal(first.centroids, first.centroids.astype(np.float16))


@pytest.mark.parametrize("grouping", ["flat", "two-level", "tokens"])
@pytest.mark.parametrize("count", [1, 5, 1000])
def test_fewer_vectors_than_centroids(make_collection: Any, grouping: Grouping, count: int) -> None:
    few = make_collection(3, empty=0)
    clustering = cluster(few.vectors[:5], few.token_ids[:5], count=count, grouping=grouping, seed=0)
    assert 1 <= len(clustering.centroids) <= 5
    assert clustering.groups[0] == 0
    assert clustering.groups[-1] == len(clustering.centroids)
    assert clustering.assign(few.vectors, few.token_ids).max() < len(clustering.centroids)


def test_clustering_by_tokens_needs_them(tokens: Any) -> None:
    with pytest.raises(ValueError, match="needs the token ids"):
        cluster(tokens.vectors, None, count=10, grouping="tokens", seed=0)
    with pytest.raises(ValueError, match="the number of centroids must be >= 1"):
        cluster(tokens.vectors, None, count=0, grouping="flat", seed=0)
