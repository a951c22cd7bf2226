"""LangChain and LlamaIndex retrievers return the texts, fields and scores of a search, with filters, synchronously and asynchronously."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver import build_index
from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter, IndexReader
from quiver.retrieval.integrations import langchain_retriever, llama_index_retriever
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search.retrievers import FusedRetriever, IndexSearcher
from tests.retrieval.integrations.conftest import DOCUMENTS

TEXT = "word1 word2"


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Skip where a library is missing; collecting the tests, in each process, should not take the second that importing them takes."""
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")


def expected(index: IndexReader, model: Any, k: int, conditions: list[str] | None = None) -> list[tuple[str, float]]:
    filter = Filter.parse(conditions) if conditions else None
    return list(IndexSearcher(index, model).search([Query("q", TEXT)], k, filter=filter).ranking(0).items())


def test_the_langchain_retriever_returns_the_documents_of_a_search(index: IndexReader, model: Any) -> None:
    retriever = langchain_retriever(index, model=model, k=4, filter=["odd"])
    found = retriever.invoke(TEXT)
    assert [(each.id, each.metadata["quiver_score"]) for each in found] == expected(index, model, 4, ["odd"])
    first = index.document(found[0].id)
    assert found[0].page_content == first.content()
    assert {**(first.metadata or {}), "title": first.title}.items() <= found[0].metadata.items()
    again = asyncio.run(retriever.ainvoke(TEXT, k=2, filter=["part<9"]))
    assert [(each.id, each.metadata["quiver_score"]) for each in again] == expected(index, model, 2, ["part<9"])
    assert [[each.id for each in batch] for batch in retriever.batch([TEXT] * 3)] == [[each.id for each in found]] * 3


def test_the_llama_index_retriever_returns_the_documents_of_a_search(index: IndexReader, model: Any) -> None:
    retriever = llama_index_retriever(index.path, model=model, k=3, filter=Filter.parse(["part>=5"]), effort="exact")
    found = retriever.retrieve(TEXT)
    assert [(each.node.node_id, each.score) for each in found] == expected(index, model, 3, ["part>=5"])
    assert found[0].text == index.text_of(found[0].node.node_id)
    assert found[0].metadata["part"] >= 5
    assert "part" not in found[0].node.get_content(metadata_mode="llm")
    again = asyncio.run(retriever.aretrieve(TEXT))
    assert [(each.node.node_id, each.score) for each in again] == [(each.node.node_id, each.score) for each in found]


def test_a_retriever_may_search_several_indexes_in_memory() -> None:
    parts = [IndexSearcher(build_index([Document(key, f"{key} {TEXT}")], "bm25")) for key in ("a", "b")]
    found = langchain_retriever(FusedRetriever(parts)).invoke(TEXT)
    assert {each.id: each.page_content for each in found} == {key: f"{key} {TEXT}" for key in ("a", "b")}


@pytest.mark.parametrize("make", [langchain_retriever, llama_index_retriever])
def test_invalid_retriever_options_are_refused(
    make: Callable[..., Any], index: IndexReader, model: Any, other_word_sum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="built with"):
        make(index, model=other_word_sum)
    with pytest.raises(InputError, match="filter 'nonsense'"):
        make(index, model=model, filter=["nonsense"])
    with pytest.raises(ValueError, match="k must be"):
        make(index, model=model, k=0)
    with pytest.raises(TypeError, match="top_k"):
        make(index, model=model, top_k=3)
    name = f"quiver.retrieval.integrations.{'langchain' if make is langchain_retriever else 'llama_index'}"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"pip install 'quiver-retrieval\[interop\]'"):
        make(index, model=model)


def test_the_langchain_class_and_its_calls_refuse_unknown_arguments(index: IndexReader, model: Any) -> None:
    retriever = langchain_retriever(index, model=model)
    with pytest.raises(ValueError, match="search_kwargs"):
        type(retriever)(ask=retriever.ask, search_kwargs={"k": 3})
    for name in ("filters", "top_k"):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'; pass k=, the number of documents, and filter="):
            retriever.invoke(TEXT, **{name: 3})
        with pytest.raises(TypeError, match=f"unknown argument '{name}'"):
            asyncio.run(retriever.ainvoke(TEXT, **{name: 3}))


FIELDS = {"score": 57, "id": "thread-9", "title": "own", "text": "own", "quiver_score": "own", "rank": 3, "metadata": ["a", "b"]}


@pytest.mark.parametrize("names", [list(FIELDS), ["score", "id"], ["title"], []])
def test_fields_of_documents_keep_their_names_and_values(tmp_path: Path, model: Any, names: list[str]) -> None:
    fields = {name: FIELDS[name] for name in names}
    index = build_index([Document("q1", "word1 word2", "Title", fields)], model, tmp_path / "index")
    (found,) = langchain_retriever(index, model=model).invoke(TEXT)
    (node,) = llama_index_retriever(index, model=model).retrieve(TEXT)
    added = {"title": "Title"} | fields
    assert found.metadata == {"quiver_score": node.score} | added
    assert node.node.metadata == added
    assert (found.id, node.node.node_id) == ("q1", "q1")


@pytest.mark.parametrize("fuse", ["bm25", ["bm25"], []])
@pytest.mark.parametrize("rerank", [False, True])
def test_retrievers_fuse_and_re_rank_as_a_search_does(
    tmp_path: Path, word_sum: Any, word_by_word: Any, fuse: str | list[str], rerank: bool
) -> None:
    dense = build_index(DOCUMENTS, word_sum, tmp_path / "dense")
    by = word_by_word if rerank else None
    expected = dense.search(TEXT, 5, fuse=fuse, rerank=by, filter="odd")
    found = langchain_retriever(dense, model=word_sum, k=5, filter="odd", fuse=fuse, rerank=by).invoke(TEXT)
    assert [(each.id, each.metadata["quiver_score"]) for each in found] == [(hit.id, pytest.approx(hit.score)) for hit in expected]
    nodes = llama_index_retriever(dense, model=word_sum, k=5, filter="odd", fuse=fuse, rerank=by).retrieve(TEXT)
    assert [(each.node.node_id, each.score) for each in nodes] == [(hit.id, pytest.approx(hit.score)) for hit in expected]
