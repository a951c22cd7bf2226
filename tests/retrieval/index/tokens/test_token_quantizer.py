"""Vectors to bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index.kernels.packing import product
from quiver.retrieval.index.quantization import Clustering, cluster, product_quantizer, train_codebooks
from quiver.retrieval.index.tokens.token_quantizer import Bits, Coding, learn_pairs


@pytest.fixture(scope="module")
def tokens(make_collection: Any) -> Any:
    return make_collection(600, width=64)


@pytest.fixture(scope="module")
def clustering(tokens: Any) -> Clustering:
    return cluster(tokens.vectors, tokens.token_ids, count=200, grouping="tokens", seed=0)


def coding_of(tokens: Any, clustering: Clustering, bits: Bits) -> Coding:
    residuals = tokens.vectors - clustering.centroids[clustering.assign(tokens.vectors, tokens.token_ids)]
    products = train_codebooks(residuals, 4)
    residuals -= product(product_quantizer(products).compute_codes(residuals), products)
    return Coding(clustering, products, learn_pairs(residuals, bits, seed=0))


@pytest.mark.parametrize(("bits", "width", "error"), [(2, 18, 0.055), (3, 26, 0.018), (3.5, 30, 0.01), (4, 34, 0.006)])
def test_the_error_is_a_known_part_of_the_residual(tokens: Any, clustering: Clustering, bits: Bits, width: int, error: float) -> None:
    coding = coding_of(tokens, clustering, bits)
    assert coding.bits == bits
    coarse, fine = coding.encode(tokens.vectors, tokens.token_ids)
    assert coarse.shape == (len(tokens.vectors), coding.coarse_width) == (len(tokens.vectors), 64 // 8 + 2)
    assert fine.shape == (len(tokens.vectors), coding.fine_width) == (len(tokens.vectors), width)
    numbers = coding.numbers(coarse)
    np.testing.assert_array_equal(numbers, clustering.assign(tokens.vectors, tokens.token_ids))
    residual = ((tokens.vectors - clustering.centroids[numbers]) ** 2).sum()
    left = ((tokens.vectors - coding.decode(coarse, fine)) ** 2).sum()
    assert left / residual < error


def test_bytes_do_not_depend_on_the_vectors_beside(tokens: Any, clustering: Clustering) -> None:
    coding = coding_of(tokens, clustering, 4)
    coarse, fine = coding.encode(tokens.vectors, tokens.token_ids)
    rows = np.random.default_rng(0).permutation(len(tokens.vectors))[:301]
    part = coding.encode(tokens.vectors[rows], tokens.token_ids[rows])
    np.testing.assert_array_equal(part[0], coarse[rows])
    np.testing.assert_array_equal(part[1], fine[rows])
    for row in range(0, 500, 50):
        single = coding.encode(tokens.vectors[row : row + 1], tokens.token_ids[row : row + 1])
        assert single[0][0].tobytes() + single[1][0].tobytes() == coarse[row].tobytes() + fine[row].tobytes()
