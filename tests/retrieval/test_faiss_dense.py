"""FAISS behind our search: with everything probed it is exact, and what FAISS gets wrong does not leave the module."""

from __future__ import annotations

import logging

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import ExactDenseIndex, FaissDenseIndex
from quiver.retrieval.index.dense import factory
from quiver.retrieval.index.faiss_dense import FaissKind, check_factory
from quiver.retrieval.protocols import MatrixRows
from quiver.retrieval.records import Hits

WIDTH = 32
IDS = [f"d{number}" for number in np.random.default_rng(7).permutation(3000)]


def unit(seed: int, rows: int) -> NDArray[np.float32]:
    matrix = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


VECTORS, QUERIES = unit(0, 3000), unit(1, 40)


def build(kind: str, rows: int = 3000) -> FaissDenseIndex:
    return FaissDenseIndex.from_rows(IDS[:rows], MatrixRows(VECTORS[:rows]), kind)


def overlap(hits: Hits, k: int = 10) -> float:
    exact = ExactDenseIndex.from_vectors(IDS, VECTORS).search(QUERIES, k)
    return float(np.mean([len({*found[:k]} & {*wanted}) / k for found, wanted in zip(hits.ids, exact.ids, strict=True)]))


@pytest.mark.parametrize("kind", ["Flat", "IVF16,Flat?nprobe=16", "RR32,IVF16,Flat?nprobe=16", "IVF16_HNSW8,Flat?nprobe=16"])
def test_with_everything_probed_it_is_exact(kind: str) -> None:
    index, exact = build(kind), ExactDenseIndex.from_vectors(IDS, VECTORS)
    for k in (1, 10, 100):
        ours, wanted = index.search(QUERIES, k), exact.search(QUERIES, k)
        if not kind.startswith("RR"):
            assert [list(found) for found in ours.ids] == [list(found) for found in wanted.ids]
        assert overlap(ours, k) > 0.999
        np.testing.assert_allclose(np.array(ours.scores), np.array(wanted.scores), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("HNSW16,Flat?efSearch=200", 0.95),
        ("SQ8", 0.95),
        ("PQ16np", 0.6),
        ("IVF16,PQ16np?nprobe=16", 0.6),
        ("RR32,IVF16,PQ16np?nprobe=16", 0.6),
        ("IVF16,PQ16x4fs,RFlat?nprobe=16&k_factor=8", 0.9),
        ("IVF16_HNSW8,SQ8?nprobe=16&quantizer_efSearch=32", 0.95),
    ],
)
def test_every_family_finds_most_of_what_exact_search_finds(kind: str, least: float) -> None:
    index = build(kind)
    hits = index.search(QUERIES, 10)
    assert overlap(hits) >= least
    for found, scores in zip(hits.ids, hits.scores, strict=True):
        assert len(found) == len(set(found)) == len(scores) == 10
        assert (np.diff(scores) <= 0).all()
    settings = {name: float(value) for name, value in (part.split("=") for part in kind.partition("?")[2].split("&") if part)}
    assert dict(index.parameters) == {"factory": kind.partition("?")[0], **index.parameters, **settings, "seed": 0}
    assert index.nbytes == faiss.serialize_index(index._index).nbytes
    assert (index.kind, len(index), index.dim, list(index.ids)) == ("faiss-dense", 3000, WIDTH, IDS)


def test_a_setting_matters_and_does_not_stick() -> None:
    narrow, wide = build("IVF64,Flat"), build("IVF64,Flat?nprobe=64")
    assert narrow.parameters["nprobe"] == 1  # FAISS's own value is stated too
    assert overlap(narrow.search(QUERIES, 10)) < 0.6 < overlap(wide.search(QUERIES, 10)) == 1.0
    inner = faiss.extract_index_ivf(wide._index)
    assert inner.nprobe == 1
    graph = build("HNSW8,Flat?efSearch=500")
    assert overlap(build("HNSW8,Flat?efSearch=10").search(QUERIES, 10)) < overlap(graph.search(QUERIES, 10))
    assert faiss.downcast_index(graph._index).hnsw.efSearch == 16


@pytest.mark.parametrize("kind", ["Flat", "IVF64,Flat?nprobe=2", "IVF16,PQ8x4fs?nprobe=1", "HNSW8,Flat"])
def test_no_row_below_zero_leaves(kind: str) -> None:
    """Where the lists probed hold fewer than k documents FAISS fills up with -1, which numpy would take for the last document."""
    index = build(kind, rows=1000)
    hits = index.search(QUERIES, 5000)
    for query, found, scores in zip(QUERIES, hits.ids, hits.scores, strict=True):
        assert len(found) == len(set(found)) == len(scores) <= 1000
        assert np.isfinite(scores).all()
        assert scores.min() > -1.5, query
    counts = [len(found) for found in hits.ids]
    assert counts == [1000] * 40 if kind == "Flat" else min(counts) < 1000
    assert len(index.search(QUERIES[:0], 5)) == 0


def test_equal_scores_are_in_the_order_of_the_ids() -> None:
    vectors = VECTORS[:300].copy()
    vectors[::10] = vectors[0]
    for kind in ("Flat", "IVF4,Flat?nprobe=4"):
        index = FaissDenseIndex.from_rows(IDS[:300], MatrixRows(vectors), kind)
        tied = sorted(IDS[:300:10], reverse=True)
        for k in (1, 5, 30):
            found = index.search(vectors[:1], k).ids[0]
            assert list(found) == tied[:k]


def test_training_is_the_same_in_every_run_and_takes_a_sample(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(factory, "_TRAINING", 1000)
    with caplog.at_level(logging.INFO, logger="retrieval"):
        one, other = build("IVF8,PQ8np?nprobe=2"), build("IVF8,PQ8np?nprobe=2")
    assert [record.getMessage() for record in caplog.records] == ["index 'IVF8,PQ8np': training on 1000 of 3000 vectors"] * 2
    np.testing.assert_array_equal(faiss.serialize_index(one._index), faiss.serialize_index(other._index))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="retrieval"):
        build("IVF32,Flat")
    assert "training on 2048 of 3000" in caplog.text  # 64 a list


def test_polysemous_codes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = MatrixRows(VECTORS[:300, :4].copy())
    for kind, warned in (("PQ1x4", True), ("IVF4,PQ1x4", True), ("PQ1x4np", False)):
        caplog.clear()
        FaissDenseIndex.from_rows(IDS[:300], rows, kind)
        assert ("takes minutes; with 'np' behind PQ it does not" in caplog.text) is warned


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Nonsense", "index 'Nonsense': FAISS cannot make it for width 32 (could not parse index string Nonsense); see its index factory"),
        ("", "index '': FAISS cannot make it for width 32"),
        ("PQ33np", "index 'PQ33np': FAISS cannot make it for width 32"),
        ("LSH", "index 'LSH': FAISS cannot make it for width 32"),
        ("HNSW8,PQ8", "index 'HNSW8,PQ8': it cannot rank by inner product; choose another"),
        ("HNSW8,Flat?nprobe=4", "index 'HNSW8,Flat': 'nprobe' is no setting of its search; it takes efSearch"),
        (
            "IVF8_HNSW8,Flat?efSearch=4",
            "index 'IVF8_HNSW8,Flat': 'efSearch' is no setting of its search; it takes nprobe, quantizer_efSearch",
        ),
        ("IVF8,Flat?nprobe=1.5", "index 'IVF8,Flat': nprobe must be a whole number, got 1.5"),
        *(
            (f"IVF8,Flat?{text}", f"index 'IVF8,Flat?{text}': {part!r} is not a setting; write each once, as in IVF1024,Flat?nprobe=16")
            for text, part in [
                ("", ""),
                ("nprobe", "nprobe"),
                ("nprobe=", "nprobe="),
                ("=4", "=4"),
                ("nprobe=0", "nprobe=0"),
                ("nprobe=-1", "nprobe=-1"),
                ("nprobe=nan", "nprobe=nan"),
                ("nprobe=inf", "nprobe=inf"),
                ("nprobe=4&nprobe=4", "nprobe=4"),
                ("nprobe=4,efSearch=4", "nprobe=4,efSearch=4"),
            ]
        ),
    ],
)
def test_what_is_no_index_is_said_in_one_line(kind: str, message: str) -> None:
    for call in (lambda: build(kind), lambda: check_factory(kind, WIDTH)):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


def test_what_cannot_be_built_is_said_in_one_line() -> None:
    for kind, rows, message in (
        ("IVF64,Flat", 50, "index 'IVF64,Flat': FAISS cannot train it on 50 vectors"),
        ("PQ8np", 100, "index 'PQ8np': FAISS cannot train it on 100 vectors"),
        ("IDMap,Flat", 50, "index 'IDMap,Flat': FAISS cannot add vectors to it"),
    ):
        with pytest.raises(InputError) as caught:
            build(kind, rows=rows)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert ".cpp" not in str(caught.value)
    broken = VECTORS[:50].copy()
    broken[30, 3] = np.nan
    with pytest.raises(InputError, match=f"document '{IDS[30]}' is not finite"):
        FaissDenseIndex.from_rows(IDS[:50], MatrixRows(broken), "Flat")
    with pytest.raises(InputError, match="'a' is there twice"):
        FaissDenseIndex.from_rows(["a", "a"], MatrixRows(VECTORS[:2]), "Flat")
    with pytest.raises(InputError, match="at least one document"):
        FaissDenseIndex.from_rows([], MatrixRows(VECTORS[:0]), "Flat")


def test_what_cannot_be_searched_is_refused() -> None:
    index = build("Flat", rows=10)
    with pytest.raises(ValueError, match="k must be >= 1"):
        index.search(QUERIES, 0)
    with pytest.raises(ValueError, match=r"shape \(Q, 32\)"):
        index.search(QUERIES[:, :5], 1)
    with pytest.raises(ValueError, match="query 0 is not finite"):
        index.search(np.full((1, WIDTH), np.nan, np.float32), 1)


def test_a_kind_is_read_back() -> None:
    assert FaissKind.parse("Flat") == FaissKind("Flat", {})
    assert FaissKind.parse("IVF8,PQ4,RFlat?nprobe=3&k_factor=1.5") == FaissKind("IVF8,PQ4,RFlat", {"nprobe": 3.0, "k_factor": 1.5})
