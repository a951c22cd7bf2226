"""The compiled loops against NumPy, and against what their results may not depend on."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.retrieval.index.kernels import compiled
from quiver.retrieval.index.kernels.packing import cells, decode, lanes
from quiver.retrieval.index.tokens.token_quantizer import SIZES, Bits, learn_pairs

reference = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("reference.py"))))


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", SIZES)
@pytest.mark.parametrize("rounds", [1, 2])
def test_codes_and_scales_are_the_same_to_the_last_bit(bits: Bits, rounds: int) -> None:
    residuals = normal(500, 40) * np.logspace(-6, 3, 500, dtype=np.float32)[:, None]
    residuals[3] = 0
    residuals[4, 1:] = 0
    codebook = learn_pairs(normal(500, 40, seed=1), bits, seed=0)
    table = codebook, cells(codebook), rounds
    codes, scales = compiled.quantise(residuals, *table)
    np.testing.assert_array_equal(codes, reference.quantise(residuals, *table)[0])
    np.testing.assert_array_equal(scales, reference.quantise(residuals, *table)[1])
    assert scales[3] == 0
    assert (scales >= 0).all()
    # No other scale has a smaller error with these codes.
    decoded = codebook[codes].reshape(500, 40).astype(float)
    for factor in (0.999, 1.001):
        better = ((residuals - scales[:, None] * decoded) ** 2).sum(axis=1)
        worse = ((residuals - factor * scales[:, None] * decoded) ** 2).sum(axis=1)
        assert (better <= worse).all()


def test_the_nearest_centroid_of_a_range() -> None:
    vectors, centroids = normal(300, 24), normal(70, 24, seed=1)
    rng = np.random.default_rng(2)
    first = np.sort(rng.integers(0, 60, 300))
    last = first + np.where(rng.random(300) < 0.5, 1 + first % 10, 70 - first)
    halves = (centroids**2).sum(axis=1) / 2
    distances = ((vectors[:, None] - centroids) ** 2).sum(axis=2)
    inside = (np.arange(70) >= first[:, None]) & (np.arange(70) < last[:, None])
    expected = np.where(inside, distances, np.inf).argmin(axis=1)
    for module in (compiled, reference):
        np.testing.assert_array_equal(module.nearest(vectors, first, last, lanes(centroids), halves), expected)


@pytest.mark.parametrize(("tokens", "centroids", "count"), [(1, 1, 1), (7, 40, 40), (13, 200, 16), (32, 1000, 1)])
def test_the_centroids_to_probe(tokens: int, centroids: int, count: int) -> None:
    query, table = normal(tokens, 24), normal(centroids, 24, seed=1)
    products = query.astype(float) @ table.astype(float).T
    for module in (compiled, reference):
        found, values, similarities = module.probe(query, lanes(table), centroids, count)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(np.argsort(-products, axis=1)[:, :count], axis=1))
        np.testing.assert_allclose(values, np.take_along_axis(products, found, axis=1), rtol=1e-4, atol=1e-5)
        side_by_side = similarities.transpose(0, 2, 1).reshape(-1, centroids)
        np.testing.assert_allclose(side_by_side[:tokens], products, rtol=1e-4, atol=1e-5)
        assert not side_by_side[tokens:].any()


def coded(bits: Bits, number_bytes: int, width: int = 32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Random bytes that stand for tokens, with scales as they may be: zero, subnormal and normal."""
    rng = np.random.default_rng(7)
    numbers = rng.integers(0, 50, 500).astype(f"<u{number_bytes}").view(np.uint8).reshape(500, -1)
    scales = np.abs(rng.standard_normal(500) * 10.0 ** rng.integers(-8, 1, 500)).astype("<f2")
    scales[0] = 0
    coarse = np.concatenate([rng.integers(0, 256, (500, width // 8)).astype(np.uint8), numbers], axis=1)
    fine = np.concatenate(
        [rng.integers(0, 256, (500, round(width * bits / 8))).astype(np.uint8), scales.view(np.uint8).reshape(500, 2)], axis=1
    )
    return coarse, fine


def tables(
    query: NDArray[np.float32], centroids: NDArray[np.float32], products: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Similarities of a query with centroids and with codewords, as the loops take them."""
    similarities = reference.probe(query, lanes(centroids), len(centroids), 1)[2]
    parts = lanes(query).reshape(-1, len(products), 4, 16)  # (L, d / 4, 4, 16)
    return similarities, np.ascontiguousarray(np.einsum("bcj,gbjt->gbct", products, parts))


@pytest.mark.parametrize("bits", SIZES)
@pytest.mark.parametrize("number_bytes", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_scores_are_those_of_decoded_vectors(bits: Bits, number_bytes: int, tokens: int) -> None:
    coarse, fine = coded(bits, number_bytes)
    shared = normal(50, 32), normal(8, 16, 4, seed=1), normal(round(4**bits), 2, seed=2)
    begins = np.array([0, 490, 20, 20, 33, 7])
    ends = np.array([5, 500, 20, 26, 133, 8])
    query = normal(tokens, 32, seed=3)
    asked = tables(query, *shared[:2])[0], *shared[1:], lanes(query)
    scores = compiled.score(coarse, fine, begins, ends, *asked)
    vectors = decode(coarse, fine, *shared).astype(float)
    expected = [(query @ vectors[b:e].T).max(axis=1).sum() if e > b else -np.inf for b, e in zip(begins, ends, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(reference.score(coarse, fine, begins, ends, *asked), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [8, 24, 64, 136])
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_estimates_are_scores_of_the_coarse_parts(width: int, tokens: int) -> None:
    coarse, fine = coded(4, 2, width)
    shared = normal(50, width), normal(width // 4, 16, 4, seed=1)
    begins, ends = np.array([0, 490, 20, 20, 33, 7]), np.array([5, 500, 20, 26, 133, 8])
    query = normal(tokens, width, seed=3)
    asked = tables(query, *shared)
    estimates = compiled.estimate(coarse, begins, ends, *asked)
    np.testing.assert_array_equal(estimates, reference.estimate(coarse, begins, ends, *asked))
    fine[:, -2:] = 0  # no scale: the fine part adds nothing
    exact = compiled.score(coarse, fine, begins, ends, asked[0], shared[1], normal(256, 2, seed=2), lanes(query))
    # Each of 1 + d / 4 entries is off by half a step at most, and the greatest sum is 32,000 steps.
    step = (np.abs(asked[0]).max() + np.abs(asked[1]).max(axis=(0, 2, 3)).sum()) / 32_000
    assert np.abs(estimates[exact > -np.inf] - exact[exact > -np.inf]).max() <= tokens * (1 + width / 4) / 2 * step
    assert estimates[2] == -np.inf
    assert np.ptp(exact[exact > -np.inf]) > 100 * tokens * step  # it says something


@pytest.mark.parametrize("length", [1e-37, 1e30, np.inf])
def test_estimates_of_queries_whose_steps_float32_cannot_hold(length: float) -> None:
    coarse, _ = coded(4, 2)
    similarities, table = tables(normal(3, 32), normal(50, 32), normal(8, 16, 4, seed=1))
    begins, ends = np.array([0, 4, 9]), np.array([4, 4, 12])
    with np.errstate(over="ignore", invalid="ignore"):
        asked = similarities * np.float32(length), table * np.float32(length)
    scores = compiled.estimate(coarse, begins, ends, *asked)
    np.testing.assert_array_equal(scores, reference.estimate(coarse, begins, ends, *asked))
    assert scores[1] == -np.inf
    assert np.isnan(scores[[0, 2]]).all() == (length == np.inf)
    if length == 1e-37:
        assert not scores[[0, 2]].any()
    elif length == 1e30:
        np.testing.assert_allclose(scores[[0, 2]], 1e30 * compiled.estimate(coarse, begins, ends, similarities, table)[[0, 2]], rtol=1e-3)


def test_estimates_by_hand() -> None:
    similarities = np.array([[0.9, 0.8, 0.5], [0.7, 0.4, 0], [0, 0, 0]], np.float32)
    rows = np.array([[4, 4, 2], [2, 9, -1], [-1, -1, -1]])
    for module in (compiled, reference):
        found, scores = module.aggregate(similarities, rows, 0.0)
        # What the first token did not meet scores at most 0.5 with it, the second 0.4; the third met nothing.
        assert found.tolist() == [4, 2, 9]
        np.testing.assert_allclose(scores, [0.9 + 0.4, 0.5 + 0.7, 0.5 + 0.4], rtol=1e-6)
        # A quarter of the range below these: 0.4 and 0.325.
        np.testing.assert_allclose(module.aggregate(similarities, rows, 0.25)[1], [0.9 + 0.325, 0.5 + 0.7, 0.4 + 0.4], rtol=1e-6)


@pytest.mark.parametrize("code", [np.int8, np.int16])
@pytest.mark.parametrize("width", [1, 7, 64, 384])
def test_inner_products_with_codes(code: type[np.signedinteger[Any]], width: int) -> None:
    rng = np.random.default_rng(width)
    largest = np.iinfo(code).max
    codes = rng.integers(-largest, largest + 1, (50, width), code)
    codes.setflags(write=False)  # as they are mapped
    scales, weights = rng.random(50, np.float32), rng.standard_normal(width)
    rows = rng.permutation(50)[:20]
    found = compiled.inner_products(codes, scales, rows, weights, 0.25)
    wanted = [sum(int(c) * w for c, w in zip(codes[row].tolist(), weights, strict=True)) * float(scales[row]) + 0.25 for row in rows]
    scale = largest * float(np.abs(weights).sum())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14 * scale)
    np.testing.assert_allclose(reference.inner_products(codes, scales, rows, weights, 0.25), wanted, rtol=0, atol=1e-14 * scale)
    for place, row in enumerate(rows):  # whatever stands beside it
        assert compiled.inner_products(codes, scales, rows[place : place + 1], weights, 0.25)[0] == found[place], row
    assert len(compiled.inner_products(codes, scales, rows[:0], weights, 0.25)) == 0


@pytest.mark.parametrize("k", [1, 2, 10, 63, 64, 65, 200])
@pytest.mark.parametrize("values", [1, 3, 1_000_000])
def test_the_best_in_order_and_of_equal_ones_the_greater_rank(k: int, values: int) -> None:
    rng = np.random.default_rng(k)
    for n in (0, 1, 2, 64):
        scores = rng.integers(-values, values, n).astype(np.float32)
        scores[rng.random(n) < 0.1] = -np.inf
        ranks, rows = rng.permutation(100).astype(np.uint32), rng.permutation(100)[:n]
        wanted = [place for _, _, place in sorted(zip(scores.tolist(), ranks[rows].tolist(), range(n), strict=True), reverse=True)][:k]
        scores[np.isinf(scores) & (rng.random(n) < 0.5)] = np.nan  # as a damaged index has it; counts as what was there
        assert compiled.best(scores, rows, ranks, k).tolist() == reference.best(scores, rows, ranks, k).tolist() == wanted


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("width", [2, 14, 64, 100, 384, 768])
def test_the_nearest_have_the_scores_that_they_have_alone(bits: int, width: int) -> None:
    """To the last bit: a search that looks at some documents and one that looks at all must agree.

    The halves of a product cancel each other but for its roundings, so that another order of summation shows.
    """
    rng = np.random.default_rng(width)
    half = rng.integers(-127, 128, (500, width // 2))
    codes = np.concatenate([half, half], axis=1).astype(f"i{bits // 8}")
    large = rng.normal(size=width // 2) * 1e14
    scales, weights = rng.random(500).astype(np.float32), np.concatenate([large, rng.normal(size=width // 2) - large])
    ranks, rows = rng.permutation(500).astype(np.uint32), rng.permutation(500)[:300]
    for array in (codes, scales):
        array.setflags(write=False)  # as they are mapped
    for k in (1, 10, 300, 1000):
        found, scores, least = compiled.nearest_of(codes, scales, rows, weights, 0.25, ranks, k)
        alone = compiled.inner_products(codes, scales, rows, weights, 0.25).astype(np.float32)
        order = reference.best(alone, rows, ranks, k)
        assert found.tolist() == rows[order].tolist()
        assert scores.tolist() == alone[order].tolist()
        assert least == alone.min()
        few = compiled.nearest_of(codes, scales, rows[40:47], weights, 0.25, ranks, k)
        assert few[1].tolist() == np.sort(alone[40:47])[::-1][:k].tolist()
    weights = rng.normal(size=width)
    slow, fast = (module.nearest_of(codes, scales, rows, weights, 0.25, ranks, 10) for module in (reference, compiled))
    assert slow[0].tolist() == fast[0].tolist()
    np.testing.assert_allclose(np.append(slow[1], slow[2]), np.append(fast[1], fast[2]), rtol=1e-6)
    scales = scales.copy()
    scales[rows[5]] = np.nan
    for module in (compiled, reference):
        found, scores, least = module.nearest_of(codes, scales, rows, weights, 0.25, ranks, 300)
        assert np.isnan(scores[-1])
        assert found[-1] == rows[5]
        assert least == pytest.approx(scores[-2])
        empty = module.nearest_of(codes, scales, rows[:0], weights, 0.25, ranks, 10)
        assert (len(empty[0]), len(empty[1]), empty[2]) == (0, 0, np.inf)


@pytest.mark.parametrize("points", [1, 2, 9, 60])
def test_clusters_are_those_of_ward(points: int) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    vectors = normal(points, 12, seed=points).astype(float)
    distances = ((vectors[:, None] - vectors) ** 2).sum(axis=2)
    for clusters in {1, max(1, points // 2), max(1, points // 3), points}:
        labels = compiled.ward(distances.copy(), clusters)
        np.testing.assert_array_equal(labels, reference.ward(distances.copy(), clusters))
        assert len(np.unique(labels)) == clusters
        if points > 1:
            peer = hierarchy.fcluster(hierarchy.linkage(vectors, "ward"), clusters, "maxclust")
            assert ((labels[:, None] == labels) == (peer[:, None] == peer)).all()


@pytest.mark.parametrize("module", [reference, compiled])
def test_a_document_with_a_centroid_that_does_not_exist_has_no_score(module: Any) -> None:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 5, (12, 8 // 8 + 2)).astype(np.uint8)
    coarse[:, 2] = 0
    coarse[5, 1:] = 0xFF  # 65,535 of 5
    fine = rng.integers(0, 50, (12, 8 * 4 // 8 + 2)).astype(np.uint8)
    products, query = rng.standard_normal((2, 16, 4)).astype(np.float32), lanes(rng.standard_normal((3, 8)).astype(np.float32))
    similarities, table = rng.standard_normal((1, 5, 16)).astype(np.float32), rng.standard_normal((1, 2, 16, 16)).astype(np.float32)
    begins, ends = np.array([0, 4, 8, 12]), np.array([4, 8, 12, 12])
    for scores in (
        module.score(coarse, fine, begins, ends, similarities, products, rng.standard_normal((256, 2)).astype(np.float32), query),
        module.estimate(coarse, begins, ends, similarities, table),
    ):
        assert np.isnan(scores).tolist() == [False, True, False, False]
        assert scores[3] == -np.inf
