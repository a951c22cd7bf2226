"""LangChain and LlamaIndex retrievers over an index. The framework is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quiver.retrieval.index.documents import FilterLike, as_filter
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.integrations.stores import missing_library
from quiver.retrieval.models.index_model import load_index_model
from quiver.retrieval.records import DenseModel, Document, Query, TokenModel
from quiver.retrieval.search.retrievers import SharedModel, VectorRetriever


class ScoredDocument(NamedTuple):
    """A document and its score."""

    document: Document
    score: float


@dataclass(frozen=True)
class Defaults:
    """Default options of a retriever.

    Attributes:
        k: Number of documents.
        filter: Condition on the documents.
        effort: Preset or search parameters; None for ``balanced``.
        target_recall: Target recall, instead of an effort.
    """

    k: int = 10
    filter: FilterLike = None
    effort: str | Mapping[str, Setting] | None = None
    target_recall: float | None = None


class TextSearcher:
    """An open index with its model, searched with a text; the base of the retriever classes. Thread-safe; texts are encoded one at a time.

    Args:
        index: An index, or its folder.
        model: The model. Default: the one that built the index.
        defaults: Default options.

    Raises:
        InputError: The index or the model cannot be opened, another model built the index, or a condition is malformed.
    """

    def __init__(
        self, index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
    ) -> None:
        self.index = index if isinstance(index, Index) else open_index(index)
        card = self.index.manifest.model
        self.model: DenseModel | TokenModel = load_index_model(card) if model is None else model
        self.index.check_model(self.model.card)
        self.defaults = defaults or Defaults()
        self._where = as_filter(self.defaults.filter)
        self._retriever = VectorRetriever("index", self.index, SharedModel(self.model))  # models are not thread-safe

    def ask(self, text: str, *, k: int | None = None, filter: FilterLike = None) -> list[ScoredDocument]:
        """Return the best documents for a text, best first; with ids only if the index stores no texts.

        Args:
            text: The query.
            k: Number of documents; None for the default.
            filter: Condition on the documents; None for the default.
        """
        chosen = self.defaults
        found = self._retriever.search(
            [Query("query", text)],
            chosen.k if k is None else k,
            filter=self._where if filter is None else as_filter(filter),
            effort=chosen.effort,
            target_recall=chosen.target_recall,
        )
        kept = self.index.manifest.policy.store_text
        ranked = found.run["query"].items()
        return [ScoredDocument(self.index.document(key) if kept else Document(key, ""), score) for key, score in ranked]

    def text_of(self, document: Document) -> str:
        """Text of a document for a prompt, with the title if the index was built with titles."""
        return document.content(use_title=self.index.manifest.policy.use_title)


def metadata_of(answer: ScoredDocument) -> dict[str, object]:
    """Metadata of a result: id, score, title and the fields of the document."""
    document = answer.document
    own = {"id": document.id, "score": answer.score} | ({"title": document.title} if document.title else {})
    return {**(document.metadata or {}), **own}


def langchain_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """Make a LangChain ``BaseRetriever`` over an index.

    Args:
        index: An index, or its folder.
        model: The model. Default: the one that built the index.
        defaults: Number of documents, filter and effort.

    Raises:
        InputError: langchain-core is not installed, or an error of `TextSearcher` (see there).
    """
    try:
        from quiver.retrieval.integrations.langchain import LangChainRetriever
    except ImportError as error:
        raise missing_library("a LangChain retriever", "langchain-core", error) from error
    return LangChainRetriever(searcher=TextSearcher(index, model=model, defaults=defaults))


def llama_index_retriever(
    index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
) -> Any:
    """Make a LlamaIndex ``BaseRetriever`` over an index; arguments and errors as `langchain_retriever`."""
    try:
        from quiver.retrieval.integrations.llama_index import LlamaIndexRetriever
    except ImportError as error:
        raise missing_library("a LlamaIndex retriever", "llama-index-core", error) from error
    return LlamaIndexRetriever(TextSearcher(index, model=model, defaults=defaults))
