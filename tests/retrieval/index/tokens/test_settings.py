"""What is chosen where nobody chooses."""

from __future__ import annotations

import pytest

from quiver.retrieval.index.tokens.settings import default_centroids, default_grouping, preset_params, sample_size


@pytest.mark.parametrize(
    ("vectors", "centroids"), [(1, 4), (100_000, 1024), (282_550, 2048), (2_600_000, 8192), (11_000_000, 16_384), (10**10, 65_536)]
)
def test_centroids_grow_with_the_root_of_the_vectors_up_to_two_bytes(vectors: int, centroids: int) -> None:
    assert default_centroids(vectors) == centroids


def test_large_collections_are_clustered_in_groups() -> None:
    assert default_grouping(999_999, token_ids=True) == "flat"
    assert default_grouping(1_000_000, token_ids=True) == "tokens"
    assert default_grouping(1_000_000, token_ids=False) == "two-level"


def test_a_sample_is_at_most_the_number_of_vectors() -> None:
    assert sample_size(500) == 500
    assert sample_size(900_000) == 131_072
    assert sample_size(10**9) == 32 * 65_536


def test_fast_searches_less_than_balanced_and_exact_is_exhaustive() -> None:
    fast, balanced, exact = (preset_params(name, k=10, vectors=10**6) for name in ("fast", "balanced", "exact"))
    assert (fast.nprobe, fast.tokens_k, fast.candidates) < (balanced.nprobe, balanced.tokens_k, balanced.candidates)
    assert (balanced.exhaustive, exact.exhaustive) == (False, True)
    assert preset_params("balanced", k=1000, vectors=10**6).candidates == 20_000
