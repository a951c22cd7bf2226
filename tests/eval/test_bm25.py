"""BM25: the formula by hand, the corners of bm25s, and the published floors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.eval.datasets.benchmarks import Policy, cut, depth
from quiver.eval.metrics import score
from quiver.eval.rankers import StreamedWords
from quiver.retrieval.data.corpus import Collection, load_collection
from quiver.retrieval.index.words import BlockLimits
from quiver.retrieval.models.bm25 import split_words
from quiver.retrieval.records import Document, Query


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


def bm25_run(
    collection: Collection, k: int = 1000, policy: Policy | None = None, limits: BlockLimits | None = None
) -> dict[str, dict[str, float]]:
    policy = policy or Policy()
    hits = StreamedWords(policy, collection, limits=limits).search(collection.queries, depth(k, policy))
    return cut(hits.to_run([query.id for query in collection.queries]), k, policy)


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


@pytest.mark.parity
@settings(deadline=None)  # the first example imports bm25s
@given(
    st.lists(
        st.text(st.characters(codec="ascii"))
        | st.lists(st.sampled_from(["The", "owl", "_", "a_1", "x", "Ü", "n't", "東京", "\n"])).map(" ".join)
    )
)
def test_words_of_plain_letters_are_those_of_bm25s(texts: list[str]) -> None:
    bm25s = pytest.importorskip("bm25s")
    theirs = bm25s.tokenize(texts, stopwords="english", stemmer=None, show_progress=False)
    assert split_words(texts) == (theirs.ids, theirs.vocab)


@pytest.mark.parity
def test_the_stop_words_are_those_of_bm25s() -> None:
    stopwords = pytest.importorskip("bm25s.stopwords").STOPWORDS_EN
    assert split_words([" ".join(stopwords), "owl"]).vocabulary == {"owl": 0}


def _all_at_once(collection: Collection) -> dict[str, dict[str, float]]:
    """Every positive score of bm25s itself, which indexes the whole corpus."""
    bm25s = pytest.importorskip("bm25s")
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index(bm25s.tokenize([document.content() for document in collection.documents], show_progress=False), show_progress=False)
    asked = bm25s.tokenize([query.text for query in collection.queries], return_ids=False, show_progress=False)
    ids = [document.id for document in collection.documents]
    scores = [index.get_scores_from_ids(index.get_tokens_ids(words)) for words in asked]
    rows = zip(collection.queries, scores, strict=True)
    return {query.id: {ids[place]: float(row[place]) for place in np.flatnonzero(row)} for query, row in rows}


def _best(scores: dict[str, float], k: int) -> list[str]:
    return sorted(scores, key=lambda document: (scores[document], document), reverse=True)[:k]


def _random_collection() -> Collection:
    """With many ties, empty documents, words that are in no document or in all, and queries with a word twice, unknown or none."""
    rng = np.random.default_rng(5)
    words = np.array([f"word{number}" for number in range(30)])
    texts = [" ".join([*rng.choice(words, rng.integers(1, 5)), "everywhere"]) for _ in range(300)]
    documents = [Document(f"d{place}", text, "the" * (place % 2)) for place, text in enumerate(texts)]
    documents[:3] = documents[150:152] = [Document("e0", ""), Document("e1", "the of"), Document("e2", "?")][:3]
    documents = [Document(f"d{rng.integers(1_000_000)}-{place}", each.text, each.title) for place, each in enumerate(documents)]
    asked = [" ".join(rng.choice(words, 3)) for _ in range(20)]
    queries = [*asked, "word1 word1 word2", "everywhere", "unicorn word3", "unicorn", "the of", ""]
    return _collection(documents, [Query(f"q{place}", text) for place, text in enumerate(queries)])


@pytest.mark.parity
@pytest.mark.parametrize(("documents", "characters"), [(1, 1 << 24), (7, 1 << 24), (100_000, 100), (100_000, 1 << 24)])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_blocks_change_nothing(documents: int, characters: int, k: int) -> None:
    collection = _random_collection()
    expected = _all_at_once(collection)
    run = bm25_run(collection, k=k, limits=BlockLimits(documents, characters))
    assert sum(map(bool, run.values())) >= 23
    assert run.keys() == expected.keys()
    for query, scores in run.items():
        assert list(scores) == _best(expected[query], k)
        np.testing.assert_allclose(list(scores.values()), [expected[query][document] for document in scores], rtol=1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_ties_across_blocks_are_by_id_descending(order: int) -> None:
    documents = [Document(f"d{number}", "same words") for number in (3, 1, 5, 2, 4, 0)][::order]
    assert list(bm25_run(_collection(documents, [Query("q", "same")]), k=3, limits=BlockLimits(2))["q"]) == ["d5", "d4", "d3"]


def test_the_corpus_is_never_held() -> None:
    """Texts count their living fellows: not more than a block of them may be there at once."""
    alive = most = 0

    class Text(str):
        __slots__ = ()

        def __new__(cls, value: str) -> Text:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return super().__new__(cls, value)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

        def strip(self, chars: str | None = None) -> Text:
            return Text(super().strip(chars))

    class Streamed:
        def __iter__(self) -> Iterator[Document]:
            return (Document(f"d{place}", Text(f"word{place % 7} more")) for place in range(500))

        def __len__(self) -> int:
            return 500

    collection = Collection("c", "test", Streamed(), [Query("q", "word3")], {"q": {"d3": 1}}, 0)
    assert len(bm25_run(collection, policy=Policy(use_title=False), limits=BlockLimits(10))["q"]) == 71
    assert 10 <= most <= 30


@pytest.mark.data
@pytest.mark.parametrize(("name", "floor"), [("scifact", 0.657), ("cosqa", 0.284), ("cranfield", 0.464)])
def test_published_floors(quiver_data: Path, name: str, floor: float) -> None:
    collection = load_collection(quiver_data / name, "test")
    assert abs(score(collection.qrels, bm25_run(collection), ["ndcg@10"]).means["ndcg@10"] - floor) <= 0.005
