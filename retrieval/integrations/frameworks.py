"""Any index as a retriever of another framework. The framework is imported when a retriever is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quiver.retrieval.index.index import Index
from quiver.retrieval.integrations.asking import Asker, Defaults
from quiver.retrieval.integrations.targets import missing_library
from quiver.retrieval.protocols import DenseModel, TokenModel


def langchain_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """A LangChain ``BaseRetriever`` over an index.

    Args:
        index: An index, or its folder.
        model: The model; by default the one that built the index.
        defaults: How many documents, under which filter, with which effort.

    Raises:
        InputError: langchain-core is not installed, or as `quiver.retrieval.integrations.asking.Asker`.
    """
    try:
        from quiver.retrieval.integrations.langchain import QuiverRetriever
    except ImportError as error:
        raise missing_library("a LangChain retriever", "langchain-core", error) from error
    return QuiverRetriever(asker=Asker(index, model=model, defaults=defaults))


def llama_index_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """A LlamaIndex ``BaseRetriever`` over an index; arguments and errors as of `langchain_retriever`."""
    try:
        from quiver.retrieval.integrations.llama_index import QuiverRetriever
    except ImportError as error:
        raise missing_library("a LlamaIndex retriever", "llama-index-core", error) from error
    return QuiverRetriever(Asker(index, model=model, defaults=defaults))
