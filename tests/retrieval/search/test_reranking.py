"""Re-ranking: MaxSim by hand, from an index and from texts, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import ranked
from quiver.retrieval.index import IndexReader, build_index
from quiver.retrieval.records import Document, Hits, Role, TokenEncoding
from quiver.retrieval.search.retrievers import Scorer
from quiver.retrieval.search.search import rerank

TEXTS = {f"d{number}": f"word{number % 5} text{number % 7} common" for number in range(20)} | {"empty": ""}
QUERIES = ["word1 common", "text3 word2", "unknown"]
FOUND = Hits.of([{"d1": 3.0, "d6": 2.0, "d2": 1.0, "empty": 0.5}, {key: 1.0 for key in TEXTS if key != "empty"}, {}])


@pytest.fixture
def index(tmp_path: Path, word_by_word: Any) -> IndexReader:
    return build_index([Document(key, text) for key, text in TEXTS.items()], word_by_word, tmp_path / "i")


def read_texts(ids: Iterable[str]) -> Callable[[str], str]:
    return {key: TEXTS[key] for key in ids}.__getitem__


def brute_force(model: Any, query: str, documents: Sequence[str]) -> dict[str, float]:
    (asked,) = model.encode_texts([query], "query").vectors
    scores = {}
    for document in documents:
        (tokens,) = model.encode_texts([TEXTS[document]], "document").vectors
        if len(tokens):
            scores[document] = sum(max(float(token @ vector) for token in tokens) for vector in asked)
    return scores


@pytest.mark.parametrize("stage", ["index", "texts"])
@pytest.mark.parametrize("together", [1, 5, 2048])
def test_scores_of_reranking_are_maxsim(index: IndexReader, word_by_word: Any, stage: str, together: int) -> None:
    scorer = Scorer("tokens", word_by_word, index if stage == "index" else read_texts, texts_per_batch=together)
    hits = rerank(FOUND, QUERIES, scorer, 10)
    assert (len(hits), hits.ids[2]) == (3, [])
    assert "empty" not in hits.ids[0]  # it has no vector
    for row, query in enumerate(QUERIES[:2]):
        found, expected = hits.ranking(row), brute_force(word_by_word, query, FOUND.ids[row])
        # Documents of the same words are tied up to rounding: the scores decide which of them may be there.
        best = sorted(expected.values(), reverse=True)[:10]
        np.testing.assert_allclose(list(found.values()), best, rtol=1e-5)
        for document, score in found.items():
            assert score == pytest.approx(expected[document], rel=1e-5)
        assert list(found) == ranked(found)
    assert len(rerank(FOUND, QUERIES, scorer, 2).ids[1]) == 2


def test_a_candidate_of_several_queries_is_encoded_once(word_by_word: Any) -> None:
    encoded: list[str] = []

    class Counting:
        card = word_by_word.card

        def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
            if role == "document":
                encoded.extend(texts)
            return word_by_word.encode_texts(texts, role, progress=progress)

    Scorer("counting", Counting(), read_texts)(["word1", "word2"], [["d1", "d2"], ["d2", "d3"]])
    assert encoded == [TEXTS["d1"], TEXTS["d2"], TEXTS["d3"]]


def test_a_score_of_nan_is_not_treated_as_a_missing_vector() -> None:
    with pytest.raises(ValueError, match="'d2' has the score NaN"):
        rerank(Hits.of([{"d1": 3.0, "d2": 2.0}]), QUERIES[:1], lambda queries, candidates: [np.array([1.0, np.nan], np.float32)], 3)


def test_candidates_that_cannot_be_reranked_are_refused(index: IndexReader, word_by_word: Any) -> None:
    with pytest.raises(InputError, match="the index has no document 'other'"):
        rerank(Hits.of([{"other": 1.0}]), QUERIES[:1], Scorer("tokens", word_by_word, index), 3)
    left = rerank(Hits.of([{"other": 1.0, "d1": 0.5}]), QUERIES[:1], Scorer("tokens", word_by_word, index, leave_out=True), 3)
    assert left.ids == [["d1"]]
    with pytest.raises(InputError, match="but the model given is"):
        Scorer("tokens", type(word_by_word)("d" * 64), index)
    with pytest.raises(ValueError, match="k must be >= 1"):
        rerank(FOUND, QUERIES, Scorer("tokens", word_by_word, index), 0)
