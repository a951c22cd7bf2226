"""Quiver models in BEIR's EvaluateRetrieval: encoded for its own search, and searched with Quiver's indexes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.eval.baselines import DenseRetriever, IndexRetriever
from quiver.eval.metrics import score
from quiver.retrieval.records import DenseEncoding, ModelCard, Role

evaluation = pytest.importorskip("beir.retrieval.evaluation")
dense_search = pytest.importorskip("beir.retrieval.search.dense")
pytestmark = pytest.mark.parity

CORPUS = {
    "d1": {"title": "Wings", "text": "a bird has two wings and flies"},
    "d2": {"title": "Fish", "text": " a fish swims in the deep sea "},
    "d3": {"text": "granite is a hard stone"},
    "d4": {"title": "", "text": "birds and fish are animals"},
    "d5": {"title": "Sea", "text": "the sea is deep and salt"},
    "q2": {"title": "Deep", "text": "deep sea fish"},
}
QUERIES = {"q1": "bird wings", "q2": "deep sea fish", "q3": "granite"}
QRELS = {"q1": {"d1": 2, "d4": 1}, "q2": {"d2": 1, "d5": 2, "d3": 0}, "q3": {"d3": 1}}


class Scaled:
    """The vectors of another model, longer for longer texts, so that cosine and dot product differ."""

    def __init__(self, model: Any, similarity: Any) -> None:
        self.model = model
        self.card = ModelCard(f"scaled {similarity}", "dense", ("2" if similarity == "dot" else "3") * 64, model.card.dim, similarity, 8, 8)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        encoding: DenseEncoding = self.model.encode_texts(texts, role)
        lengths = np.array([[1 + len(text)] for text in texts], np.float32)
        return DenseEncoding(encoding.vectors * lengths, encoding.tokens)


def agree(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]], *, within: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for query, documents in expected.items():
        assert found[query].keys() == documents.keys()
        for document, value in documents.items():
            assert found[query][document] == pytest.approx(value, rel=1e-5, abs=within)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_index_retriever_agrees_with_beirs_exact_search(model: Any, similarity: str) -> None:
    scaled = Scaled(model, similarity)
    function = {"cosine": "cos_sim", "dot": "dot"}[similarity]
    exact = dense_search.DenseRetrievalExactSearch(DenseRetriever(scaled), show_progress_bar=False)
    theirs = evaluation.EvaluateRetrieval(exact, score_function=function)
    corpus, queries = copy.deepcopy(CORPUS), dict(QUERIES)
    ours = evaluation.EvaluateRetrieval(IndexRetriever(scaled))
    found = ours.retrieve(corpus, queries)
    agree(found, theirs.retrieve(CORPUS, QUERIES))
    assert "q2" not in found["q2"]
    assert (corpus, queries) == (CORPUS, QUERIES)
    ndcg, _, _, _ = ours.evaluate(QRELS, copy.deepcopy(found), [10])
    assert ndcg["NDCG@10"] == pytest.approx(score(QRELS, found, ["ndcg@10"]).means["ndcg@10"], abs=1e-5)


def test_titles_and_texts_are_joined_as_beir_does(model: Any) -> None:
    DenseRetriever(model).encode_corpus(list(CORPUS.values()))
    IndexRetriever(model).search(CORPUS, QUERIES, 3)
    alone, searched = [texts for role, texts in model.encoded if role == "document" and texts]
    assert alone == searched
    assert alone[:4] == [
        "Wings a bird has two wings and flies",
        "Fish  a fish swims in the deep sea",
        "granite is a hard stone",
        "birds and fish are animals",
    ]


def test_token_vectors_are_scored_with_maxsim(token_model: Any) -> None:
    run = IndexRetriever(token_model).search(CORPUS, QUERIES, 2, "cos_sim")
    assert list(run["q1"])[:1] == ["d1"]
    assert run["q1"]["d1"] == pytest.approx(2)  # "bird" and "wings"
    assert run["q2"].keys() == {"d2", "d5"}
    assert run["q2"]["d2"] == pytest.approx(3)  # "Fish", "deep" and "sea"
    with pytest.raises(ValueError, match="words has one vector per token; search with IndexRetriever"):
        DenseRetriever(token_model)


def test_cached_vectors_are_reused(model: Any, tmp_path: Path) -> None:
    first = IndexRetriever(model, cache=tmp_path / "vectors").search(CORPUS, QUERIES, 10)
    model.encoded.clear()
    assert IndexRetriever(model, cache=tmp_path / "vectors").search(CORPUS, QUERIES, 10) == first
    assert not any(texts for _, texts in model.encoded)
