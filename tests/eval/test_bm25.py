"""BM25: the formula by hand, the corners of bm25s, and the published floors."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from encoder.errors import InputError
from eval.bm25 import bm25_run
from eval.metrics import score
from retrieval.corpus import Collection, load_collection
from retrieval.records import Document, Query


def _collection(documents: list[Document], queries: list[Query]) -> Collection:
    return Collection("hand", "test", documents, queries, {query.id: {documents[0].id: 1} for query in queries}, 0)


ANIMALS = _collection(
    [Document("d1", "cat cat dog"), Document("d2", "dog bird"), Document("d3", "fish", "cat"), Document("d4", "bird bird bird worm")],
    [Query("q1", "the cat dog"), Query("q2", "bird"), Query("q3", "unicorn"), Query("q4", "of the")],
)


def _by_hand(term_counts: dict[str, int], length: int, frequencies: dict[str, int], mean_length: float, documents: int) -> float:
    norm = 0.9 * (1 - 0.4 + 0.4 * length / mean_length)
    idf = {term: math.log(1 + (documents - df + 0.5) / (df + 0.5)) for term, df in frequencies.items()}
    return sum(idf[term] * count / (count + norm) for term, count in term_counts.items())


def test_scores_are_lucenes() -> None:
    run = bm25_run(ANIMALS)
    mean = (3 + 2 + 2 + 4) / 4
    frequencies = {"cat": 2, "dog": 2}
    expected = {
        "d1": _by_hand({"cat": 2, "dog": 1}, 3, frequencies, mean, 4),
        "d2": _by_hand({"dog": 1}, 2, frequencies, mean, 4),
        "d3": _by_hand({"cat": 1}, 2, frequencies, mean, 4),
    }
    assert run["q1"].keys() == expected.keys()
    np.testing.assert_allclose([run["q1"][document] for document in expected], list(expected.values()), rtol=1e-6)


def test_documents_without_a_common_term_stay_out() -> None:
    run = bm25_run(ANIMALS)
    assert run.keys() == {"q1", "q2", "q3", "q4"}
    assert set(run["q2"]) == {"d2", "d4"}
    assert run["q3"] == run["q4"] == {}


def test_titles_are_part_of_the_text_unless_they_are_not() -> None:
    assert set(bm25_run(ANIMALS, use_title=True)["q1"]) == {"d1", "d2", "d3"}
    assert set(bm25_run(ANIMALS, use_title=False)["q1"]) == {"d1", "d2"}


def test_ties_at_the_cut_are_by_id_descending() -> None:
    documents = [Document(f"d{number}", "same words") for number in (3, 1, 5, 2, 4)]
    assert list(bm25_run(_collection(documents, [Query("q", "same")]), k=2)["q"]) == ["d5", "d4"]


def test_the_query_itself_is_dropped_before_the_cut() -> None:
    documents = [Document("a", "red red red"), Document("b", "red blue"), Document("c", "red blue green")]
    collection = _collection(documents, [Query("a", "red")])
    assert list(bm25_run(collection, k=2, exclude_self=False)["a"]) == ["a", "b"]
    assert list(bm25_run(collection, k=2, exclude_self=True)["a"]) == ["b", "c"]


@pytest.mark.parametrize("texts", [["", ""], ["the of", "and"], ["?", "!"]])
def test_a_collection_without_words_finds_nothing(texts: list[str]) -> None:
    documents = [Document(f"d{place}", text) for place, text in enumerate(texts)]
    assert bm25_run(_collection(documents, [Query("q", "word")])) == {"q": {}}


def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k must be >= 1"):
        bm25_run(ANIMALS, k=0)


def test_a_missing_bm25s_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(InputError, match=r"quiver-retrieval\[eval\]"):
        bm25_run(ANIMALS)


@pytest.mark.parity
def test_equal_to_bm25s_own_retrieval() -> None:
    bm25s = pytest.importorskip("bm25s")
    rng = np.random.default_rng(3)
    words = np.array([f"word{number}" for number in range(50)])
    documents = [Document(f"d{place:03d}", " ".join(rng.choice(words, rng.integers(5, 40)))) for place in range(200)]
    queries = [Query(f"q{place}", " ".join(rng.choice(words, 4))) for place in range(20)]
    run = bm25_run(_collection(documents, queries), k=10)
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index(bm25s.tokenize([document.text for document in documents], show_progress=False), show_progress=False)
    asked = bm25s.tokenize([query.text for query in queries], show_progress=False)
    _, theirs = index.retrieve(asked, k=10, show_progress=False)
    ours = np.array([list(run[query.id].values()) for query in queries])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.data
@pytest.mark.parametrize(("name", "floor"), [("scifact", 0.657), ("cosqa", 0.284), ("cranfield", 0.464)])
def test_published_floors(quiver_data: Path, name: str, floor: float) -> None:
    collection = load_collection(quiver_data / name, "test")
    assert abs(score(collection.qrels, bm25_run(collection), ["ndcg@10"]).means["ndcg@10"] - floor) <= 0.005
