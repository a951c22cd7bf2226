"""Cosine models whose vectors have any length are searched by cosine, dot-product models by dot product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from retrieval.records import ModelCard
from retrieval.similarity import comparable

CARD = ModelCard(source="m", kind="dense", fingerprint="f", dim=2, similarity="cosine", query_length=8, document_length=8)


def test_cosine_scales_to_length_one_and_keeps_zeros() -> None:
    vectors = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 2.0]], np.float32)
    np.testing.assert_allclose(comparable(vectors, CARD), [[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]], atol=1e-7)
    assert vectors[0, 0] == 3.0


@pytest.mark.parametrize("similarity", ["dot", "maxsim"])
def test_other_similarities_take_vectors_as_they_are(similarity: str) -> None:
    vectors = np.array([[3.0, 4.0]], np.float32)
    assert comparable(vectors, replace(CARD, similarity=similarity)) is vectors
