"""Exact search, recall, nDCG and the check of hits, against plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.eval.bench.index_data import ExactHits, VectorFolder, exact_search, invalid_hits, ndcg, random_order, recall

MakeVectors = Callable[..., VectorFolder]
Scores = Callable[[VectorFolder], np.ndarray]


@pytest.mark.parametrize("dense", [True, False])
def test_exact_search_agrees_with_numpy(make_vectors: MakeVectors, by_the_book: Scores, tmp_path: Path, dense: bool) -> None:
    vectors = make_vectors(dense=dense)
    exact = exact_search(vectors, 5)
    scores = by_the_book(vectors)
    for row, (found, values) in enumerate(zip(exact.rows, exact.scores, strict=True)):
        assert found.tolist() == np.argsort(-scores[row])[:10].tolist()
        assert np.allclose(values, np.sort(scores[row])[::-1][:10], atol=1e-5)
    exact.save(tmp_path / "exact.npz")
    again = ExactHits.load(tmp_path / "exact.npz")
    assert all(np.array_equal(one, other) for one, other in zip(exact.rows + exact.scores, again.rows + again.scores, strict=True))


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("allowed", [1, 7, 39])
def test_exact_search_with_a_filter_agrees_with_numpy(make_vectors: MakeVectors, by_the_book: Scores, dense: bool, allowed: int) -> None:
    vectors = make_vectors(dense=dense)
    forbidden = random_order(40) >= allowed
    scores = np.where(forbidden, -np.inf, by_the_book(vectors))
    exact = exact_search(vectors, 5, allowed=allowed)
    for row, found in enumerate(exact.rows):
        assert found.tolist() == np.argsort(-scores[row])[: min(10, allowed)].tolist()


def test_random_order_is_random_and_reproducible() -> None:
    places = random_order(1_000)
    assert sorted(places.tolist()) == list(range(1_000))
    assert np.array_equal(places, random_order(1_000))
    assert 300 < np.flatnonzero(places < 100).mean() < 700, "not the first ones"


def test_exact_hits_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated run reads the file."""

    def killed(file: Any, **arrays: Any) -> None:
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", killed)
    with pytest.raises(KeyboardInterrupt):
        ExactHits([np.array([1])], [np.ones(1, np.float32)]).save(tmp_path / "exact.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k", [1, 3, 10, 100])
def test_recall_is_the_share_of_the_best_documents(make_vectors: MakeVectors, by_the_book: Scores, k: int) -> None:
    vectors = make_vectors()
    exact, best = exact_search(vectors, 100), np.argsort(-by_the_book(vectors), axis=1)
    generator = np.random.default_rng(8)
    found = [generator.permutation(40)[: min(k, 40)].tolist() for _ in range(6)]
    wanted = [len(set(rows) & set(right[:k].tolist())) / min(k, 40) for rows, right in zip(found, best, strict=True)]
    assert recall(found, exact, k) == pytest.approx(np.mean(wanted))
    assert recall([rows.tolist()[:k] for rows in best], exact, k) == 1
    assert recall([[] for _ in range(6)], exact, k) == 0


def test_tied_documents_are_equally_right() -> None:
    exact = ExactHits([np.array([5, 3, 8, 1])], [np.array([2.0, 1.0, 1.0, 0.5], np.float32)])
    assert recall([[5, 8]], exact, 2) == 1, "8 ties with 3, the second"
    assert recall([[3, 8]], exact, 2) == 1
    assert recall([[8, 3]], exact, 1) == 0
    assert recall([[5, 1]], exact, 2) == 0.5
    assert recall([[3, 8, 5]], exact, 2) == 1, "what comes behind the first two does not count, and cannot count twice"


def test_query_without_findable_documents_does_not_count() -> None:
    exact = ExactHits([np.array([1]), np.array([], np.int64)], [np.ones(1, np.float32), np.ones(0, np.float32)])
    assert recall([[1], []], exact, 10) == 1


def test_ndcg_of_a_ranking(make_vectors: MakeVectors) -> None:
    vectors = make_vectors()
    assert vectors.qrels is not None
    found = [[39, (7 * row) % 40, 38] for row in range(6)]
    assert ndcg(found, vectors, vectors.qrels) == pytest.approx(1 / math.log2(3))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[0, 1]], None),
        ([[]], None),
        ([[2, -1]], "returned row -1, but there are 3 documents"),
        ([[3]], "returned row 3"),
        ([[1, 1]], "returned a document twice"),
        ([[0, 1, 2]], "returned 3 documents, but k is 2"),
        ([[0], [1]], "answered 2 of 1 queries"),
    ],
)
def test_invalid_hits_are_described(found: list[list[int]], message: str | None) -> None:
    told = invalid_hits(found, documents=3, queries=1, k=2)
    assert told is None if message is None else told is not None and message in told
