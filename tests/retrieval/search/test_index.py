"""The index of users: restrictions, weights and pages of a search, explanations, and changes that the object shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiver import Document, InputError, build_index, evaluate, open_index
from quiver.retrieval.index.filters import Filter
from quiver.retrieval.integrations import langchain_retriever
from quiver.retrieval.records import Hits, Query
from quiver.retrieval.search.index import Index
from quiver.retrieval.search.retrievers import FusedRetriever, RunRetriever
from quiver.retrieval.search.search import Fusion

DOCUMENTS = [Document(f"d{number:02d}", f"word{number % 4} text{number % 3} end", metadata={"part": number}) for number in range(24)]
TEXT = "word1 text2"


@pytest.fixture
def index(tmp_path: Path, word_sum: Any) -> Index:
    built = build_index(DOCUMENTS, word_sum, tmp_path / "index")
    built.model = word_sum
    return built


def test_ids_a_filter_and_an_offset_restrict_a_search(index: Index) -> None:
    whole = [hit.id for hit in index.search(TEXT, 24)]
    chosen = whole[::3]
    assert [hit.id for hit in index.search(TEXT, 24, ids=[*chosen, "unknown"])] == chosen
    assert [hit.id for hit in index.search(TEXT, 24, ids=chosen, filter="part < 12")] == [key for key in chosen if int(key[1:]) < 12]
    assert [hit.id for hit in index.search(TEXT, 5, offset=7)] == whole[7:12]
    assert [hit.id for hit in index.search(TEXT, 5, offset=22)] == whole[22:]
    groups = [hit.group for hit in index.search(TEXT, 24, group_by="part")]
    assert [hit.group for hit in index.search(TEXT, 4, group_by="part", offset=3)] == groups[3:7]
    assert len(index.search(TEXT, ids=[])) == 0
    with pytest.raises(ValueError, match="offset must be >= 0"):
        index.search(TEXT, offset=-1)


def test_weights_are_those_of_the_rankings_in_their_order(index: Index) -> None:
    alone, words = index.search(TEXT, 24), index.search(TEXT, 24, fuse="bm25", weights=(0, 1))
    assert [hit.id for hit in index.search(TEXT, 24, fuse="bm25", weights=(1, 0))] == [hit.id for hit in alone]
    fused = index.search(TEXT, 24, fuse="bm25", weights=(1, 2))
    by_hand = {
        hit.id: 1 / (60 + rank) + 2 * ({key: 1 / (60 + place) for place, key in enumerate([each.id for each in words], 1)}.get(hit.id, 0))
        for rank, hit in enumerate(alone, 1)
    }
    assert {hit.id: hit.score for hit in fused} == pytest.approx(by_hand)
    with pytest.raises(InputError, match="got 1 weights for 2 rankings"):
        index.search(TEXT, fuse="bm25", weights=[1])
    with pytest.raises(InputError, match="pass fuse"):
        index.search(TEXT, weights=[1])
    with pytest.raises(ValueError, match="candidates must be >= 1"):
        index.search(TEXT, fuse="bm25", candidates=0)
    by_scores = index.search(TEXT, 24, fuse="bm25", fusion=Fusion("weighted"))
    assert list(index.search(TEXT, 24, fuse="bm25", fusion="weighted")) == list(by_scores)


def test_one_string_is_one_id_or_one_field(index: Index) -> None:
    assert [hit.id for hit in index.search(TEXT, ids="d05")] == ["d05"]
    assert list(index.explain(TEXT, "d05")) == ["d05"]
    assert index.facets("part") == index.facets(["part"])


def test_an_opened_index_is_fused_and_ranks_again_wherever_its_folder_does(index: Index, tmp_path: Path, word_by_word: Any) -> None:
    words = build_index(DOCUMENTS, "bm25", tmp_path / "words")
    again = build_index(DOCUMENTS, word_by_word, tmp_path / "again")
    again.model = word_by_word
    asked: dict[str, Any] = {"queries": {"q1": TEXT}, "qrels": {"q1": ["d05"]}, "baselines": ()}
    assert evaluate(index, fuse=words, **asked).headline == evaluate(index, fuse=[words], **asked).headline
    assert evaluate(words, fuse=index.model, **asked).headline == evaluate(words, fuse=index, **asked).headline
    reranked = index.search(TEXT, 5, rerank=again)
    run = evaluate(index, rerank=again, documents=None, **asked)
    assert run.system.kind == "re-ranking"
    with pytest.raises(InputError, match="BM25 has no vectors"):
        index.search(TEXT, rerank="bm25")
    pytest.importorskip("langchain_core")
    found = langchain_retriever(index, k=5, fuse=words).invoke(TEXT)
    assert [each.id for each in found] == [hit.id for hit in index.search(TEXT, 5, fuse=words)]
    found = langchain_retriever(index, k=5, rerank=again).invoke(TEXT)
    assert [each.id for each in found] == [hit.id for hit in reranked]


def test_an_index_shows_its_own_changes_and_others_do_not(index: Index) -> None:
    other = open_index(index.path)
    assert index.add([Document("new", "word1 text2 word1 text2", metadata={"part": 99})]) is index
    assert (len(index), len(other), index.search(TEXT, 1)[0].id) == (25, 24, "new")
    assert index.delete(["new"], where="part >= 20") is index
    assert (len(index), index.count("part >= 20"), index.count("part < 20")) == (20, 0, 20)
    assert index.delete(where="part = 1000") is index
    assert index.compact() is index
    assert (len(index.segments), len(open_index(index.path)), index.check().problems) == (1, 20, ())
    assert list(index.facets(["part"], filter="part < 2")["part"].values) == [(0, 1), (1, 1)]
    with pytest.raises(InputError, match="'nowhere'"):
        index.delete("nowhere")
    with pytest.raises(InputError, match="pass ids of documents to delete"):
        index.delete()
    for nothing in ([], Filter()):  # which every document would match
        with pytest.raises(InputError, match="has no condition"):
            index.delete(where=nothing)
    assert len(index) == 20
    with pytest.raises(InputError, match="an index in memory does not change"):
        build_index(DOCUMENTS, "bm25").add([Document("x", "y")])


class Fixed:
    """A user's own retriever: it has no effort, and finds the same documents for every query."""

    name = "fixed"

    def search(self, queries: Sequence[Query], k: int, *, filter: object = None) -> Hits:
        assert filter is None
        return Hits.of([{"d01": 2.0, "d05": 1.0}] * len(queries))

    def explain(self, query: str, documents: Sequence[str]) -> dict[str, Any]:
        return {}

    def describe(self) -> Mapping[str, object]:
        return {"kind": "fixed", "version": 1}


def test_any_retriever_is_evaluated_fused_and_given_to_langchain(index: Index) -> None:
    queries, qrels = {"q1": TEXT, "q2": "word3"}, {"q1": {"d05": 1}, "q2": {"d03": 1}}
    run = RunRetriever({"q1": {"d05": 1.0}, "q2": {"d03": 0.5}})
    found = evaluate(FusedRetriever([index, Fixed(), run], Fusion(weights=(0, 1, 5))), queries=queries, qrels=qrels, baselines=())
    assert found.headline == 1.0
    assert (found.system.kind, found.system.source) == ("fusion", "fixed + run")
    own = evaluate(Fixed(), queries=queries, qrels=qrels, fuse=[index], baselines=(), candidates=50)
    assert own.collections[0].index.parameters["candidates"] == 50
    pytest.importorskip("langchain_core")
    documents = langchain_retriever(FusedRetriever([index, Fixed()], Fusion(weights=(0, 1))), k=2).invoke(TEXT)
    assert [(each.id, each.page_content) for each in documents] == [(key, index.text_of(key)) for key in ("d01", "d05")]


def test_documents_with_an_empty_list_are_groups_of_their_own() -> None:
    documents = [{"id": str(number), "text": "word", "tags": ["x"] * (number > 2)} for number in range(5)]
    hits = build_index(documents, "bm25").search("word", 5, group_by="tags")
    assert sorted(str(hit.group) for hit in hits) == ["0", "1", "2", "x"]
