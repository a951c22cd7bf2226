"""Exact search on a device against the same search on the host, bit for bit; PyTorch's CPU stands for the device unless a GPU is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quiver.retrieval.index import exact, index_vectors
from quiver.retrieval.index.engines import Found
from quiver.retrieval.index.on_device import DeviceScorer, place
from quiver.retrieval.index.ranking import FirstPass, SearchLimits
from quiver.retrieval.records import MatrixRows, ModelCard

CPU = torch.device("cpu")
FIRST_PASSES: tuple[FirstPass, ...] = ("float32", "bfloat16", "float16")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=GPU)]
IN_MEMORY = 1 << 40
CARD = ModelCard("vectors", "dense", "", 256, "dot", 0, 0)


@dataclass
class Data:
    """Documents and queries; with ``lengths``, token vectors."""

    vectors: NDArray[np.float32]
    queries: Any
    lengths: NDArray[np.int64] | None = None
    allowed: NDArray[np.bool_] | None = None

    @property
    def offsets(self) -> NDArray[np.int64] | None:
        return None if self.lengths is None else np.append(0, np.cumsum(self.lengths))

    def search(self, k: int, limits: SearchLimits, device: torch.device | None = None) -> list[Found]:
        """Search on a device, or on the host. After a first pass in half precision, all scores are float64 without being asked for."""
        rows = MatrixRows(self.vectors)
        count = len(self.vectors) if self.lengths is None else len(self.lengths)
        ids = np.random.default_rng(0).permutation(count).astype(np.uint32)
        options: dict[str, Any] = {"largest_norm": exact.largest_norm(rows), "ids": ids, "allowed": self.allowed}
        options["all_exact"] = limits.first_pass in (None, "float32")
        options |= {"limits": limits, "placed": None if device is None else place(rows, device, limits)}
        return exact.search_exact(rows, self.offsets, self.queries, k, **options)

    def scorer(self, limits: SearchLimits, device: torch.device = CPU) -> DeviceScorer:
        rows = MatrixRows(self.vectors)
        return DeviceScorer(
            place(rows, device, limits),
            self.queries,
            self.offsets,
            documents=len(self.vectors) if self.lengths is None else len(self.lengths),
            largest_norm=exact.largest_norm(rows),
            limits=limits,
        )


def unit(seed: int, rows: int, width: int) -> NDArray[np.float32]:
    matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def dense(count: int = 700, width: int = 64, *, distinct: int | None = None) -> Data:
    """Documents, of which several are equal if there are fewer distinct ones, and queries."""
    vectors = unit(0, distinct or count, width)
    if distinct is not None:
        vectors = vectors[np.random.default_rng(1).integers(0, distinct, count)]
    return Data(vectors, np.concatenate([unit(2, 30, width), vectors[:5], np.zeros((1, width), np.float32)]))


def tokens(count: int = 200, width: int = 24, *, distinct: int | None = None) -> Data:
    """As `dense`; every fifth document has no vector."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 30, count)
    lengths[::5] = 0
    each = np.split(unit(4, int(lengths.sum()), width), np.cumsum(lengths)[:-1])
    if distinct is not None:
        each = [each[row] for row in rng.integers(0, distinct, count)]
        lengths = np.array([len(matrix) for matrix in each])
    queries = [*np.split(unit(5, 60, width), [1, 3, 20, 52, 59]), 3 * each[1]]
    return Data(np.concatenate(each), queries, lengths)


def equal(found: Sequence[Found], expected: Sequence[Found]) -> None:
    assert len(found) == len(expected)
    for (rows, scores), (best, values) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(rows, best)
        np.testing.assert_array_equal(scores, values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first_pass", FIRST_PASSES)
@pytest.mark.parametrize("data", [dense(), dense(distinct=6), tokens(), tokens(distinct=8)], ids=["dense", "ties", "tokens", "token ties"])
@pytest.mark.parametrize("k", [1, 10, 150])
def test_rankings_and_scores_are_those_of_the_host(device: torch.device, first_pass: FirstPass, data: Data, k: int) -> None:
    """Resident and streamed, in blocks and groups of queries that split both; ties longer than everything that is retrieved."""
    if device.type == "cuda" and first_pass == "float32":
        pytest.skip("not offered on a GPU")
    expected = data.search(k, SearchLimits())
    small = SearchLimits(block_bytes=4 * 64 * 90, device_scores=800, tokens_rescored=50, queries_rescored=4, first_pass=first_pass)
    for limits in (SearchLimits(first_pass=first_pass), small, replace(small, device_bytes=0), replace(small, device_bytes=IN_MEMORY)):
        equal(data.search(k, limits, device), expected)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.6])
@pytest.mark.parametrize("data", [dense(distinct=60), tokens(distinct=20)], ids=["dense", "tokens"])
def test_only_allowed_documents_are_found(share: float, data: Data) -> None:
    count = len(data.vectors) if data.lengths is None else len(data.lengths)
    filtered = replace(data, allowed=np.random.default_rng(6).random(count) < share)
    expected = filtered.search(20, SearchLimits())
    for budget in (0, IN_MEMORY):
        limits = SearchLimits(block_bytes=4 * 64 * 90, device_bytes=budget, first_pass="float16")
        equal(filtered.search(20, limits, CPU), expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 300.0, 1e15])
@pytest.mark.parametrize("data", [dense(), tokens()], ids=["dense", "tokens"])
def test_lengths_beyond_float16_are_scaled(scale: float, data: Data) -> None:
    """Also if queries and documents have different lengths, and if one document is far longer than all others."""
    vectors = data.vectors * np.float32(scale)
    for scaled in (replace(data, vectors=vectors), replace(data, vectors=np.concatenate([vectors[:-1], 1000 * vectors[-1:]]))):
        equal(scaled.search(10, SearchLimits(first_pass="float16"), CPU), scaled.search(10, SearchLimits()))


def test_vectors_of_length_zero_have_the_score_zero() -> None:
    data = replace(dense(50), vectors=np.zeros((50, 64), np.float32))
    equal(data.search(10, SearchLimits(first_pass="float16"), CPU), data.search(10, SearchLimits()))


def test_scores_beyond_float32_are_refused() -> None:
    data = replace(dense(), vectors=dense().vectors * np.float32(1e38), queries=dense().queries * np.float32(1e3))
    with pytest.raises(ValueError, match="do not fit into float32"):
        data.search(3, SearchLimits(), CPU)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first_pass", ["bfloat16", "float16"])
@pytest.mark.parametrize("longest", [1.0, 40.0])
@pytest.mark.parametrize("data", [dense(400, 768), tokens(300, 128)], ids=["dense", "tokens"])
def test_the_first_scores_are_within_their_bound(device: torch.device, first_pass: FirstPass, longest: float, data: Data) -> None:
    """Also for values that float16 stores as subnormal numbers, and not by a wide margin: the worst error is no small part of the bound."""
    vectors = data.vectors.copy()
    vectors[:, 5:] *= np.float32(1e-5)  # 1e-5 is a subnormal number of float16
    for each in (data.vectors, vectors):
        scaled = replace(data, vectors=each / np.float32(np.linalg.norm(each, axis=1).max()) * np.float32(longest))
        scorer = scaled.scorer(SearchLimits(first_pass=first_pass, device_bytes=IN_MEMORY), device)
        count = int((np.ones(len(each)) if data.lengths is None else data.lengths > 0).sum())
        scores, rows = scorer.nearest(count)
        exact_scores = scorer.exact(dict(enumerate(rows)))
        shares = []
        for query, error in enumerate(scorer.errors.tolist()):
            found, reference = scores[query].astype(np.float64), exact_scores[query]
            scales = np.median(found[np.abs(found) > 1e-3] / reference[np.abs(found) > 1e-3]) if np.abs(found).max() > 1e-3 else 1.0
            power = 2.0 ** np.round(np.log2(scales)) if scales > 0 else 1.0
            worst = np.abs(found - power * reference).max()
            assert worst <= error
            shares.append(worst / error)
        assert max(shares) > 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["dense", "tokens"])
def test_a_search_of_vectors_that_do_not_fit_takes_little_memory(kind: str) -> None:
    """Over 300 MiB of vectors in blocks of 8 MiB: two blocks, a copy in half precision, scores, and the candidates in float64."""
    data = dense(400_000, 256) if kind == "dense" else tokens(27_000, 256)
    limits = SearchLimits(block_bytes=8 << 20, device_scores=1 << 20, device_bytes=0, tokens_rescored=8192, queries_rescored=8)
    dense(100, 256).search(5, limits, torch.device("cuda"))  # memory of cuBLAS, which stays
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = data.search(50, limits, torch.device("cuda"))
    assert data.vectors.nbytes > 300 << 20
    assert torch.cuda.max_memory_allocated() - before < 100 << 20
    equal(found, data.search(50, SearchLimits()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_vectors_that_fit_stay_on_the_gpu_until_the_index_is_gone() -> None:
    dense(100, 256).search(5, SearchLimits(), torch.device("cuda"))  # memory of cuBLAS, which stays
    before, data = torch.cuda.memory_allocated(), dense(60_000, 256)
    index = index_vectors([f"d{number}" for number in range(60_000)], data.vectors, CARD, device=torch.device("cuda"))
    first = index.search(data.queries, 10)
    held = torch.cuda.memory_allocated() - before
    assert data.vectors.nbytes <= held < 1.1 * data.vectors.nbytes + (8 << 20)
    assert index.search(data.queries, 10).ids == first.ids
    assert torch.cuda.memory_allocated() - before == held
    del index, first  # hits read their documents from the index
    assert torch.cuda.memory_allocated() - before < 8 << 20


def test_an_index_searches_on_the_device_that_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    """``meta`` stands for a GPU that is not there: what is searched on it fails, and FAISS searches where it did."""
    caplog.set_level("INFO", logger="quiver.retrieval.index.index")
    data, card = dense(), ModelCard("vectors", "dense", "", 64, "dot", 0, 0)
    ids = [f"d{number}" for number in range(700)]
    index = index_vectors(ids, data.vectors, card)
    expected = index.search(data.queries, 5)
    assert index.search_on(CPU).search(data.queries, 5).ids == expected.ids
    assert not caplog.messages
    with pytest.raises(NotImplementedError):
        index.search_on(torch.device("meta")).search(data.queries, 5)
    assert caplog.messages[0].endswith("the engine exact-dense searches on meta")
    assert index.search_on(CPU).search(data.queries, 5).ids == expected.ids
    lists = index_vectors(ids, data.vectors, card, engine="ivf-dense").search_on(torch.device("meta"))
    assert caplog.messages[-1].endswith("the engine ivf-dense searches on cpu")
    assert len(lists.search(data.queries, 5)) == len(data.queries)
