"""Search an index with its model: runs, and errors before encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder.errors import InputError
from quiver.retrieval.index import BuildOptions, build_index
from quiver.retrieval.records import DenseModel, Document, Query
from quiver.retrieval.search.retrievers import IndexSearcher

DOCUMENTS = [Document("a", "granite is hard"), Document("b", "a bird flies"), Document("c", "the sea is deep")]
QUERIES = [Query("q2", "deep sea"), Query("q1", "bird")]


def test_an_exact_index_is_searched_where_the_model_is(word_sum: Any) -> None:
    """``meta`` stands for a GPU that is not there: what is computed on it has no values."""
    index = build_index(DOCUMENTS, word_sum)
    found = IndexSearcher(index, word_sum).search(QUERIES, 2).ids
    word_sum.device = torch.device("meta")
    with pytest.raises(NotImplementedError, match="meta"):
        IndexSearcher(index, word_sum).search(QUERIES, 2)
    word_sum.device = torch.device("cpu")
    assert IndexSearcher(index, word_sum).search(QUERIES, 2).ids == found


def test_invalid_searches_are_refused_before_encoding(tmp_path: Path, word_sum: DenseModel, other_word_sum: DenseModel) -> None:
    folder = build_index(DOCUMENTS, word_sum, tmp_path / "i")
    calls = len(word_sum.calls)
    with pytest.raises(InputError, match="query id 'q1' occurs 2 times"):
        IndexSearcher(folder, word_sum).search(QUERIES, 2).to_run(["q1", "q1"])
    calls += 1
    with pytest.raises(InputError, match="there are no queries"):
        IndexSearcher(folder, word_sum).search([], 2)
    with pytest.raises(ValueError, match="k must be >= 1"):
        IndexSearcher(folder, word_sum).search(QUERIES, 0)
    with pytest.raises(InputError, match="but the model given is word-sum-b"):
        IndexSearcher(folder, other_word_sum).search(QUERIES, 2)
    assert len(word_sum.calls) == calls
    assert other_word_sum.calls == []
    in_memory = build_index(DOCUMENTS, word_sum)
    assert IndexSearcher(in_memory, word_sum).search(QUERIES, 2).ids == IndexSearcher(folder, word_sum).search(QUERIES, 2).ids
    with pytest.raises(InputError, match=r"in memory.*but the model given is word-sum-b"):
        IndexSearcher(in_memory, other_word_sum).search(QUERIES, 2)


def test_a_target_recall_is_passed_to_the_index(tmp_path: Path, word_sum: DenseModel) -> None:
    many = [Document(f"d{number:03d}", f"word{number} text{number % 7} end{number % 3}") for number in range(120)]
    options = BuildOptions("ivf-dense", {"nlist": 8})
    index = build_index(many, word_sum, tmp_path / "i", options=options)
    searcher = IndexSearcher(index, word_sum)
    wanted = searcher.search(QUERIES, 10, effort=index.search_params_for(0.9, 10)).ids
    assert searcher.search(QUERIES, 10, effort=0.9).ids == wanted
    calls = len(word_sum.calls)
    with pytest.raises(InputError, match="up to 100 hits, not for 110"):
        searcher.search(QUERIES, 110, effort=0.9)
    with pytest.raises(ValueError, match="target_recall must be above 0"):
        searcher.search(QUERIES, 10, effort=2)
    assert len(word_sum.calls) == calls, "said before anything is encoded"
    with pytest.raises(ValueError, match="give either effort or target_recall, not both"):
        index.search("deep sea", 10, target_recall=0.9, effort="fast")
