"""LangChain and LlamaIndex retrievers return the texts, fields and scores of a search, with filters, synchronously and asynchronously."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter, Index
from quiver.retrieval.integrations import langchain_retriever, llama_index_retriever
from quiver.retrieval.integrations.retrievers import Defaults
from quiver.retrieval.records import Query
from quiver.retrieval.search.search import search

TEXT = "word1 word2"


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Skip where a library is missing; collecting the tests, in each process, should not take the second that importing them takes."""
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")


def expected(index: Index, model: Any, k: int, conditions: list[str] | None = None) -> list[tuple[str, float]]:
    filter = Filter.parse(conditions) if conditions else None
    return list(search(index, model, [Query("q", TEXT)], k, filter=filter).run["q"].items())


def test_the_langchain_retriever_returns_the_documents_of_a_search(index: Index, model: Any) -> None:
    retriever = langchain_retriever(index, model=model, defaults=Defaults(k=4, filter=["odd=true"]))
    found = retriever.invoke(TEXT)
    assert [(each.id, each.metadata["score"]) for each in found] == expected(index, model, 4, ["odd=true"])
    first = index.document(found[0].id)
    assert found[0].page_content == first.content()
    assert {**(first.metadata or {}), "title": first.title}.items() <= found[0].metadata.items()
    again = asyncio.run(retriever.ainvoke(TEXT, k=2, filter=["part<9"]))
    assert [(each.id, each.metadata["score"]) for each in again] == expected(index, model, 2, ["part<9"])
    assert [[each.id for each in batch] for batch in retriever.batch([TEXT] * 3)] == [[each.id for each in found]] * 3


def test_the_llama_index_retriever_returns_the_documents_of_a_search(index: Index, model: Any) -> None:
    retriever = llama_index_retriever(index.path, model=model, defaults=Defaults(k=3, filter=Filter.parse(["part>=5"]), effort="exact"))
    found = retriever.retrieve(TEXT)
    assert [(each.node.node_id, each.score) for each in found] == expected(index, model, 3, ["part>=5"])
    assert found[0].text == index.text_of(found[0].node.node_id)
    assert found[0].metadata["part"] >= 5
    assert "part" not in found[0].node.get_content(metadata_mode="llm")
    again = asyncio.run(retriever.aretrieve(TEXT))
    assert [(each.node.node_id, each.score) for each in again] == [(each.node.node_id, each.score) for each in found]


@pytest.mark.parametrize("make", [langchain_retriever, llama_index_retriever])
def test_invalid_retriever_options_are_refused(
    make: Callable[..., Any], index: Index, model: Any, other_word_sum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="built with"):
        make(index, model=other_word_sum)
    with pytest.raises(InputError, match="filter 'nonsense'"):
        make(index, model=model, defaults=Defaults(filter=["nonsense"]))
    name = f"quiver.retrieval.integrations.{'langchain' if make is langchain_retriever else 'llama_index'}"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"pip install 'quiver-retrieval\[interop\]'"):
        make(index, model=model)
