"""Cosine models whose vectors have any length are searched by cosine, dot-product models by dot product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.records import ModelCard

CARD = ModelCard(source="m", kind="dense", fingerprint="f", dim=2, similarity="cosine", query_length=8, document_length=8)


def test_cosine_scales_to_length_one_and_keeps_zeros() -> None:
    vectors = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]], np.float32)
    np.testing.assert_allclose(comparable(vectors, CARD), [[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]], atol=1e-7)
    assert vectors[0, 0] == 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_does_not_become_zero(bad: float) -> None:
    scaled = comparable(np.array([[bad, 1.0], [0.0, 0.0], [0.0, 2.0]], np.float32), CARD)
    assert not np.isfinite(scaled[0]).all()
    np.testing.assert_array_equal(scaled[1:], [[0.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_lengths_whose_squares_overflow_float32_are_scaled(scale: float) -> None:
    vectors = np.array([[0.6, 0.8], [0.0, -1.0]], np.float32) * np.float32(scale)
    np.testing.assert_allclose(comparable(vectors, CARD), [[0.6, 0.8], [0.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize("similarity", ["dot", "maxsim"])
def test_vectors_of_dot_product_models_are_not_scaled(similarity: str) -> None:
    vectors = np.array([[3.0, 4.0]], np.float32)
    assert comparable(vectors, replace(CARD, similarity=similarity)) is vectors
