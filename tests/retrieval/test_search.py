"""Queries in, a run out."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder.errors import InputError
from retrieval.indexes import Filter, build_in_memory, build_index
from retrieval.protocols import DenseModel, TokenModel
from retrieval.records import Document, Query, TokenCounts
from retrieval.run import ranked
from retrieval.search import search

DOCUMENTS = [Document("a", "granite is hard"), Document("b", "a bird flies"), Document("c", "the sea is deep")]
QUERIES = [Query("q2", "deep sea"), Query("q1", "bird")]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_run_in_the_order_of_the_queries(
    tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str, on_disk: bool
) -> None:
    model = word_sum if kind == "dense" else word_by_word
    index = build_index(DOCUMENTS, model, tmp_path / "i") if on_disk else build_in_memory(model, DOCUMENTS).index
    result = search(index, model, QUERIES, 2)
    assert list(result.run) == ["q2", "q1"]
    assert {query: ranked(scores)[0] for query, scores in result.run.items()} == {"q2": "c", "q1": "b"}
    for scores in result.run.values():
        assert list(scores) == ranked(scores)
        assert len(scores) == 2
    assert result.counts == TokenCounts(2, 3, 0, 0)
    assert len(search(index, model, QUERIES, 1000).run["q1"]) == 3


def test_queries_are_encoded_as_queries(word_sum: DenseModel) -> None:
    index = build_in_memory(word_sum, DOCUMENTS).index
    search(index, word_sum, QUERIES, 2)
    assert word_sum.calls[-1] == ("query", ["deep sea", "bird"])


def test_what_cannot_be_searched_is_refused_before_encoding(tmp_path: Path, word_sum: DenseModel, other_word_sum: DenseModel) -> None:
    folder = build_index(DOCUMENTS, word_sum, tmp_path / "i")
    calls = len(word_sum.calls)
    with pytest.raises(InputError, match="query id 'q1' is there 2 times"):
        search(folder, word_sum, [*QUERIES, Query("q1", "again")], 2)
    with pytest.raises(InputError, match="there are no queries"):
        search(folder, word_sum, [], 2)
    with pytest.raises(ValueError, match="k must be >= 1"):
        search(folder, word_sum, QUERIES, 0)
    with pytest.raises(InputError, match="but the model given is word-sum-b"):
        search(folder, other_word_sum, QUERIES, 2)
    assert len(word_sum.calls) == calls
    assert other_word_sum.calls == []
    in_memory = build_in_memory(word_sum, DOCUMENTS).index
    by_index = search(folder, word_sum, QUERIES, 2).run
    assert search(in_memory, other_word_sum, QUERIES, 2).run == {query: pytest.approx(scores) for query, scores in by_index.items()}
    with pytest.raises(ValueError, match="know no metadata to filter by"):
        search(in_memory, word_sum, QUERIES, 2, where=Filter())


def test_a_filter_is_applied_inside_the_search(tmp_path: Path, word_sum: DenseModel) -> None:
    documents = [document._replace(metadata={"year": 2000 + row}) for row, document in enumerate(DOCUMENTS)]
    index = build_index(documents, word_sum, tmp_path / "i")
    found = search(index, word_sum, QUERIES, 3, where=Filter.parse(["year<2002"])).run
    assert {query: sorted(scores) for query, scores in found.items()} == {"q2": ["a", "b"], "q1": ["a", "b"]}
