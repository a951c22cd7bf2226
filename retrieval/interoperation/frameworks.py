"""Any index as a retriever of another framework. The framework is imported when a retriever is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval.indexes.index import Index
from retrieval.interoperation.asking import Asker, Defaults
from retrieval.interoperation.targets import missing_library
from retrieval.protocols import DenseModel, TokenModel


def langchain_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """A LangChain ``BaseRetriever`` over an index.

    Args:
        index: An index, or its folder.
        model: The model; by default the one that built the index.
        defaults: How many documents, under which filter, with which effort.

    Raises:
        InputError: langchain-core is not installed, or as `retrieval.interoperation.asking.Asker`.
    """
    try:
        from retrieval.interoperation.langchain import QuiverRetriever
    except ImportError as error:
        raise missing_library("a LangChain retriever", "langchain-core", error) from error
    return QuiverRetriever(asker=Asker(index, model=model, defaults=defaults))


def llama_index_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """A LlamaIndex ``BaseRetriever`` over an index; arguments and errors as of `langchain_retriever`."""
    try:
        from retrieval.interoperation.llama_index import QuiverRetriever
    except ImportError as error:
        raise missing_library("a LlamaIndex retriever", "llama-index-core", error) from error
    return QuiverRetriever(Asker(index, model=model, defaults=defaults))
